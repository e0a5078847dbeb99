# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What all studies' result files say of a preset: a row per arm that has it, with its difference and interval."""

import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import Refused, one_line
from ..evaluation.compare import CONFIDENCE
from ..modeling.configuration_depthroute import PRESETS, DepthRouteConfig
from .definition import SIZES
from .paired import (
    SEEDS,
    Noise,
    PairedDifference,
    holm,
    level,
    noise_of,
    ordered_groups,
    paired_difference,
)
from .verdicts import verdicts
from .wording import stem


CONTROL = "standard"
"""The preset that differences are taken against, where a study has it."""

# how large the blocks are and who computes the reads: still the preset
_STILL_THE_PRESET = ("depth_block_size", "depth_backend")

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One arm of one group of one study.

    Attributes:
        study, size, group, arm, describes: which.
        preset: one of `depthroute.PRESETS`.
        variation: fields in which it differs from the preset, as its start (`converts`) has it by default.
        converts: a checkpoint was converted; otherwise the model was trained from scratch.
        loss: mean validation loss at the end, nats per token; None where no run has a finite one.
        against: the arm that it is compared with; None where it is that itself.
        difference: from that arm; None where there is none, or no seed in common.
        noise: what rounding alone does in this group; None where that was not measured.
        seeds, parameters, tokens: of the arm's runs.
        page: the study's page, seen from a card.
    """

    study: str
    size: str
    group: str
    arm: str
    describes: str
    preset: str
    variation: Mapping[str, Any]
    converts: bool
    loss: float | None
    against: str | None
    against_preset: str | None
    difference: PairedDifference | None
    noise: Noise | None
    seeds: int
    parameters: int
    tokens: int
    page: str

    @property
    def where(self) -> str:
        """Study, group and size, in words."""
        group = "" if self.group == "all" else f", {self.group}"
        return f"{self.study}{group}" + ("" if self.size == "cpu" else f" ({self.size})")

    @property
    def link(self) -> str:
        return f"[{self.where}]({self.page})"


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every study's results in a folder (`model_cards/evidence/results`), by name of the file.

    Raises:
        Refused: a file that `depthroute reproduce` did not write, or under another name.
    """
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            results = json.loads(file.read_text(encoding="utf-8"))
            name = f"{results['study']}-{results['size']}.json"
            rows_of(results)
            told = [results["paper"], *(verdict.claim["says"] for verdict in verdicts(results))]
            if not all(isinstance(text, str) for text in told):
                raise TypeError("paper, says: got something that is no text")
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise Refused(
                f"{file.name}: {type(error).__name__}: {one_line(error)}; allowed: a file that `depthroute reproduce` wrote"
            ) from error
        if file.name != name:
            raise Refused(
                f"{file.name}: got the results of {results['study']} at size {results['size']}, allowed: {name}"
            )
        found.append(results)
    return found


def rows_of(results: Results) -> list[Row]:
    """All rows of one study, in its order; the arm that only differs in rounding is none of them."""
    rows = []
    for group, entry in ordered_groups(results).items():
        arms = {name: arm for name, arm in entry["arms"].items() if name != results["noise_arm"]}
        control = next((name for name, arm in arms.items() if arm["preset"] == CONTROL), results["baseline"])
        rows += [_row(results, group, name, arms, control) for name in arms]
    return rows


def _row(results: Results, group: str, name: str, arms: Mapping[str, Any], control: str) -> Row:
    arm = arms[name]
    if arm["preset"] not in PRESETS:
        raise ValueError(f"{name}: preset: got {arm['preset']!r}")
    if results["size"] not in SIZES:
        raise ValueError(f"size: got {results['size']!r}, allowed: {', '.join(SIZES)}")
    loss = level(arm["runs"], "loss")
    if not arm["runs"]:
        raise ValueError(f"{name}: runs: got none")
    compared = name != control and control in arms
    converts = any(part.partition("=")[0] == "--model" for part in shlex.split(arm["command"]))
    return Row(
        study=results["study"],
        size=results["size"],
        group=group,
        arm=name,
        describes=arm["describes"],
        preset=arm["preset"],
        variation=variation_of(arm["preset"], arm["fields"], converts),
        converts=converts,
        loss=None if loss is None else loss.mean,
        against=control if compared else None,
        against_preset=arms[control]["preset"] if compared else None,
        difference=paired_difference(arms[control]["runs"], arm["runs"]) if compared else None,
        noise=noise_of(results, group),
        seeds=len(arm["runs"]),
        parameters=arm["parameters"]["total"],
        tokens=arm["tokens"],
        page=f"evidence/{stem(dict(results))}.md",
    )


