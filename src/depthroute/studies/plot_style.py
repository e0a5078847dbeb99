# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the figures of studies share: the scale of differences, the legend, the bytes of a file."""

from collections.abc import Iterable, Sequence
from io import BytesIO
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from .paired import NOISE_BAND


if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND_COLOUR = "0.88"
BAND_LABEL = f"{NOISE_BAND:g} × rounding noise of one pair"
_WIDE = 12.0
"""So many times the median difference does not fit beside it on a linear axis."""
_PNG_COLOURS = 128


def linear_up_to(values: Sequence[float]) -> float | None:
    """Up to where an axis of differences is linear: the median distance from zero, to one digit, where some are far beyond
    it; None: everywhere."""
    distances = [abs(value) for value in values if value and np.isfinite(value)]
    if not distances or max(distances) <= _WIDE * median(distances):
        return None
    return float(f"{median(distances):.0e}")


def set_scale(axes: "Axes", which: str, threshold: float | None, bins: int) -> None:
    """Linear, or logarithmic beyond a threshold, with plain numbers."""
    from matplotlib.ticker import MaxNLocator, SymmetricalLogLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    if threshold is None:
        axis.set_major_locator(MaxNLocator(bins))
    else:
        (axes.set_xscale if which == "x" else axes.set_yscale)("symlog", linthresh=threshold)
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
    axis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))


def shared_legend(figure: "Figure", panels: Iterable["Axes"], columns: int) -> None:
    """One legend below all panels, each label once."""
    entries: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    if entries:
        handles = list(entries.values())
        figure.legend(handles, list(entries), loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def png(figure: "Figure") -> bytes:
    """A figure as a file, in few colours, which takes a third of the space and leaves matplotlib's version out."""
    from PIL import Image

    drawn, file = BytesIO(), BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(_PNG_COLOURS, dither=Image.Dither.NONE).save(file, format="PNG", optimize=True)
    return file.getvalue()
