# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Figures: what is drawn is what was measured, and it is readable at 60 reads."""

import numpy as np
import pytest
from conftest import tiny_config, tiny_qwen3_config

from depthroute.diagnostics import ReadStatistics
from depthroute.diagnostics.plots import routing_by_depth, routing_heatmap, source_columns, weight_matrix
from depthroute.modeling.depth_schedule import live_reads, read_name, source_labels


def made_up_reads(preset: str, layers: int, **values) -> dict[str, ReadStatistics]:
    """Every live read of a preset, with weights that rise with the source's depth."""
    config = tiny_config(preset, base=tiny_qwen3_config(num_hidden_layers=layers), **values)
    reads = {}
    for s in live_reads(config):
        labels = source_labels(config, s)
        weights = np.arange(1, len(labels) + 1) / sum(range(len(labels) + 1))
        reads[f"model.{read_name(config, s)}"] = ReadStatistics(labels, weights.max(), 1.0, 0.5, weights.tolist())
    return reads


@pytest.mark.parametrize(
    ("preset", "columns"),
    [
        (
            "attnres",
            ["embedding", "layer 0 attn", "layer 0 mlp", "layer 1 attn", "layer 1 mlp", "layer 2 attn", "layer 2 mlp"],
        ),
        ("attnres-block", ["embedding", "block 0", "partial"]),
        ("delta-block", ["embedding", "block 0"]),
        ("attnres-states", ["embedding", *(f"state {s}" for s in range(1, 7))]),
    ],
)
def test_columns_are_in_order_of_depth(preset, columns):
    reads = made_up_reads(preset, 3)
    assert source_columns(reads) == columns
    matrix = weight_matrix(reads)
    assert matrix.shape == (len(reads), len(columns))
    np.testing.assert_allclose(np.nansum(matrix, axis=1), 1)  # every weight has its place
    for row, read in zip(matrix, reads.values(), strict=True):
        drawn = {column: weight for column, weight in zip(columns, row, strict=True) if not np.isnan(weight)}
        assert drawn == dict(zip(read.sources, read.mean_weights, strict=True))


def test_heatmap_draws_the_matrix_and_names_its_axes():
    reads = made_up_reads("attnres-block", 4)
    figure = routing_heatmap(reads, "some model")
    axes, bar = figure.axes
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array().filled(np.nan), weight_matrix(reads))
    assert [label.get_text() for label in axes.get_xticklabels()] == source_columns(reads)
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["layer 0 mlp", "layer 1 attn"]
    assert axes.get_xlabel() and axes.get_ylabel() and "weight" in bar.get_ylabel()
    assert "some model" in figure.get_suptitle()
    assert f"{next(iter(reads.values())).mean_weights[0]:.2f}" in {text.get_text() for text in axes.texts}


def test_heatmap_of_sixty_reads_keeps_its_labels_apart():
    reads = made_up_reads("attnres", 30)
    assert len(reads) == 60
    figure = routing_heatmap(reads)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    for labels, side in ((axes.get_yticklabels(), "height"), (axes.get_xticklabels(), "width")):
        boxes = [label.get_window_extent() for label in labels]
        start = "y0" if side == "height" else "x0"
        steps = np.abs(np.diff([getattr(box, start) for box in boxes]))
        assert len(boxes) >= 60
        assert max(getattr(box, side) for box in boxes) <= steps.min()


def test_depth_plot_draws_every_read_at_its_depth():
    reads = made_up_reads("attnres", 3)
    figure = routing_by_depth(reads)
    upper, lower = figure.axes
    lines = {line.get_label(): line.get_xydata().T.tolist() for line in upper.lines}
    assert lines["attention reads"][0] == [1, 2]
    assert lines["MLP reads"][0] == [0.5, 1.5, 2.5]
    assert lines["final read"] == [[3], [list(reads.values())[-1].max_weight]]
    assert lines["uniform routing"][1] == pytest.approx([1 / n for n in (2, 3, 4, 5, 6, 7)])
    assert "max" in upper.get_ylabel() and "entropy" in lower.get_ylabel() and "layer" in lower.get_xlabel()
    assert all(value == 0.5 for line in lower.lines if line.get_label() == "MLP reads" for value in line.get_ydata())
