# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The result of a model benchmark as a table and as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from depthroute.errors import Refused
from depthroute.extras import require


MEASURES = {
    "train_step": "train step",
    "forward": "forward",
    "decode_token": "decode",
    "decode_operations": "decode ops",
    "saved_bytes": "saved bytes",
    "peak_bytes": "peak bytes",
}
CHECKPOINTED = {
    "train_step_checkpointed": "train step, checkpointed",
    "saved_bytes_checkpointed": "saved bytes, checkpointed",
    "peak_bytes_checkpointed": "peak bytes, checkpointed",
}
"""Measured on request; ratios are to stock with checkpointing."""


def result_tables(result: dict[str, Any]) -> list[Table]:
    """Ratios to stock Qwen3 (median, and quartiles over rounds), and what stock itself takes; a second table for gradient
    checkpointing, where that was measured."""
    settings = result["settings"]
    title = (
        f"{settings['layers']} layers, width {settings['width']}, {settings['batch']} x {settings['tokens']} tokens, "
        f"{settings['dtype']}, {settings['device']}, {settings['threads']} thread(s), "
        f"{'anchored' if settings['anchored'] else 'plain'}"
    )
    tables = [_table(result, MEASURES, title)]
    if settings["checkpointing"]:
        tables.append(_table(result, CHECKPOINTED, "all of them with gradient checkpointing"))
    return tables


def _table(result: dict[str, Any], measures: dict[str, str], title: str) -> Table:
    caption = "ratio to qwen3 in the same round: median, quartiles; decode ops: torch's operations for one token"
    # narrow: six measures fit into 80 columns
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("system")
    for name in measures.values():
        table.add_column(name.removesuffix(", checkpointed").replace(" ", "\n"), justify="right", no_wrap=True)
    for name, system in result["systems"].items():
        if name == "qwen3":
            table.add_row(name, *(_absolute(system[key]) for key in measures))
        else:
            table.add_row(name, *(_ratio(system[key]["ratio"]) for key in measures))
    return table


def _absolute(measure: dict[str, Any]) -> str:
    if "count" in measure:
        return str(measure["count"])
    return f"{measure['ms']['median']:.2f} ms" if "ms" in measure else f"{measure['bytes'] / 2**20:.1f} MiB"


def _ratio(ratio: Any) -> str:
    if isinstance(ratio, dict):
        return f"{ratio['median']:.2f}\n{ratio['q1']:.2f}–{ratio['q3']:.2f}"
    return f"{ratio:.2f}"


def markdown_table(result: dict[str, Any], keys: Sequence[str]) -> str:
    """Median ratios to stock Qwen3 of the measures `keys`, by system, as `kernels/README.md` shows them."""
    labels = {**MEASURES, **CHECKPOINTED}
    lines = ["| preset | " + " | ".join(labels[key] for key in keys) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, system in result["systems"].items():
        if name != "qwen3":
            ratios = [system[key]["ratio"] for key in keys]
            cells = [f"{ratio['median'] if isinstance(ratio, dict) else ratio:.2f}" for ratio in ratios]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def check_plot_file(file: Path | None) -> None:
    """Refuse a figure that could not be written in the end.

    Raises:
        Refused: matplotlib is not installed, the folder does not exist, or no image type is named.
    """
    if file is None:
        return
    require("matplotlib", "plot")
    if not file.absolute().parent.is_dir():
        raise Refused(f"{file}: its folder does not exist, allowed: a file in an existing folder")
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise Refused(f"{file}: got the suffix {file.suffix!r}, allowed: .png, .svg, .pdf")


def measures_of(result: dict[str, Any]) -> dict[str, str]:
    """What a result holds, with a label."""
    return {**MEASURES, **CHECKPOINTED} if result["settings"]["checkpointing"] else MEASURES


def draw(result: dict[str, Any], file: Path) -> None:
    """Bars of every ratio by preset, with quartiles, into `file`."""
    from matplotlib.figure import Figure

    systems = {name: system for name, system in result["systems"].items() if name != "qwen3"}
    measures = measures_of(result)
    figure = Figure(figsize=(2 + 0.3 * len(measures) * len(systems), 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    colours = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#004166", "#856100", "#6B3553", "#999999")
    width = 0.85 / len(measures)
    for place, ((key, label), colour) in enumerate(zip(measures.items(), colours)):
        ratios = [system[key]["ratio"] for system in systems.values()]
        heights = [ratio["median"] if isinstance(ratio, dict) else ratio for ratio in ratios]
        spread = [(r["median"] - r["q1"], r["q3"] - r["median"]) if isinstance(r, dict) else (0, 0) for r in ratios]
        at = [index + width * (place - (len(measures) - 1) / 2) for index in range(len(systems))]
        axes.bar(at, heights, 0.95 * width, color=colour, label=label, yerr=list(zip(*spread)), ecolor="0.3")
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(systems)), list(systems))
    axes.set_ylabel("ratio to stock Qwen3 (lower is better)")
    axes.legend(fontsize=8, ncols=3)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(file)
