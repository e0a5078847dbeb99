# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Figures: what is drawn is what was measured, and it is readable at 60 reads."""

import numpy as np
import pytest
from conftest import tiny_config, tiny_qwen3_config

from depthroute.diagnostics import (
    NormGrowth,
    ReadStatistics,
    RescueGain,
    SourceSimilarity,
    StreamCKA,
    source_usage,
)
from depthroute.diagnostics.plots import (
    cka_heatmaps,
    divergence_by_layer,
    norms_by_depth,
    rescue_bars,
    routing_by_depth,
    routing_heatmap,
    similarity_by_depth,
    source_columns,
    usage_by_depth,
    weight_matrix,
)
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
        (
            "wav",
            ["embedding", "block 0", "block 0 phase", "block 0 split", "partial", "partial phase", "partial split"],
        ),
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
    figure = routing_heatmap({"main": reads}, "some model")
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
    figure = routing_heatmap({"main": reads})
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
    figure = routing_by_depth({"main": reads})
    upper, lower = figure.axes
    lines = {line.get_label(): line.get_xydata().T.tolist() for line in upper.lines}
    assert lines["attention reads"][0] == [1, 2]
    assert lines["MLP reads"][0] == [0.5, 1.5, 2.5]
    assert lines["final read"] == [[3], [list(reads.values())[-1].max_weight]]
    assert lines["uniform routing"][1] == pytest.approx([1 / n for n in (2, 3, 4, 5, 6, 7)])
    assert "max" in upper.get_ylabel() and "entropy" in lower.get_ylabel() and "layer" in lower.get_xlabel()
    assert all(value == 0.5 for line in lower.lines if line.get_label() == "MLP reads" for value in line.get_ydata())


def named(figure):
    """Labels of a figure's axes, titles and legends: all must be there for a person to read it."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        shared = (
            not axes.get_subplotspec() or not axes.get_subplotspec().is_last_row()
        )  # a colour bar, or an upper panel
        assert axes.get_ylabel() and (axes.get_xlabel() or shared)
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    return {text.get_text() for legend in legends for text in legend.get_texts()}


def test_two_streams_and_two_routes_have_a_panel_each():
    for routes in (("stream 0", "stream 1"), ("main", "value")):
        reads = made_up_reads("rd-attnres", 4)
        attention = {name: read for name, read in reads.items() if "attn" in name}
        by_route = {routes[0]: reads, routes[1]: attention if routes[1] == "value" else reads}
        heatmap, depth = routing_heatmap(by_route), routing_by_depth(by_route)
        images = [axes.images[0] for axes in heatmap.axes[:2]]
        for image, of_route in zip(images, by_route.values(), strict=True):
            np.testing.assert_array_equal(image.get_array().filled(np.nan), weight_matrix(of_route))
        assert len(depth.axes) == 4
        titles = [axes.get_title() for axes in heatmap.axes[:2]]
        assert all(titles) and titles[0] != titles[1]
        assert {"attention reads", "MLP reads", "final read", "uniform routing"} == named(depth)


def test_usage_draws_shares_and_uniform_routing():
    config = tiny_config("dar", base=tiny_qwen3_config(num_hidden_layers=4))
    reads = made_up_reads("dar", 4)
    usage = source_usage(reads, config)
    figure = usage_by_depth({"stream 0": usage, "stream 1": usage})
    left, right = figure.axes
    heights = [bar.get_height() for bar in left.containers[0]]
    assert heights == [entry["mean"] for entry in usage.by_source]
    assert [label.get_text() for label in left.get_xticklabels()] == source_columns(reads)
    line = next(line for line in right.lines if line.get_label() == "stream 1")
    assert line.get_xydata().tolist() == [[e["sublayers"] / 2, e["share"]] for e in usage.by_distance]
    assert {"stream 0", "stream 1", "uniform routing"} <= named(figure) and "layers" in right.get_xlabel()


def test_similarity_draws_lines_and_the_last_large_read():
    small = SourceSimilarity(["embedding", "block 0"], [[1, 0.5], [0.5, 1]], 0.5, 0.5)
    large = SourceSimilarity(["embedding", "block 0", "partial"], (np.eye(3) * 0.8 + 0.2).tolist(), 0.2, 0.1)
    reads = {"layers.0.mlp_read": small, "layers.1.attn_read": large, "final_read": small}
    figure = similarity_by_depth({"main": reads})
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    assert list(lines["all pairs"]) == [0.5, 0.2, 0.5] and list(lines["neighbours in depth"]) == [0.5, 0.1, 0.5]
    np.testing.assert_array_equal(figure.axes[1].images[0].get_array(), np.array(large.cosine))
    assert "layer 1 attn" in figure.axes[1].get_title() and named(figure)


def test_divergence_has_its_ceiling():
    figure = divergence_by_layer({"model.layers.1.attn_read": 0.25, "model.layers.2.attn_read": 0.5})
    (axes,) = figure.axes
    bars = [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.containers[0]]
    assert bars == [(pytest.approx(1), 0.25), (pytest.approx(2), 0.5)]
    assert axes.lines[0].get_ydata()[0] == pytest.approx(np.log(2)) and "nats" in axes.get_ylabel()
    assert "disjoint routes: ln 2" in named(figure)


@pytest.mark.parametrize("streams", [2, 4])
def test_cka_panels_have_the_streams_on_their_axes(streams):
    pairs = [
        {"streams": [i, j], "cka": [[1.0, 0.1 * j], [0.2, float("nan")]], "same_depth": 1.0, "other_depths": 0.2}
        for i in range(streams)
        for j in range(i + 1, streams)
    ]
    figure = cka_heatmaps(StreamCKA([0, 8], pairs), 4)
    drawn = [axes for axes in figure.axes if axes.images]
    for axes, pair in zip(drawn, pairs, strict=True):
        assert axes.images[0].get_array()[0, 1] == pair["cka"][0][1]
        assert (f"stream {pair['streams'][0]}" in axes.get_ylabel()) and (
            f"stream {pair['streams'][1]}" in axes.get_xlabel()
        )
        assert [label.get_text() for label in axes.get_xticklabels()] == ["layer 0 attn", "final"]
    figure.draw_without_rendering()


@pytest.mark.parametrize("loss", [[0.5, -0.75], None], ids=["with a loss", "without"])
def test_rescue_bars(loss):
    figure = rescue_bars(RescueGain([0.25, float("nan")], loss, None))
    (axes,) = figure.axes
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers]
    np.testing.assert_equal(heights, [[0.25, float("nan")]] + ([loss] if loss else []))
    low, high = axes.get_ylim()
    assert high > 1 and low < min([0, *(loss or [])])
    assert "all of the output" in named(figure)


def test_norms_are_on_a_logarithmic_axis():
    norms = NormGrowth([1, 2, 4], [1, 1, 2], [1, 1.5, 3], [0.5, 0.25], [[1, 1, 1], [2, 2, 2]], 4.0)
    figure = norms_by_depth(norms)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert axes.lines[0].get_xydata().tolist() == [[0, 1], [0.5, 2], [1, 4]]
    assert len(axes.lines) == 6 and "4-fold" in figure.get_suptitle()
    assert "each mHC stream (mean)" in named(figure)