def variation_of(preset: str, fields: Mapping[str, Any] | None, converts: bool) -> dict[str, Any]:
    """Those of an arm's fields that make it another thing than the preset: not its own values, the size of its blocks, or
    the form that it starts in by default, which is anchored for a conversion and plain from scratch."""
    own = {**_own_fields(preset), "depth_anchored": converts and preset != CONTROL}
    changed = {name: value for name, value in (fields or {}).items() if value != own.get(name)}
    return {name: value for name, value in changed.items() if name not in _STILL_THE_PRESET}


@cache
def _own_fields(preset: str) -> dict[str, Any]:
    return DepthRouteConfig.from_preset(preset).to_dict()


def all_rows(studies: Iterable[Results]) -> list[Row]:
    """The rows of all studies."""
    return [row for results in studies for row in rows_of(results)]


def best_row(rows: Sequence[Row], preset: str, converts: bool) -> Row | None:
    """The one row that stands for a preset where there is room for one; None where no arm with it was compared with anything.

    The preset itself comes before variations of it, a comparison with `standard` before others, the larger size, one over
    seeds before one over the windows of a single seed, one from the study that has most presets beside it, then more seeds,
    the larger model, the longer run, the narrower interval.
    """
    compared = [row for row in rows if row.converts == converts and row.difference is not None]
    beside = Counter(
        (row.study, row.size, row.group) for row in compared if not row.variation and row.against_preset == CONTROL
    )

    def order(row: Row) -> tuple[Any, ...]:
        found = row.difference
        over_seeds = found is not None and found.over == SEEDS and found.half_width is not None
        width = float("inf") if found is None or found.half_width is None else found.half_width
        return (
            bool(row.variation),
            row.against_preset != CONTROL,
            -SIZES.index(row.size),
            not over_seeds,
            -beside[row.study, row.size, row.group],
            -row.seeds,
            -row.parameters,
            -row.tokens,
            width,
            row.study,
            row.group,
        )

    return min((row for row in compared if row.preset == preset), key=order, default=None)


def best_rows(rows: Sequence[Row], converts: bool) -> dict[str, Row]:
    """`best_row` of every preset that has one."""
    found = {preset: best_row(rows, preset, converts) for preset in PRESETS}
    return {preset: row for preset, row in found.items() if row is not None}


def directions(rows: Mapping[str, Row]) -> dict[str, int]:
    """Of each of these comparisons -1 where the loss is lower and 1 where it is higher, with 95% over all of them together
    (Holm), and 0 where it is too small to tell, as one seed always is."""
    p_values = {
        preset: p
        for preset, row in rows.items()
        if row.difference is not None and row.difference.over == SEEDS and (p := row.difference.p_value) is not None
    }
    adjusted = dict(zip(p_values, holm(list(p_values.values()))))
    return {preset: _direction(row, adjusted.get(preset)) for preset, row in rows.items()}


def _direction(row: Row, p: float | None) -> int:
    found = row.difference
    if found is None or p is None or p >= 1 - CONFIDENCE:
        return 0
    return -1 if found.mean < 0 else 1


def scale_sentence(rows: Sequence[Row]) -> str:
    """How large the models and runs were that rows are about, and what follows from that; empty without rows."""
    if not rows:
        return ""
    parameters = _range([row.parameters for row in rows])
    tokens = _range([row.tokens for row in rows])
    measured = f"models of {parameters} million parameters, trained on {tokens} million tokens"
    small = {row.size for row in rows} - {"paper"}
    if small == {"cpu"}:
        return f"Toy scale: {measured}. It shows what happens there, not what would at the papers' sizes."
    if small:
        return f"Small scale: {measured}. The papers' sizes are larger."
    return f"The papers' sizes: {measured}."


def _range(values: Sequence[int]) -> str:
    low, high = (f"{value / 1e6:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
