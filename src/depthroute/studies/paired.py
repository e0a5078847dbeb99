# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Two arms of a study, run by run: mean difference over seeds with its 95% t interval, what of it is rounding, and which of a
page's differences stay clear of zero when all of them are looked at.

Runs are paired by seed: the same initial weights and batches. With one common seed the final loss is paired over validation
windows instead; such an interval is that of the sample of text, and says nothing on what another seed would give.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.compare import CONFIDENCE, over_documents
from ..extras import require


SEEDS, WINDOWS = "seeds", "validation windows"
NOISE_BAND = 2.0
"""So many times the noise level is taken for what rounding alone can do: about 95% of pairs."""

SHARPNESS = "sharpness, deepest third"
"""The measure that `measures_of` adds to a run's own."""

ASYMMETRY = "rescue gain on the loss, difference of the streams"
"""Another: how much more of the loss one stream alone brings back than the other; large where one does the work of both."""

DEEPEST = 3
"""The deepest 1/3 is what the Delta paper's collapse is about."""

FINAL_READ = "model.final_read"

Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95% interval.

    Attributes:
        mean: in the measure's unit; nan where a run's value is not finite.
        stderr, low, high: standard error and 95% t interval; None for a single value.
        count: of values.
        over: what they are: "seeds", or "validation windows" of one seed.
    """

    mean: float
    stderr: float | None
    low: float | None
    high: float | None
    count: int
    over: str

    @property
    def half_width(self) -> float | None:
        """Of the interval: the smallest distance from zero that could have been seen."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def p_value(self) -> float | None:
        """Two-sided, of Student's t test against zero; None without an interval."""
        if self.stderr is None:
            return None
        if self.stderr == 0:
            return float(self.mean == 0)
        return float(2 * require("scipy.stats", "eval").t.sf(abs(self.mean / self.stderr), self.count - 1))


@dataclass(frozen=True)
class PairedDifference(Estimate):
    """An arm minus the one it is compared with.

    Attributes:
        better: in how many pairs the arm's value is the lower one.
        differences: of every pair.
    """

    better: int
    differences: tuple[float, ...]

    @property
    def higher(self) -> int:
        """In how many pairs the arm's value is the higher one."""
        return sum(difference > 0 for difference in self.differences)

    @property
    def identical(self) -> bool:
        """Every difference is exactly zero."""
        return not any(self.differences)


@dataclass(frozen=True)
class Noise:
    """What rounding alone does: differences of two arms whose arithmetic is the same on paper.

    Attributes:
        level: root mean square of the differences (their standard deviation about zero), nats.
        largest: of their absolute values.
        count: of pairs.
    """

    level: float
    largest: float
    count: int


@dataclass(frozen=True)
class Comparison:
    """Final loss of an arm against the baseline, in one group.

    Attributes:
        difference: None where they have no seed in common.
        adjusted_p: Holm's, over all comparisons of the results; None without an interval, or for the noise arm.
        clear: of zero after that correction.
    """

    group: str
    arm: str
    difference: PairedDifference | None
    adjusted_p: float | None
    clear: bool


def value_of(run: Mapping[str, Any], measure: str) -> float | None:
    """`loss`, `first_loss`, `largest_rise`, or one of the run's `measures`; None where the run has none of that name, nan where
    it was not finite (null in JSON)."""
    place = run if measure in ("loss", "first_loss", "largest_rise") else measures_of(run)
    return _number(place[measure]) if measure in place else None


