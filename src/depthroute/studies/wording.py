# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""How numbers, lists and names read in generated text: with a minus sign, enough digits and no more."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


NOT_FINITE = "not finite"
_LOSSES = ("loss", "first_loss", "largest_rise")
_NAMES = {
    "loss": "validation loss",
    "first_loss": "validation loss before the first step",
    "largest_rise": "largest rise of the training loss over its start",
}


def number(value: float, digits: int = 4) -> str:
    """With `digits` after the point; two significant ones where that would leave nothing."""
    if not math.isfinite(value):
        return NOT_FINITE
    text = f"{value:.{digits}f}" if value == 0 or abs(value) >= 10**-digits else f"{value:.1e}"
    return text.replace("-", "−")


def signed(value: float, digits: int = 4) -> str:
    """The same with its sign; nothing is 0."""
    if value == 0:
        return "0"
    return f"+{number(value, digits)}" if value > 0 and math.isfinite(value) else number(value, digits)


def interval(low: float, high: float, digits: int = 4) -> str:
    """Both ends, signed."""
    return f"{signed(low, digits)} … {signed(high, digits)}"


def measure_name(measure: str) -> str:
    """What a measure is called."""
    return _NAMES.get(measure, measure.removesuffix(" (nats)"))


def unit(measure: str) -> str:
    """` nats`, or nothing."""
    return " nats" if measure in _LOSSES or measure.endswith("(nats)") else ""


def perplexity_percent(difference: float) -> str:
    """What a difference of losses, in nats, does to perplexity: percent, and beyond one nat the factor."""
    if abs(difference) > 1:
        return f"× {math.exp(difference):,.3g}"
    percent = 100 * math.expm1(difference)
    return f"{signed(percent, 2)}%"


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def plural(count: int, thing: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def stem(results: Mapping[str, Any]) -> str:
    """What a study's page and figures are called: after the study, and its size where that is not `cpu`."""
    return results["study"] if results["size"] == "cpu" else f"{results['study']}-{results['size']}"
