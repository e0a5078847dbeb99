# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Figures of a study's results: differences with intervals here, routing by depth and loss by step in `run_plots`.

The same results give the same bytes with the same matplotlib: no date and no version are written.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..diagnostics.plots import _figure as new_figure
from .paired import NOISE_BAND, SEEDS, Comparison, comparisons, noise_of, ordered_groups
from .plot_style import BAND_COLOUR, BAND_LABEL, linear_up_to, png, set_scale, shared_legend
from .run_plots import by_depth, curves, routed_arms
from .wording import number, signed, stem


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    threshold = linear_up_to([row.difference.mean for row in rows if row.difference])
    for axes, group in zip(panels, groups):
        noise = noise_of(results, group)
        if noise is not None:
            band = NOISE_BAND * noise.level
            axes.axvspan(-band, band, color=BAND_COLOUR, zorder=0, label=BAND_LABEL)
        axes.axvline(0, color="0.4", linewidth=1, zorder=1)
        for row in rows:
            if row.group == group:
                _draw_difference(axes, arms.index(row.arm), row)
        set_scale(axes, "x", threshold, bins=5)
        if len(groups) > 1:
            axes.set_title(group, fontsize=9)
        axes.grid(alpha=0.3, axis="x")
        axes.tick_params(axis="x", labelsize=8)
        far = "" if threshold is None else f"; logarithmic beyond ±{threshold:g}"
        axes.set_xlabel(f"loss minus that of {results['baseline']} (nats{far})", fontsize=8)
    panels[0].set_yticks(range(len(arms)), arms, fontsize=9)
    panels[0].set_ylim(len(arms) - 0.4, -0.6)
    shared_legend(figure, panels, columns=4 if len(groups) > 1 else 2)
    figure.suptitle(f"{results['title']}\nvalidation loss at the end", fontsize=10)
    return figure


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
        style: dict[str, Any] = {
            "color": colour,
            "markerfacecolor": colour if row.clear else "white",
            "label": label,
            "zorder": 3,
        }
        axes.errorbar([found.mean], [at], xerr=found.half_width, fmt="D", markersize=5, capsize=3, **style)
        if found.half_width and not found.identical:
            told += f" ± {number(found.half_width)}"
    place = axes.get_yaxis_transform()
    axes.text(1.02, at, told, transform=place, fontsize=7.5, va="center", ha="left", color="0.2")


def figures_of(results: Mapping[str, Any]) -> dict[str, Callable[[Mapping[str, Any]], "Figure"]]:
    """What there is to draw of these results, by file name."""
    name = stem(results)
    makers: dict[str, Callable[[Mapping[str, Any]], Figure]] = {f"{name}.png": differences}
    if routed_arms(results):
        makers[f"{name}-depth.png"] = by_depth
    makers[f"{name}-curves.png"] = curves
    return makers


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
