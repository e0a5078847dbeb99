# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Figures of routing. Drawn with matplotlib's Agg canvas, without touching its global state or needing a display.

Colours are viridis and two of Okabe and Ito's, which stay apart under the common kinds of colour blindness; attention and
MLP differ in marker too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..extras import require
from .metrics import ReadStatistics


if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BRANCHES = {
    "attn": ("attention reads", "#0072B2", "o"),
    "mlp": ("MLP reads", "#D55E00", "s"),
    "final": ("final read", "#000000", "D"),
}
_ABSENT = "#e6e6e6"
_ANNOTATED_COLUMNS = 12


def read_label(name: str) -> str:
    """`model.layers.3.attn_read` → `layer 3 attn`; `model.final_read` → `final`."""
    found = re.search(r"layers\.(\d+)\.(attn|mlp)_read$", name)
    return f"layer {found[1]} {found[2]}" if found else "final"


def _source_order(label: str) -> tuple[int, int]:
    """Depth of a source's label, as `depth_schedule.source_labels` writes it."""
    if label == "embedding":
        return (0, 0)
    if label == "partial":
        return (2, 0)
    index = int(re.findall(r"\d+", label)[0])
    return (1, 2 * index + label.endswith("mlp"))


def source_columns(reads: Mapping[str, ReadStatistics]) -> list[str]:
    """Every source that some read has, by depth: `embedding` first, `partial` last."""
    return sorted({source for read in reads.values() for source in read.sources}, key=_source_order)


def weight_matrix(reads: Mapping[str, ReadStatistics]) -> np.ndarray:
    """Mean weights [reads, sources], float64; NaN where a read does not have the source."""
    columns = {source: index for index, source in enumerate(source_columns(reads))}
    matrix = np.full((len(reads), len(columns)), np.nan)
    for row, read in enumerate(reads.values()):
        matrix[row, [columns[source] for source in read.sources]] = read.mean_weights
    return matrix


def routing_heatmap(reads: Mapping[str, ReadStatistics], subtitle: str = "") -> "Figure":
    """Mean routing weights, one row per read (the first at the top) and one column per source.

    The colour scale is the same in every figure: 0 to 1 by the square root, since uniform routing over 60 sources has
    weights of 0.02. Sources that a read does not have are grey.

    Args:
        reads: statistics by module path, in order of depth; at least one.
        subtitle: a second line for the title: model, text, tokens.

    Raises:
        Refused: matplotlib is not installed.
    """
    require("matplotlib", "plot")
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    columns, matrix = source_columns(reads), weight_matrix(reads)
    rows = [read_label(name) for name in reads]
    annotated = len(columns) <= _ANNOTATED_COLUMNS
    width = 3.2 + (0.55 if annotated else 0.21) * len(columns)
    figure = Figure(figsize=(max(width, 6.4), max(2.4 + 0.21 * len(rows), 3.6)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(matrix, cmap="viridis", norm=PowerNorm(0.5, 0, 1), aspect="auto", interpolation="nearest")
    axes.set_facecolor(_ABSENT)
    slant = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if annotated else {"rotation": 90}
    axes.set_xticks(range(len(columns)), columns, fontsize=8, **slant)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_xlabel("source (by depth →)")
    axes.set_ylabel("read (← by depth)")
    _set_title(figure, "Depth routing: mean weight of each source in each read", subtitle)
    if annotated:
        for row, column in zip(*np.nonzero(~np.isnan(matrix)), strict=True):
            value = matrix[row, column]
            colour = "black" if value > 0.4 else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.02, 0.1, 0.25, 0.5, 0.75, 1], fraction=0.05, pad=0.02)
    bar.set_label("mean weight p (square-root scale)")
    return figure


def routing_by_depth(reads: Mapping[str, ReadStatistics], subtitle: str = "") -> "Figure":
    """Largest weight and normalised entropy of every read against depth, each with its value under uniform routing.

    Args:
        reads: statistics by module path, in order of depth; at least one.
        subtitle: a second line for the title.

    Raises:
        Refused: matplotlib is not installed.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    labels = [read_label(name) for name in reads]
    depth = _depths(labels)
    kinds = [label.split()[-1] for label in labels]
    panels: list[tuple[str, list[float], list[float]]] = [
        (
            "largest weight, max p",
            [read.max_weight for read in reads.values()],
            [1 / len(read.sources) for read in reads.values()],
        ),
        ("entropy / ln S", [read.entropy_normalized for read in reads.values()], [1.0] * len(reads)),
    ]
    figure = Figure(figsize=(8, 6.4), dpi=150, layout="constrained")
    for axes, (name, values, uniform) in zip(figure.subplots(2, 1, sharex=True), panels, strict=True):
        axes.plot(depth, uniform, color="0.45", linestyle="--", linewidth=1, label="uniform routing")
        axes.plot(depth, values, color="0.75", linewidth=1, zorder=1)
        for kind, (branch, colour, marker) in _BRANCHES.items():
            at = [index for index, other in enumerate(kinds) if other == kind]
            if at:
                points = [depth[index] for index in at], [values[index] for index in at]
                axes.plot(*points, marker, color=colour, markersize=5, label=branch, zorder=2)
        axes.set_ylim(-0.03, 1.05)
        axes.set_ylabel(f"{name}\n(mean over tokens)")
        axes.grid(alpha=0.3)
    axes.set_xlabel("layer (MLP reads at half a layer more)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    _set_title(figure, "Depth routing by depth", subtitle)
    return figure


def _depths(labels: Sequence[str]) -> list[float]:
    """Position of reads on the axis of layers: i for attention, i + ½ for MLP, and after all of them the final read."""
    depth: list[float] = []
    for label in labels:
        if label == "final":
            depth.append(np.floor(depth[-1]) + 1 if depth else 0.0)
        else:
            depth.append(int(label.split()[1]) + (0.5 if label.endswith("mlp") else 0.0))
    return depth


def _set_title(figure: "Figure", title: str, subtitle: str) -> None:
    figure.suptitle(f"{title}\n{subtitle}" if subtitle else title, fontsize=10)
