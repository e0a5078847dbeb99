# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Figures. Drawn with matplotlib's Agg canvas, without touching its global state or needing a display.

Colours are viridis and Okabe and Ito's, which stay apart under the common kinds of colour blindness; what a colour tells
apart differs in marker, line style or place too.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np

from ..extras import require
from .diagnose import Diagnosis, Reads
from .geometry import NormGrowth, SourceSimilarity, StreamCKA
from .metrics import ReadStatistics, SourceUsage, read_sublayer, source_order
from .rescue import RescueGain


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BRANCHES = {
    "attn": ("attention reads", "#0072B2", "o"),
    "mlp": ("MLP reads", "#D55E00", "s"),
    "final": ("final read", "#000000", "D"),
}
_SERIES = [("#0072B2", "o", "-"), ("#D55E00", "s", "--"), ("#009E73", "^", "-."), ("#CC79A7", "D", ":")]
_ABSENT = "#e6e6e6"
_ANNOTATED_COLUMNS = 12
_TITLES = {
    "main": "",
    "value": "V route of attention",
    "stream 0": "stream 0",
    "stream 1": "stream 1",
}
_DEPTH_AXIS = "layer (MLP reads at half a layer more)"


def read_label(name: str) -> str:
    """`model.layers.3.attn_read` → `layer 3 attn`; `model.final_read` → `final`."""
    found = re.search(r"layers\.(\d+)\.(attn|mlp)_read$", name)
    return f"layer {found[1]} {found[2]}" if found else "final"


def _read_title(name: str) -> str:
    return "the final read" if read_label(name) == "final" else f"the read of {read_label(name)}"


def sublayer_label(s: int, layers: int) -> str:
    """`layer 3 attn`, or `final` for s = 2L."""
    return "final" if s == 2 * layers else f"layer {s // 2} {'mlp' if s % 2 else 'attn'}"


def source_columns(reads: Mapping[str, ReadStatistics]) -> list[str]:
    """Every source that some read has, by depth: `embedding` first, `partial` last, details behind their block."""
    return sorted({source for read in reads.values() for source in read.sources}, key=source_order)


def weight_matrix(reads: Mapping[str, ReadStatistics]) -> np.ndarray:
    """Mean weights [reads, sources], float64; NaN where a read does not have the source."""
    columns = {source: index for index, source in enumerate(source_columns(reads))}
    matrix = np.full((len(reads), len(columns)), np.nan)
    for row, read in enumerate(reads.values()):
        matrix[row, [columns[source] for source in read.sources]] = read.mean_weights
    return matrix


def _route_title(route: str, routes: Mapping[str, Any]) -> str:
    return "QK route of attention; MLP and final reads" if route == "main" and len(routes) > 1 else _TITLES[route]


def _figure(width: float, height: float) -> "Figure":
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def _set_title(figure: "Figure", title: str, subtitle: str) -> None:
    figure.suptitle(f"{title}\n{subtitle}" if subtitle else title, fontsize=10)


def _depth_axis(axes: "Axes", label: str = _DEPTH_AXIS) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def routing_heatmap(routes: Reads, subtitle: str = "") -> "Figure":
    """Mean routing weights, one row per read (the first at the top) and one column per source; a panel per route.

    The colour scale is the same in every figure: 0 to 1 by the square root, since uniform routing over 60 sources has
    weights of 0.02. Sources that a read does not have are grey.

    Args:
        routes: statistics by route and module path, in order of depth; at least one.
        subtitle: a second line for the title: model, text, tokens.

    Raises:
        Refused: matplotlib is not installed.
    """
    require("matplotlib", "plot")
    from matplotlib.colors import PowerNorm

    columns = {route: source_columns(reads) for route, reads in routes.items()}
    widest = max(map(len, columns.values()))
    annotated = widest <= _ANNOTATED_COLUMNS
    width = max(3.2 + (0.55 if annotated else 0.21) * widest, 6.4)
    rows = [len(reads) for reads in routes.values()]
    heights = [max(1.5 + 0.21 * count, 2.7) for count in rows]
    if annotated:  # narrow enough to stand side by side
        figure = _figure(width * len(routes), 0.9 + max(heights))
        panels = np.atleast_1d(figure.subplots(1, len(routes)))
    else:
        figure = _figure(width, 0.9 + sum(heights))
        panels = np.atleast_1d(figure.subplots(len(routes), 1, height_ratios=heights))
    slant = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if annotated else {"rotation": 90}
    for axes, (route, reads) in zip(panels, routes.items()):
        matrix = weight_matrix(reads)
        image = axes.imshow(matrix, cmap="viridis", norm=PowerNorm(0.5, 0, 1), aspect="auto", interpolation="nearest")
        axes.set_facecolor(_ABSENT)
        axes.set_xticks(range(len(columns[route])), columns[route], fontsize=8, **slant)
        axes.set_yticks(range(len(reads)), [read_label(name) for name in reads], fontsize=8)
        axes.set_xlabel("source (by depth →)")
        axes.set_ylabel("read (← by depth)")
        axes.set_title(_route_title(route, routes), fontsize=9)
        if annotated:
            for row, column in zip(*np.nonzero(~np.isnan(matrix)), strict=True):
                value = matrix[row, column]
                colour = "black" if value > 0.4 else "white"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    _set_title(figure, "Depth routing: mean weight of each source in each read", subtitle)
    bar = figure.colorbar(image, ax=panels.tolist(), ticks=[0, 0.02, 0.1, 0.25, 0.5, 0.75, 1], fraction=0.05, pad=0.02)
    bar.set_label("mean weight p (square-root scale)")
    return figure


