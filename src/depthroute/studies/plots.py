# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Figures of a study's results: differences with intervals, routing by depth, loss by step.

The same results give the same bytes with the same matplotlib: no date and no version are written.
"""

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from ..diagnostics.plots import _depth_axis as depth_axis
from ..diagnostics.plots import _figure as new_figure
from .paired import NOISE_BAND, SEEDS, Comparison, comparisons, noise_of, ordered_groups
from .wording import number, signed, stem


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_LINES = ("-", "--", "-.", ":")
_ROUTES = {
    "main": ("#0072B2", "o", "-", "largest weight"),
    "value": ("#56B4E9", "s", "--", "largest weight, V route"),
    "stream 0": ("#0072B2", "o", "-", "largest weight, stream 0"),
    "stream 1": ("#56B4E9", "s", "--", "largest weight, stream 1"),
}
_COSINES = {
    "main": ("#D55E00", "-", "cosine of sources"),
    "stream 0": ("#D55E00", "-", "cosine of sources, stream 0"),
    "stream 1": ("#E69F00", "--", "cosine of sources, stream 1"),
}
_WIDE = 12.0
"""So many times the median difference does not fit beside it on a linear axis."""
_PANELS_PER_ROW = 4
_BAND_LABEL = f"{NOISE_BAND:g} × rounding noise of one pair"
_PNG_COLOURS = 128


def differences(results: Mapping[str, Any]) -> "Figure":
    """Final loss of every arm against the baseline: every pair, mean with 95% interval, and the noise band; a panel per group.
    The scale is linear up to the median difference where single arms are far off, logarithmic beyond.

    Raises:
        Refused: matplotlib or scipy is not installed.
    """
    rows = comparisons(results)
    groups = list(ordered_groups(results))
    arms = list(dict.fromkeys(row.arm for row in rows))
    figure = new_figure(3.4 + 3.6 * len(groups), 1.7 + 0.42 * max(len(arms), 2))
    panels = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    threshold = _threshold([row.difference.mean for row in rows if row.difference])
    for axes, group in zip(panels, groups):
        noise = noise_of(results, group)
        if noise is not None:
            band = NOISE_BAND * noise.level
            axes.axvspan(-band, band, color="0.88", zorder=0, label=_BAND_LABEL)
        axes.axvline(0, color="0.4", linewidth=1, zorder=1)
        for row in rows:
            if row.group == group:
                _draw_difference(axes, arms.index(row.arm), row)
        _scale(axes, "x", threshold, bins=5)
        if len(groups) > 1:
            axes.set_title(group, fontsize=9)
        axes.grid(alpha=0.3, axis="x")
        axes.tick_params(axis="x", labelsize=8)
        far = "" if threshold is None else f"; logarithmic beyond ±{threshold:g}"
        axes.set_xlabel(f"loss minus that of {results['baseline']} (nats{far})", fontsize=8)
    panels[0].set_yticks(range(len(arms)), arms, fontsize=9)
    panels[0].set_ylim(len(arms) - 0.4, -0.6)
    _shared_legend(figure, panels, columns=4 if len(groups) > 1 else 2)
    figure.suptitle(f"{results['title']}: validation loss at the end", fontsize=10)
    return figure


def _threshold(values: Sequence[float]) -> float | None:
    """Up to where an axis of differences is linear: the median distance from zero, to one digit, where some are far beyond
    it; None: everywhere."""
    distances = [abs(value) for value in values if value and np.isfinite(value)]
    if not distances or max(distances) <= _WIDE * median(distances):
        return None
    return float(f"{median(distances):.0e}")


def _scale(axes: "Axes", which: str, threshold: float | None, bins: int) -> None:
    """Linear, or logarithmic beyond a threshold, with plain numbers."""
    from matplotlib.ticker import MaxNLocator, SymmetricalLogLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    if threshold is None:
        axis.set_major_locator(MaxNLocator(bins))
    else:
        (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=threshold)
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
    axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))


def _draw_difference(axes: "Axes", at: int, row: Comparison) -> None:
    found = row.difference
    told = "no common seed"
    if found is not None and not np.isfinite(found.mean):
        told = "not finite"
    elif found is not None:
        told = "identical" if found.identical else signed(found.mean)
        if found.over == SEEDS:
            heights = [at + 0.22] * found.count
            label = "one pair of runs, same seed"
            axes.plot(found.differences, heights, "o", color="0.45", markersize=3, zorder=2, label=label)
        over = "pairs" if found.over == SEEDS else "windows of one seed"
        label = f"mean, 95% over {over}" if found.half_width is not None else "one pair, no interval"
        if row.clear:
            label += ": clear of 0 (Holm)"
        colour = "#D55E00" if row.clear else "#0072B2"
        style = {"color": colour, "markerfacecolor": colour if row.clear else "white", "label": label, "zorder": 3}
        axes.errorbar([found.mean], [at], xerr=found.half_width, fmt="D", markersize=5, capsize=3, **style)
        if found.half_width and not found.identical:
            told += f" ± {number(found.half_width)}"
    place = axes.get_yaxis_transform()
    axes.text(1.02, at, told, transform=place, fontsize=7.5, va="center", ha="left", color="0.2")


def by_depth(results: Mapping[str, Any]) -> "Figure":
    """Largest routing weight and cosine of the sources of every read against depth, means over seeds, and what uniform routing
    would give; a panel per arm that has reads.

    Raises:
        Refused: matplotlib is not installed.
    """
    routed = _routed_arms(results)
    columns = _PANELS_PER_ROW
    several = len(results["groups"]) > 1
    if several:
        columns = min(columns, max(sum(name == group for name, _ in routed) for group, _ in routed))
    columns = min(columns, len(routed))
    rows = -(-len(routed) // columns)
    figure = new_figure(0.8 + 3.1 * columns, 1.1 + 2.5 * rows)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    lowest = 0.0
    for axes, ((group, name), runs) in zip(panels, routed.items()):
        lowest = min(lowest, _draw_depth(axes, runs))
        axes.set_title(f"{name}, {group}" if several else name, fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8)
        depth_axis(axes, "layer")
        axes.set_xlabel("layer", fontsize=8)
    for axes in panels[len(routed) :]:
        axes.set_axis_off()
    panels[0].set_ylim(lowest - 0.04, 1.04)
    _shared_legend(figure, panels, columns=4 if columns > 2 else 2)
    figure.supylabel("weight, cosine (means over tokens and seeds)", fontsize=9)
    figure.suptitle(f"{results['title']}: routing by depth (MLP reads at half a layer more)", fontsize=10)
    return figure


def _routed_arms(results: Mapping[str, Any]) -> dict[tuple[str, str], Sequence[Mapping[str, Any]]]:
    """Runs by group and arm, of arms with reads; the noise arm repeats the baseline and is left out."""
    return {
        (group, name): arm["runs"]
        for group, entry in ordered_groups(results).items()
        for name, arm in entry["arms"].items()
        if name != results["noise_arm"] and any(run["by_depth"] for run in arm["runs"])
    }


def _draw_depth(axes: "Axes", runs: Sequence[Mapping[str, Any]]) -> float:
    """Draws one arm and returns the lowest value drawn."""
    rows = [row for run in runs for row in run["by_depth"]]
    lowest = 0.0
    for route in dict.fromkeys(row["route"] for row in rows):
        of_read: dict[int, list[Mapping[str, Any]]] = {}
        for row in rows:
            if row["route"] == route:
                of_read.setdefault(row["sublayer"], []).append(row)
        reads = [of_read[sublayer] for sublayer in sorted(of_read)]
        depth = [read[0]["sublayer"] / 2 for read in reads]
        colour, marker, line, label = _ROUTES[route]
        size = 3 if len(depth) <= 30 else 0
        weights = [_mean(row["max_weight"] for row in read) for read in reads]
        axes.plot(depth, weights, line, marker=marker, markersize=size, color=colour, label=label, linewidth=1.3)
        if route in _COSINES:
            uniform = [1 / read[0]["sources"] for read in reads]
            if route != "stream 1":
                axes.plot(
                    depth, uniform, ":", color="0.35", linewidth=1.2, label="largest weight if routing were uniform"
                )
            colour, line, label = _COSINES[route]
            cosines = [_mean(row["cosine"] for row in read) for read in reads]
            axes.plot(depth, cosines, line, color=colour, label=label, linewidth=1)
            lowest = min([lowest, *(value for value in cosines if np.isfinite(value))])
    return lowest


def _mean(values: Any) -> float:
    known = [value for value in values if value is not None]
    return fmean(known) if known else float("nan")


def curves(results: Mapping[str, Any]) -> "Figure":
    """Validation loss by step, and its difference from the baseline, means over seeds; also the training loss from its start
    where a claim is about the start. A row per group.

    Raises:
        Refused: matplotlib is not installed.
    """
    groups = ordered_groups(results)
    started = _is_about_the_start(results)
    arms = list(dict.fromkeys(name for entry in groups.values() for name in entry["arms"]))
    styles = _styles(arms, results["baseline"])
    figure = new_figure(4.3 * (2 + started), 0.9 + 0.22 * -(-len(arms) // 4) + 2.9 * len(groups))
    panels = figure.subplots(len(groups), 2 + started, squeeze=False)
    for (group, entry), (losses, apart, *training) in zip(groups.items(), panels):
        baseline = entry["arms"].get(results["baseline"], {"runs": []})["runs"]
        late: list[float] = []
        for name, arm in entry["arms"].items():
            losses.plot(*_mean_curve(arm["runs"], "curve"), label=name, **styles[name])
            steps, values = _mean_curve(arm["runs"], "curve", baseline)
            apart.plot(steps, values, **styles[name])
            late += [value for step, value in zip(steps, values) if step >= steps[-1] / 2]
            for axes in training:
                axes.plot(*_mean_curve(arm["runs"], "training"), **styles[name])
        where = f"{group}: " if len(groups) > 1 else ""
        losses.set_ylabel(f"{where}nats per token", fontsize=9)
        losses.set_title("validation loss", fontsize=9)
        threshold = _threshold(late)
        far = "" if threshold is None else f" (log beyond ±{threshold:g})"
        apart.set_title(f"validation loss minus that of {results['baseline']}{far}", fontsize=9)
        noise = noise_of(results, group)
        if noise is not None:
            band = NOISE_BAND * noise.level
            apart.axhspan(-band, band, color="0.88", zorder=0, label=_BAND_LABEL)
        _scale(apart, "y", threshold, bins=7)
        finite = [value for value in late if np.isfinite(value)]
        if any(finite):  # early differences are large and say little
            margin = 0.15 * (max(finite) - min(finite))
            apart.set_ylim(min(finite) - margin, max(finite) + margin)
        for axes in training:
            axes.set_title("training loss", fontsize=9)
        for axes in (losses, apart, *training):
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=8)
            axes.locator_params(axis="x", nbins=6)
            axes.set_xlabel("step", fontsize=8)
    _shared_legend(figure, panels.flatten(), columns=4)
    figure.suptitle(f"{results['title']}: means over seeds", fontsize=10)
    return figure


def _is_about_the_start(results: Mapping[str, Any]) -> bool:
    claims = results["definition"].get("claims") or []
    return any(claim["measure"] in ("first_loss", "largest_rise") for claim in claims)


def _styles(arms: Sequence[str], baseline: str) -> dict[str, dict[str, Any]]:
    """The baseline black, every other arm a colour, or a colour with another line."""
    styles: dict[str, dict[str, Any]] = {baseline: {"color": "black", "linewidth": 1.8, "linestyle": "-"}}
    for index, name in enumerate(name for name in arms if name != baseline):
        line = _LINES[(index // len(_COLOURS)) % len(_LINES)]
        styles[name] = {"color": _COLOURS[index % len(_COLOURS)], "linewidth": 1.2, "linestyle": line}
    return styles


def _mean_curve(
    runs: Sequence[Mapping[str, Any]], which: str, baseline: Sequence[Mapping[str, Any]] | None = None
) -> tuple[list[int], list[float]]:
    """Steps that all runs have, and the mean at each; with a baseline the mean of differences, seed by seed."""
    found = {run["seed"]: dict(run[which]) for run in runs}
    if baseline is not None:
        before = {run["seed"]: dict(run[which]) for run in baseline}
        found = {
            seed: {
                step: _difference(loss, before[seed].get(step)) for step, loss in curve.items() if step in before[seed]
            }
            for seed, curve in found.items()
            if seed in before
        }
    if not found:
        return [], []
    steps = sorted(set.intersection(*(set(curve) for curve in found.values())))
    return steps, [fmean(_difference(curve[step], 0.0) for curve in found.values()) for step in steps]


def _difference(loss: float | None, before: float | None) -> float:
    """nan where either was not finite, which JSON has as null."""
    return float("nan") if loss is None or before is None else loss - before


def _shared_legend(figure: "Figure", panels: Sequence["Axes"], columns: int) -> None:
    """One legend below all panels, each label once."""
    entries: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    if entries:
        handles = list(entries.values())
        figure.legend(handles, list(entries), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def figures_of(results: Mapping[str, Any]) -> dict[str, Callable[[Mapping[str, Any]], "Figure"]]:
    """What there is to draw of these results, by file name."""
    name = stem(results)
    makers: dict[str, Callable[[Mapping[str, Any]], Figure]] = {f"{name}.png": differences}
    if _routed_arms(results):
        makers[f"{name}-depth.png"] = by_depth
    makers[f"{name}-curves.png"] = curves
    return makers


def png(figure: "Figure") -> bytes:
    """A figure as a file, without date or version; in few colours, which takes a third of the space."""
    from PIL import Image

    drawn, file = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(_PNG_COLOURS, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
    return file.getvalue()


def write_figures(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw all of `figures_of` into an existing folder.

    Raises:
        Refused: matplotlib or scipy is not installed.
    """
    written = []
    for name, make in figures_of(results).items():
        (folder / name).write_bytes(png(make(results)))
        written.append(folder / name)
    return written