def measures_of(run: Mapping[str, Any]) -> dict[str, float | None]:
    """A run's `measures`, and how sharp the routing of its deepest third of layers is: of the weight that routing over S sources
    can move away from uniform, (max − 1/S) / (1 − 1/S), the mean over reads; 0 where nothing is chosen, 1 where one source is.
    Arms with other numbers of sources, or with a final read, can be compared by it. And `ASYMMETRY` of two streams."""
    rows = [row for row in run.get("by_depth", ()) if row["name"] != FINAL_READ]
    layers = 1 + max((row["sublayer"] // 2 for row in rows), default=0)
    sharpness: dict[str, float | None] = {}
    for route in dict.fromkeys(row["route"] for row in rows):
        deep = [row for row in rows if row["route"] == route and row["sublayer"] >= 2 * (layers - layers // DEEPEST)]
        if deep:
            shares = [(_number(row["max_weight"]) - 1 / row["sources"]) / (1 - 1 / row["sources"]) for row in deep]
            sharpness[SHARPNESS + ("" if route == "main" else f", {route}")] = math.fsum(shares) / len(shares)
    gains = [run["measures"].get(f"rescue gain on the loss, stream {stream}") for stream in (0, 1)]
    first, second = (_number(gain) for gain in gains)
    asymmetry = {} if None in gains else {ASYMMETRY: abs(first - second)}
    return sharpness | asymmetry | run["measures"]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def values_of(runs: Runs, measure: str) -> list[float]:
    """Of the runs that have the measure."""
    return [value for run in runs if (value := value_of(run, measure)) is not None]


def level(runs: Runs, measure: str) -> Estimate | None:
    """Mean of a measure over an arm's runs; None where none has it."""
    values = values_of(runs, measure)
    return Estimate(*_interval([0.0] * len(values), values), len(values), SEEDS) if values else None


def paired_difference(first: Runs, second: Runs, measure: str = "loss") -> PairedDifference | None:
    """Second minus first, over the seeds that both have; None where there are none with that measure.

    Identical values have the interval 0 … 0, also of a single pair.

    Raises:
        ValueError: runs of one seed were measured over different numbers of windows.
    """
    by_seed = [{run["seed"]: run for run in runs if value_of(run, measure) is not None} for runs in (first, second)]
    common = [seed for seed in by_seed[0] if seed in by_seed[1]]
    if not common:
        return None
    pairs = [(by_seed[0][seed], by_seed[1][seed]) for seed in common]
    before, after = ([float(value_of(run, measure)) for run in runs] for runs in zip(*pairs))  # type: ignore[arg-type]
    over = SEEDS
    if len(common) == 1 and measure == "loss":
        over = WINDOWS
        before, after = ([_number(value) for value in run["windows"]] for run in pairs[0])
        if len(before) != len(after):
            raise ValueError(f"windows: got {len(before)} and {len(after)}, allowed: the same number")
    differences = tuple(b - a for a, b in zip(before, after))
    better = sum(difference < 0 for difference in differences)
    estimate = _interval(before, after) if any(differences) else (0.0, 0.0, 0.0, 0.0)
    return PairedDifference(*estimate, len(differences), over, better, differences)


def _interval(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float | None, float | None, float | None]:
    """Mean of after − before, standard error, ends of the interval."""
    if not all(map(math.isfinite, (*before, *after))):
        return math.nan, None, None, None
    require("scipy.stats", "eval")
    found = over_documents("", "", [(a, b, 1.0) for a, b in zip(before, after)], None)
    return found.difference, found.stderr, found.low, found.high


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given: below 0.05 means clear of zero with an error of 5% over all of them."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def ordered_groups(results: Mapping[str, Any]) -> dict[str, Any]:
    """A study's groups; by their number, where the name of each has one (12 layers, 24 layers; 0.5B, 7B)."""
    found = {name: re.search(r"\d+(\.\d+)?", name) for name in results["groups"]}
    names = list(found)
    if all(found.values()):
        names.sort(key=lambda name: float(found[name][0]))  # type: ignore[index]
    return {name: results["groups"][name] for name in names}


def noise_of(results: Mapping[str, Any], group: str) -> Noise | None:
    """The noise level of a group's final losses: the noise arm against the baseline; None where they share no seed."""
    arms = results["groups"][group]["arms"]
    if results["baseline"] not in arms or results["noise_arm"] not in arms:
        return None
    found = [
        {run["seed"]: _number(run["loss"]) for run in arms[results[which]]["runs"]}
        for which in ("baseline", "noise_arm")
    ]
    differences = [found[1][seed] - loss for seed, loss in found[0].items() if seed in found[1]]
    if not differences:
        return None
    mean_square = math.fsum(difference**2 for difference in differences) / len(differences)
    return Noise(math.sqrt(mean_square), max(map(abs, differences)), len(differences))


def comparisons(results: Mapping[str, Any]) -> list[Comparison]:
    """Final loss of every arm against the baseline, group by group. What is corrected for, and can be clear of zero, are those over
    several seeds: not the noise arm, and not a single seed, whose interval is that of the sample of text."""
    found: list[tuple[str, str, PairedDifference | None]] = []
    for group, entry in ordered_groups(results).items():
        arms = entry["arms"]
        baseline = arms.get(results["baseline"], {"runs": []})["runs"]
        found += [
            (group, name, paired_difference(baseline, arm["runs"]))
            for name, arm in arms.items()
            if name != results["baseline"]
        ]
    counted = [
        (group, name, p)
        for group, name, difference in found
        if name != results["noise_arm"]
        and difference is not None
        and difference.over == SEEDS
        and (p := difference.p_value) is not None
    ]
    adjusted = {(group, name): p for (group, name, _), p in zip(counted, holm([p for *_, p in counted]))}
    rows = []
    for group, name, difference in found:
        p = adjusted.get((group, name))
        rows.append(Comparison(group, name, difference, p, p is not None and p < 1 - CONFIDENCE))
    return rows
