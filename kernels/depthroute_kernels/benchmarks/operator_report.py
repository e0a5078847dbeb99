# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The result of an operator benchmark as tables and as a figure."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table


MEASURES = {"forward": "forward", "step": "forward + backward"}
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")


def result_tables(result: dict[str, Any]) -> list[Table]:
    """One table of times and shares of bandwidth, and one of what was not measured, where there is something."""
    settings = result["settings"]
    title = (
        f"{settings['batch']} x {settings['tokens']} tokens, width {settings['width']}, {settings['dtype']}, "
        f"{settings['device']}, {settings['threads']} thread(s)"
    )
    caption = (
        "ms: median (quartiles); share: of the bandwidth of a copy, on the fewest bytes; above 1 where caches hold them"
    )
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD)
    for column in ("case", "system"):
        table.add_column(column, no_wrap=True)
    for label in MEASURES.values():
        table.add_column(f"{label} ms", justify="right")
        table.add_column("share", justify="right")
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for case in result["cases"]:
        first = True
        for name, system in case["systems"].items():
            if system["status"] != "measured":
                reasons.setdefault((name, system["status"], system["reason"]), []).append(case["name"])
                continue
            cells = []
            for measure in MEASURES:
                ms, share = system[measure]["ms"], system[measure]["share"]
                cells += [f"{ms['median']:.3g} ({ms['q1']:.3g}–{ms['q3']:.3g})", f"{share['median']:.0%}"]
            table.add_row(case["name"] if first else "", name, *cells)
            first = False
    if not reasons:
        return [table]
    missing = Table(title="not measured", box=SIMPLE_HEAD)
    for column in ("system", "why", "cases"):
        missing.add_column(column, overflow="fold")
    for (name, status, reason), cases in reasons.items():
        which = "all" if len(cases) == len(result["cases"]) else ", ".join(cases)
        missing.add_row(name, f"{status}: {reason}", which)
    return [table, missing]


def draw(result: dict[str, Any], file: Path) -> None:
    """Share of bandwidth over the number of sources, a panel for each schedule, form and measure, into `file`."""
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((case["schedule"], case["form"]) for case in result["cases"]))
    names = list(dict.fromkeys(name for case in result["cases"] for name in case["systems"]))
    figure = Figure(figsize=(4 * len(panels), 7), dpi=150, layout="constrained")
    grid = figure.subplots(len(MEASURES), len(panels), squeeze=False, sharex=True)
    for row, (measure, label) in zip(grid, MEASURES.items()):
        for axes, (schedule, form) in zip(row, panels):
            cases = [case for case in result["cases"] if (case["schedule"], case["form"]) == (schedule, form)]
            for index, name in enumerate(names):
                found = [
                    (case["sources"], case["systems"][name][measure]["share"])
                    for case in cases
                    if case["systems"][name]["status"] == "measured"
                ]
                if found:
                    sources, shares = zip(*found)
                    medians = [share["median"] for share in shares]
                    spread = [[share["median"] - share["q1"] for share in shares], [share["q3"] - share["median"] for share in shares]]  # fmt: skip
                    colour = COLOURS[index % len(COLOURS)]
                    axes.errorbar(sources, medians, yerr=spread, color=colour, marker="o", markersize=3, label=name)
            axes.set_title(f"{schedule}, {form}: {label}", fontsize=9)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
    for axes in grid[-1]:
        axes.set_xlabel("sources S")
    for row in grid:
        row[0].set_ylabel("share of copy bandwidth")
    handles = {text: handle for axes in grid.flat for handle, text in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(file)