def routing_by_depth(routes: Reads, subtitle: str = "") -> "Figure":
    """Largest weight and normalised entropy of every read against depth, each with its value under uniform routing; a column
    of panels per route.

    Args:
        routes: statistics by route and module path, in order of depth; at least one.
        subtitle: a second line for the title.

    Raises:
        Refused: matplotlib is not installed.
    """
    figure = _figure(2 + 6 * len(routes), 6.4)
    panels = figure.subplots(2, len(routes), sharex=True, sharey="row", squeeze=False)
    for column, (route, reads) in enumerate(routes.items()):
        labels = [read_label(name) for name in reads]
        depth = _depths(labels)
        kinds = [label.split()[-1] for label in labels]
        uniform = [1 / len(read.sources) for read in reads.values()]
        rows: list[tuple[str, list[float], list[float]]] = [
            ("largest weight, max p", [read.max_weight for read in reads.values()], uniform),
            ("entropy / ln S", [read.entropy_normalized for read in reads.values()], [1.0] * len(reads)),
        ]
        for axes, (name, values, reference) in zip(panels[:, column], rows, strict=True):
            axes.plot(depth, reference, color="0.45", linestyle="--", linewidth=1, label="uniform routing")
            axes.plot(depth, values, color="0.75", linewidth=1, zorder=1)
            for kind, (branch, colour, marker) in _BRANCHES.items():
                at = [index for index, other in enumerate(kinds) if other == kind]
                if at:
                    points = [depth[index] for index in at], [values[index] for index in at]
                    axes.plot(*points, marker, color=colour, markersize=5, label=branch, zorder=2)
            axes.set_ylim(-0.03, 1.05)
            axes.set_ylabel(f"{name}\n(mean over tokens)")
            axes.grid(alpha=0.3)
        panels[0, column].set_title(_route_title(route, routes), fontsize=9)
        _depth_axis(panels[1, column])
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
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


