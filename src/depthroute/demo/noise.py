# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Differences between two models on the same items, and whether they mean anything."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


NOISE_BAND = 2.0
"""Standard errors within which a difference is called noise: about 95%, if items are independent."""

ONE_SEED = (
    "These errors are those of the sample of texts. Each fine-tune ran once, with one seed: how much another seed would move "
    "the results was not measured, so even a difference outside the noise is that of one run."
)


@dataclass(frozen=True)
class Difference:
    """Mean of second minus first over paired items.

    Attributes:
        mean: in the metric's unit.
        stderr: its standard error over items; nan for a single item.
        items: how many.
        identical: every item is equal in both.
    """

    mean: float
    stderr: float
    items: int
    identical: bool

    @property
    def within_noise(self) -> bool:
        """Whether it is smaller than two standard errors. With a single item nothing can be told apart."""
        return not abs(self.mean) > NOISE_BAND * self.stderr

    def __str__(self) -> str:
        return "0 (identical)" if self.identical else f"{self.mean:+.4f} ± {self.stderr:.4f}"


def paired_difference(
    first: Sequence[float], second: Sequence[float], weights: Sequence[float] | None = None
) -> Difference:
    """Σ (second − first) / Σ weights, and its standard error: over items, as pairs, since what is hard for one model is hard
    for the other.

    Args:
        first, second: one number per item, in the same order; with `weights` a total over that many units (bytes).
        weights: default: 1 each, which makes it a mean.

    Raises:
        ValueError: no items, or different numbers of them.
    """
    weights = [1.0] * len(first) if weights is None else weights
    if not first or not len(first) == len(second) == len(weights):
        raise ValueError(
            f"items: got {len(first)}, {len(second)} and {len(weights)}, allowed: the same number, at least 1"
        )
    differences = [b - a for a, b in zip(first, second)]
    total = math.fsum(weights)
    mean = math.fsum(differences) / total
    identical = not any(differences)
    if len(first) == 1:
        return Difference(mean, math.nan, 1, identical)
    squares = math.fsum((d - mean * w) ** 2 for d, w in zip(differences, weights))
    return Difference(mean, math.sqrt(squares * len(first) / (len(first) - 1)) / total, len(first), identical)


def statement(what: str, metric: str, difference: Difference, higher_is_better: bool) -> str:
    """One sentence on one comparison.

    Args:
        what: `second against first`.
        metric: its name.
        higher_is_better: which way is up.
    """
    head = f"{what}, {metric}: {difference} over {difference.items} items"
    if difference.identical:
        return f"{head}: no difference."
    if difference.within_noise:
        return f"{head}: within noise."
    better = (difference.mean > 0) == higher_is_better
    return f"{head}: {'better' if better else 'worse'}, outside the noise."
