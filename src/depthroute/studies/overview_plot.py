# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The overview's one plot: what a preset costs against what it does to the loss, from scratch and after a conversion."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..extras import require
from ..modeling.configuration_depthroute import PRESETS
from .costs import Bench, main_bench
from .evidence import CONTROL, Results, Row, all_rows, best_row
from .paired import WINDOWS


if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STUDIES = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P")]


class Point(NamedTuple):
    """One preset, as it is: its train step over stock Qwen3's, and the row that its difference comes from."""

    preset: str
    cost: float
    row: Row


class Panel(NamedTuple):
    """Presets that start in one way, and the bench result that their costs come from."""

    converts: bool
    bench: Bench
    points: list[Point]

    @property
    def title(self) -> str:
        return "converted, then fine-tuned" if self.converts else "trained from scratch"


def panels(studies: Sequence[Results], benches: Sequence[Bench]) -> list[Panel]:
    """What there is to draw: the presets that have both a cost and a difference against `standard` with an interval, each by
    the row that `best_row` takes. A panel without points is left out."""
    rows, found = all_rows(studies), []
    for converts in (False, True):
        bench = main_bench(benches, anchored=converts) or main_bench(benches)
        if bench is None:
            continue
        points = []
        for preset in PRESETS:
            row, cost = best_row(rows, preset, converts), bench.ratio(preset, "train_step")
            if row is None or cost is None or row.difference is None:
                continue
            if row.variation or row.against_preset != CONTROL:
                continue
            if row.difference.half_width is not None:
                points.append(Point(preset, cost.median, row))
        if points:
            found.append(Panel(converts, bench, points))
    return found


def draw_overview(studies: Sequence[Results], benches: Sequence[Bench], file: Path) -> None:
    """Draw `panels` into a PNG.

    Raises:
        Refused: matplotlib is not installed.
    """
    require("matplotlib", "plot")
    from matplotlib.figure import Figure

    to_draw = panels(studies, benches)
    figure = Figure(figsize=(6.2 * len(to_draw), 4.8), dpi=130, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(to_draw), squeeze=False)[0], to_draw):
        _draw(axes, panel)
    figure.savefig(file, metadata={"Software": None})


def _draw(axes: "Axes", panel: Panel) -> None:
    places = list(dict.fromkeys(_place(point.row) for point in panel.points))
    for index, place in enumerate(places):
        colour, marker = _STUDIES[index % len(_STUDIES)]
        own = [point for point in panel.points if _place(point.row) == place]
        differences: list[Any] = [point.row.difference for point in own]
        axes.errorbar(
            [point.cost for point in own],
            [difference.mean for difference in differences],
            [difference.half_width for difference in differences],
            fmt=marker,
            color=colour,
            markersize=6,
            capsize=3,
            linewidth=1.2,
            label=place,
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.axvline(1, color="0.6", linewidth=1, linestyle=":")
    axes.set_xlabel(f"train step, ratio to stock Qwen3 ({panel.bench.file.removesuffix('.json')})")
    axes.set_ylabel(f"validation loss minus that of {CONTROL}\n(nats per token, 95% interval; lower is better)")
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.margins(x=0.12, y=0.12)
    # below, where it hides no point
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)
    _label(axes, panel.points)


def _place(row: Row) -> str:
    """The study, and what its intervals are over where they say nothing on other seeds."""
    one_seed = row.difference is not None and row.difference.over == WINDOWS
    return f"{row.where}: windows of one seed" if one_seed else row.where


def _label(axes: "Axes", points: Sequence[Point]) -> None:
    """Names beside the points, moved apart where they would lie on each other; a thin line leads to the point then."""
    low_x, high_x = axes.get_xlim()
    low_y, high_y = axes.get_ylim()
    width, height = 0.28 * (high_x - low_x), 0.05 * (high_y - low_y)
    axes.set_xlim(low_x, high_x + 0.5 * width)  # room for the last name
    taken: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: point.row.difference.mean if point.row.difference else 0):
        mean = point.row.difference.mean if point.row.difference else 0.0
        x, y = point.cost + 0.012 * (high_x - low_x), mean
        while any(abs(x - other_x) < width and abs(y - other_y) < height for other_x, other_y in taken):
            y += 0.25 * height
        taken.append((x, y))
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6} if y - mean > 0.5 * height else None
        axes.annotate(point.preset, (point.cost, mean), (x, y), fontsize=8, va="bottom", arrowprops=line)