def usage_by_depth(usages: Mapping[str, SourceUsage], subtitle: str = "") -> "Figure":
    """Mean weight of every source in the reads that have it, and the share of routing mass by distance between source and
    read; both with their values under uniform routing (open markers).

    Raises:
        Refused: matplotlib is not installed.
    """
    labels = [entry["source"] for usage in usages.values() for entry in usage.by_source]
    labels = sorted(set(labels), key=source_order)
    figure = _figure(min(max(11, 7.5 + 0.2 * len(labels)), 22), 5.2)
    left, right = figure.subplots(1, 2, width_ratios=[max(1.2, len(labels) / 25), 1])
    step = 0.8 / len(usages)
    for index, (route, usage) in enumerate(usages.items()):
        colour, marker, line = _SERIES[index]
        name = _route_title(route, usages) or "routing"
        at = [labels.index(entry["source"]) + (index - (len(usages) - 1) / 2) * step for entry in usage.by_source]
        hatch = "//" if index else None
        left.bar(
            at,
            [entry["mean"] for entry in usage.by_source],
            step * 0.95,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            label=name,
        )
        left.plot(
            at,
            [entry["uniform"] for entry in usage.by_source],
            "_",
            color="black",
            markersize=8,
            label=None if index else "uniform routing",
        )
        distance = [entry["sublayers"] / 2 for entry in usage.by_distance]
        right.plot(
            distance,
            [entry["share"] for entry in usage.by_distance],
            line,
            marker=marker,
            markersize=4,
            color=colour,
            label=name,
        )
        right.plot(
            distance,
            [entry["uniform"] for entry in usage.by_distance],
            "--",
            marker=marker,
            markersize=4,
            markerfacecolor="none",
            color="0.5",
            linewidth=1,
            label=f"uniform routing{f' ({name})' if len(usages) > 1 and route == 'value' else ''}"
            if not index or route == "value"
            else None,
        )
    dense = len(labels) > 2 * _ANNOTATED_COLUMNS
    slant: dict[str, Any] = {"rotation": 90} if dense else {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    left.set_xticks(range(len(labels)), labels, fontsize=7 if dense else 8, **slant)
    left.set_xlabel("source (by depth →)")
    left.set_ylabel("mean weight p in the reads that have it")
    right.set_xlabel("distance from source to read (layers)")
    right.set_ylabel("share of all routing mass")
    left.set_title("by source", fontsize=9)
    right.set_title("by distance", fontsize=9)
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize=8)
    _set_title(figure, "Source usage", subtitle)
    return figure


def similarity_by_depth(streams: Mapping[str, Mapping[str, SourceSimilarity]], subtitle: str = "") -> "Figure":
    """Mean cosine of the sources of every read against depth (all pairs, and neighbours), and all pairs of the last read
    that has the most sources.

    Raises:
        Refused: matplotlib is not installed.
    """
    figure = _figure(6.4 + 4.6 * len(streams), 5)
    line_axes, *panels = figure.subplots(1, 1 + len(streams), width_ratios=[1.3, *[1] * len(streams)])
    for index, (stream, similarities) in enumerate(streams.items()):
        depth = _depths([read_label(name) for name in similarities])
        colour, marker, _ = _SERIES[index]
        prefix = "" if stream == "main" else f"{stream}: "
        for values, style, what in (
            ([one.mean for one in similarities.values()], "-", "all pairs"),
            ([one.adjacent for one in similarities.values()], ":", "neighbours in depth"),
        ):
            line_axes.plot(depth, values, style, marker=marker, markersize=4, color=colour, label=prefix + what)
        # the last of the reads with the most sources: a final read has no details
        where, deepest = max(reversed(list(similarities.items())), key=lambda item: len(item[1].sources))
        axes = panels[index]
        image = axes.imshow(
            np.array(deepest.cosine), cmap="PuOr", vmin=-1, vmax=1, aspect="auto", interpolation="nearest"
        )
        size = 8 if len(deepest.sources) <= 20 else 4
        axes.set_xticks(range(len(deepest.sources)), deepest.sources, fontsize=size, rotation=90)
        axes.set_yticks(range(len(deepest.sources)), deepest.sources, fontsize=size)
        axes.set_title(f"{prefix}sources of {_read_title(where)}", fontsize=9)
        axes.set_xlabel("source")
        axes.set_ylabel("source")
    line_axes.axhline(0, color="0.6", linewidth=0.8)
    line_axes.set_ylim(-1.05, 1.05)
    line_axes.set_ylabel("cosine of two sources (mean over tokens)")
    line_axes.grid(alpha=0.3)
    line_axes.legend(fontsize=8)
    _depth_axis(line_axes)
    figure.colorbar(image, ax=panels, fraction=0.05, pad=0.02).set_label("cosine (mean over tokens)")
    _set_title(figure, "Source redundancy", subtitle)
    return figure


def divergence_by_layer(divergence: Mapping[str, float], subtitle: str = "") -> "Figure":
    """Jensen–Shannon divergence of the QK and V routes of every attention read.

    Raises:
        Refused: matplotlib is not installed.
    """
    figure = _figure(8, 4)
    axes = figure.subplots()
    depth = _depths([read_label(name) for name in divergence])
    axes.bar(depth, list(divergence.values()), 0.7, color=_SERIES[0][0], label="QK route against V route")
    axes.axhline(log(2), color="0.45", linestyle="--", linewidth=1, label="disjoint routes: ln 2")
    axes.set_ylim(0, 0.75)
    axes.set_ylabel("JS divergence (nats, mean over tokens)")
    axes.grid(alpha=0.3, axis="y")
    _depth_axis(axes, "layer")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    _set_title(figure, "Divergence of attention's two routes", subtitle)
    return figure


