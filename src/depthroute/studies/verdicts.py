# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a paper claims beside what was measured: it agrees, it does not, or the interval is too wide to tell.

A verdict goes by the 95% interval: it has to lie wholly where the claim says, or wholly where it does not. Identical runs agree
with "the same" and not with "lower" or "higher". One seed decides nothing
on a difference: its interval is that of the sample of text. A level of a single run has no interval; there the value alone decides.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .paired import (
    WINDOWS,
    Estimate,
    PairedDifference,
    level,
    ordered_groups,
    paired_difference,
)
from .wording import interval, number, perplexity_percent, plural, signed, unit


AGREES, DIFFERS, OPEN = "agrees", "does not agree", "too small to tell"
VERDICTS = (AGREES, DIFFERS, OPEN)
_LEVELS = ("at_least", "at_most")


@dataclass(frozen=True)
class Verdict:
    """One claim in one group.

    Attributes:
        number: of the claim, from 1, in the definition's order.
        claim: its entry in the definition.
        group: where it was looked at.
        verdict: one of `VERDICTS`.
        reason: one sentence, without a full stop, with the numbers.
        estimate: what it goes by; None where nothing was measured.
    """

    number: int
    claim: Mapping[str, Any]
    group: str
    verdict: str
    reason: str
    estimate: Estimate | None


def verdicts(results: Mapping[str, Any]) -> list[Verdict]:
    """Every claim of the study in each of its groups that results are of."""
    found = []
    for index, claim in enumerate(results["definition"].get("claims") or [], 1):
        for group, entry in ordered_groups(results).items():
            if claim.get("groups") is None or group in claim["groups"]:
                found.append(Verdict(index, claim, group, *_judged(claim, entry["arms"])))
    return found


def _judged(claim: Mapping[str, Any], arms: Mapping[str, Any]) -> tuple[str, str, Estimate | None]:
    measure, against = claim["measure"], claim.get("against")
    absent = [name for name in (claim["arm"], against) if name is not None and name not in arms]
    if absent:
        return OPEN, f"not measured: no run of {' or '.join(absent)}", None
    runs = arms[claim["arm"]]["runs"]
    if against is None:
        estimate: Estimate | None = level(runs, measure)
    else:
        estimate = paired_difference(arms[against]["runs"], runs, measure)
    if estimate is None:
        missing = "no run has this measure" if against is None else "no seed has this measure in both arms"
        return OPEN, f"not measured: {missing}", None
    told = _told(claim, estimate)
    if estimate.over == WINDOWS:
        return OPEN, f"{told}: another seed may give something else", estimate
    # a mean that is not finite has no interval, and is on neither side of anything
    low, high = estimate.low, estimate.high
    if low is None or high is None:
        if claim["expect"] not in _LEVELS:
            return OPEN, told, estimate
        low = high = estimate.mean
    agrees, differs = _sides(claim, low, high)
    verdict = AGREES if agrees else DIFFERS if differs else OPEN
    if verdict == OPEN and estimate.half_width is not None:
        told += f"; what could be seen: ±{number(estimate.half_width)}{unit(measure)}"
    return verdict, told, estimate


def _sides(claim: Mapping[str, Any], low: float, high: float) -> tuple[bool, bool]:
    """Whether an interval lies wholly where the claim says, and wholly where it does not."""
    expect = claim["expect"]
    if expect == "lower":
        return high < 0, low >= 0
    if expect == "higher":
        return low > 0, high <= 0
    if expect == "same":
        within = claim["within"]
        return -within <= low and high <= within, low > within or high < -within
    if expect == "at_least":
        return low >= claim["value"], high < claim["value"]
    if expect == "at_most":
        return high <= claim["value"], low > claim["value"]
    raise ValueError(f"expect: got {expect!r}, allowed: lower, higher, same, at_least, at_most")


def _told(claim: Mapping[str, Any], estimate: Estimate) -> str:
    """The numbers, as a sentence."""
    measure = claim["measure"]
    if isinstance(estimate, PairedDifference):
        return difference_told(estimate, measure, higher=claim["expect"] in ("higher", "at_least"))
    runs = "one run" if estimate.count == 1 else f"mean of {plural(estimate.count, 'run')}"
    told = f"{number(estimate.mean)}{unit(measure)}, {runs}"
    if estimate.low is not None and estimate.high is not None:
        told += f", 95% {number(estimate.low)} … {number(estimate.high)}"
    return told


def difference_told(difference: PairedDifference, measure: str = "loss", higher: bool = False) -> str:
    """`−0.0123 nats (−1.22% perplexity), 95% −0.0200 … −0.0040, lower in 5 of 5 pairs`.

    Args:
        measure: which; of the loss, perplexity is told too.
        higher: count the pairs in which it is higher instead.
    """
    one_seed = difference.over == WINDOWS
    pairs = (
        f"{plural(difference.count, 'validation window')} of one seed" if one_seed else plural(difference.count, "pair")
    )
    if not math.isfinite(difference.mean):
        count = sum(not math.isfinite(value) for value in difference.differences)
        return f"not finite in {count} of {pairs}"
    if difference.identical:
        return f"identical in {'all ' if difference.count > 1 else ''}{pairs}"
    told = f"{signed(difference.mean)}{unit(measure)}"
    if measure == "loss":
        told += f" ({perplexity_percent(difference.mean)} perplexity)"
    if difference.low is not None and difference.high is not None:
        told += f", 95% {interval(difference.low, difference.high)}"
    else:
        told += ", one pair: no interval"
    counted, way = (difference.higher, "higher") if higher else (difference.better, "lower")
    return f"{told}, {way} in {counted} of {pairs}"


def counted(found: Sequence[Verdict]) -> dict[str, int]:
    """How many there are of each verdict."""
    return {verdict: sum(one.verdict == verdict for one in found) for verdict in VERDICTS}
