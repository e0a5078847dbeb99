# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Figures of a study's runs: routing by depth, loss by step."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from ..diagnostics.plots import _depth_axis as depth_axis
from ..diagnostics.plots import _figure as new_figure
from .paired import NOISE_BAND, noise_of, ordered_groups
from .plot_style import BAND_COLOUR, BAND_LABEL, linear_up_to, set_scale, shared_legend


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
_PANELS_PER_ROW = 4


def routed_arms(results: Mapping[str, Any]) -> dict[tuple[str, str], Sequence[Mapping[str, Any]]]:
    """Runs by group and arm, of arms with reads; the noise arm repeats the baseline and is left out."""
    return {
        (group, name): arm["runs"]
        for group, entry in ordered_groups(results).items()
        for name, arm in entry["arms"].items()
        if name != results["noise_arm"] and any(run["by_depth"] for run in arm["runs"])
    }


def by_depth(results: Mapping[str, Any]) -> "Figure":
    """Largest routing weight and cosine of the sources of every read against depth, means over seeds, and what uniform routing
    would give; a panel per arm that has reads.

    Raises:
        Refused: matplotlib is not installed.
    """
    routed = routed_arms(results)
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
    shared_legend(figure, panels, columns=4 if columns > 2 else 2)
    figure.supylabel("weight, cosine (means over tokens and seeds)", fontsize=9)
    figure.suptitle(f"{results['title']}\nrouting by depth (MLP reads at half a layer more)", fontsize=10)
    return figure


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


def _mean(values: Iterable[float | None]) -> float:
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
        threshold = linear_up_to(late)
        far = "" if threshold is None else f" (log beyond ±{threshold:g})"
        apart.set_title(f"validation loss minus that of {results['baseline']}{far}", fontsize=9)
        noise = noise_of(results, group)
        if noise is not None:
            band = NOISE_BAND * noise.level
            apart.axhspan(-band, band, color=BAND_COLOUR, zorder=0, label=BAND_LABEL)
        set_scale(apart, "y", threshold, bins=7)
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
    shared_legend(figure, panels.flatten(), columns=4)
    figure.suptitle(f"{results['title']}\nmeans over seeds", fontsize=10)
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