def cka_heatmaps(cka: StreamCKA, layers: int, subtitle: str = "") -> "Figure":
    """Linear CKA of two streams for all pairs of depths, a panel per pair of streams.

    Raises:
        Refused: matplotlib is not installed.
    """
    columns = min(len(cka.pairs), 3)
    rows = -(-len(cka.pairs) // columns)
    figure = _figure(1.6 + 4.8 * columns, 0.9 + 4.4 * rows)
    panels = np.atleast_1d(figure.subplots(rows, columns)).flatten()
    every = -(-len(cka.sublayers) // 18)
    ticks = range(0, len(cka.sublayers), every)
    labels = [sublayer_label(cka.sublayers[tick], layers) for tick in ticks]
    for axes, pair in zip(panels, cka.pairs):
        first, second = pair["streams"]
        matrix = np.array(pair["cka"], dtype=float)
        image = axes.imshow(matrix, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_facecolor(_ABSENT)
        axes.set_xticks(ticks, labels, fontsize=7, rotation=90)
        axes.set_yticks(ticks, labels, fontsize=7)
        axes.set_xlabel(f"stream {second}: depth →")
        axes.set_ylabel(f"stream {first}: ← depth")
        axes.set_title(f"same depth {pair['same_depth']:.2f}, other depths {pair['other_depths']:.2f}", fontsize=9)
    for axes in panels[len(cka.pairs) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=panels.tolist(), fraction=0.05, pad=0.02).set_label("linear CKA")
    _set_title(figure, "Similarity of the streams", subtitle)
    return figure


def rescue_bars(gain: RescueGain, subtitle: str = "") -> "Figure":
    """Rescue gain of every stream, on the final hidden states and on the loss.

    Raises:
        Refused: matplotlib is not installed.
    """
    figure = _figure(7, 4.2)
    axes = figure.subplots()
    series: list[tuple[str, list[float]]] = [("final hidden states", gain.hidden)]
    if gain.loss is not None:
        series.append(("language-modelling loss", gain.loss))
    step = 0.8 / len(series)
    for index, (name, values) in enumerate(series):
        at = np.arange(len(values)) + (index - (len(series) - 1) / 2) * step
        bars = axes.bar(
            at,
            values,
            step * 0.95,
            color=_SERIES[index][0],
            hatch="//" if index else None,
            edgecolor="white",
            label=name,
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(1, color="0.45", linestyle="--", linewidth=1, label="all of the output")
    axes.set_xticks(range(len(gain.hidden)), [f"stream {j}" for j in range(len(gain.hidden))])
    axes.set_xlabel("stream that has its own history back")
    axes.set_ylabel("rescue gain G (0 nothing, 1 all)")
    finite = [value for _, values in series for value in values if np.isfinite(value)]
    axes.set_ylim(min([0.0, *finite]) * 1.15 - 0.02, max([1.0, *finite]) * 1.1 + 0.02)
    axes.grid(alpha=0.3, axis="y")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    _set_title(figure, "Rescue gain", subtitle)
    return figure


def norms_by_depth(norms: NormGrowth, subtitle: str = "") -> "Figure":
    """L2 norms of stream, reads and updates against depth, on a logarithmic axis.

    Raises:
        Refused: matplotlib is not installed.
    """
    figure = _figure(8, 4.6)
    axes = figure.subplots()
    depth = np.arange(len(norms.stream)) / 2
    axes.plot(depth, norms.stream, "-", color="black", marker="D", markersize=4, label="stream ‖h‖ (mean)")
    axes.plot(depth, norms.stream_median, ":", color="black", label="stream ‖h‖ (median token)")
    axes.plot(depth, norms.read, "--", color="#0072B2", marker="o", markersize=4, label="what is read, ‖x‖ (mean)")
    axes.plot(
        depth[: len(norms.update)],
        norms.update,
        "-.",
        color="#D55E00",
        marker="s",
        markersize=4,
        label="what is written, ‖u‖ (mean)",
    )
    for index, stream in enumerate(norms.streams):
        axes.plot(depth, stream, "-", color="0.6", linewidth=1, label=None if index else "each mHC stream (mean)")
    axes.set_yscale("log")
    axes.set_ylabel("L2 norm (no unit, log scale)")
    axes.grid(alpha=0.3, which="both", axis="y")
    _depth_axis(axes, "layer (MLP at half a layer more; after the last layer: the end)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    _set_title(figure, f"Norms over depth: the stream grows {norms.growth:.3g}-fold", subtitle)
    return figure


def draw(diagnosis: Diagnosis, subtitle: str = "") -> dict[str, "Figure"]:
    """Every figure of a diagnosis, by name; of parts that are absent there is none."""
    makers: dict[str, tuple[str, Callable[[], Figure]]] = {
        "routing_heatmap": ("reads", lambda: routing_heatmap(diagnosis.reads, subtitle)),
        "routing_depth": ("reads", lambda: routing_by_depth(diagnosis.reads, subtitle)),
        "source_usage": ("source_usage", lambda: usage_by_depth(diagnosis.source_usage, subtitle)),
        "source_similarity": (
            "source_similarity",
            lambda: similarity_by_depth(diagnosis.source_similarity, subtitle),
        ),
        "route_divergence": ("route_divergence", lambda: divergence_by_layer(diagnosis.route_divergence, subtitle)),
        "stream_cka": (
            "stream_cka",
            lambda: cka_heatmaps(diagnosis.stream_cka, diagnosis.layers, subtitle),  # type: ignore[arg-type]
        ),
        "rescue_gain": ("rescue_gain", lambda: rescue_bars(diagnosis.rescue_gain, subtitle)),  # type: ignore[arg-type]
        "norm_growth": ("norm_growth", lambda: norms_by_depth(diagnosis.norm_growth, subtitle)),
    }
    return {name: make() for name, (part, make) in makers.items() if part not in diagnosis.absent}


def compared_by_depth(first: Diagnosis, second: Diagnosis, names: tuple[str, str], subtitle: str = "") -> "Figure":
    """Two models on the same axes: largest weight, normalised entropy and cosine of sources (means over the routes or
    streams of a read), and the norm of the stream, against relative depth.

    Raises:
        Refused: matplotlib is not installed.
    """
    quantities: list[tuple[str, str, Callable[[Diagnosis], Mapping[str, float]]]] = [
        ("largest weight, max p", "reads", lambda one: _read_means(one.reads, "max_weight")),
        ("entropy / ln S", "reads", lambda one: _read_means(one.reads, "entropy_normalized")),
        ("cosine of sources", "source_similarity", lambda one: _read_means(one.source_similarity, "mean")),
    ]
    present = [entry for entry in quantities if entry[1] not in first.absent or entry[1] not in second.absent]
    count = len(present) + 1
    figure = _figure(11 if count > 1 else 7, 3.4 * -(-count // 2) + 0.8)
    panels = np.atleast_1d(figure.subplots(-(-count // 2), min(count, 2))).flatten()
    for (diagnosis, name), (colour, marker, line) in zip(zip((first, second), names), _SERIES):
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linestyle": line, "label": name}
        for axes, (label, part, values_of) in zip(panels, present):
            if part not in diagnosis.absent:
                values = values_of(diagnosis)
                depth = [read_sublayer(read, diagnosis.layers) / (2 * diagnosis.layers) for read in values]
                axes.plot(depth, list(values.values()), **style)
            axes.set_ylabel(label)
            axes.set_ylim(-1.05 if part == "source_similarity" else -0.03, 1.05)
        stream = diagnosis.norm_growth.stream
        panels[count - 1].plot(np.linspace(0, 1, len(stream)), stream, **style)
    panels[count - 1].set_yscale("log")
    panels[count - 1].set_ylabel("norm of the stream, ‖h‖ (log scale)")
    for axes in panels[:count]:
        axes.set_xlabel("depth (0: first sublayer, 1: end)")
        axes.grid(alpha=0.3)
    for axes in panels[count:]:
        axes.set_axis_off()
    figure.legend(*panels[count - 1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    _set_title(figure, "Both models by depth (means over tokens)", subtitle)
    return figure


def _read_means(routes: Mapping[str, Mapping[str, Any]], attribute: str) -> dict[str, float]:
    """Per read, the mean of an attribute over its routes, in order of depth."""
    values: dict[str, list[float]] = {}
    for reads in routes.values():
        for name, read in reads.items():
            values.setdefault(name, []).append(getattr(read, attribute))
    return {name: float(np.mean(of_read)) for name, of_read in values.items()}
