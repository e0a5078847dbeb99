# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The tables of a study's page that are about the loss: arms, noise, claims."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from depthroute_conversion.card import table

from .paired import (
    NOISE_BAND,
    WINDOWS,
    Comparison,
    noise_of,
    ordered_groups,
    values_of,
)
from .verdicts import Verdict
from .wording import NOT_FINITE, interval, listed, measure_name, number, perplexity_percent, plural, signed


def group_heading(results: Mapping[str, Any], group: str) -> str:
    """A heading, where there is more than one group."""
    return f"### {group[:1].upper()}{group[1:]}\n\n" if len(results["groups"]) > 1 else ""


def mean_and_spread(values: Sequence[float], digits: int = 4) -> str:
    """`1.9231 ± 0.0102`: mean and standard deviation; one value alone."""
    bad = sum(not math.isfinite(value) for value in values)
    if bad:
        return f"{NOT_FINITE} in {bad} of {len(values)}"
    spread = f" ± {number(stdev(values), digits)}" if len(values) > 1 else ""
    return f"{number(fmean(values), digits)}{spread}"


def arms_tables(results: Mapping[str, Any], compared: Sequence[Comparison]) -> str:
    """What each arm is, and its final loss beside the baseline's, a table per group; below it, how to read it."""
    rows_of = {(row.group, row.arm): row for row in compared}
    tables = []
    for group, entry in ordered_groups(results).items():
        rows = [("arm", "what it is", "parameters (routing)", "loss", "difference, 95%", "perplexity", "lower in")]
        baseline_runs = len(entry["arms"].get(results["baseline"], {"runs": []})["runs"])
        for name, arm in entry["arms"].items():
            losses = values_of(arm["runs"], "loss")
            runs = "" if len(losses) == baseline_runs else f" ({plural(len(losses), 'run')})"
            parameters = f"{arm['parameters']['total']:,} ({arm['parameters']['routing']:,})"
            loss = mean_and_spread(losses) + runs
            compared_cells = _difference_cells(rows_of.get((group, name)))
            rows.append((f"`{name}`", arm["describes"], parameters, loss, *compared_cells))
        tables.append(group_heading(results, group) + table(rows).strip())
    return "\n\n".join([*tables, _how_to_read(results, compared)])


def _difference_cells(row: Comparison | None) -> tuple[str, str, str]:
    if row is None:
        return "baseline", "", ""
    found = row.difference
    if found is None:
        return "no common seed", "", ""
    one_seed = found.over == WINDOWS
    pairs = f"{found.better} of {found.count}{' windows' if one_seed else ''}"
    if not math.isfinite(found.mean):
        return NOT_FINITE, "", pairs
    if found.identical:
        return "identical", "0%", pairs
    told = f"{signed(found.mean)}"
    if found.low is not None and found.high is not None:
        told += f" ({interval(found.low, found.high)}){' *' if row.clear else ''}"
    return told, perplexity_percent(found.mean), pairs


def _how_to_read(results: Mapping[str, Any], compared: Sequence[Comparison]) -> str:
    corrected = sum(row.adjusted_p is not None for row in compared)
    over_windows = any(row.difference is not None and row.difference.over == WINDOWS for row in compared)
    over_seeds = any(row.difference is not None and row.difference.over != WINDOWS for row in compared)
    told = [
        "Loss: validation, at the end, nats per token, mean ± standard deviation over seeds. Difference: arm minus "
        f"`{results['baseline']}`; perplexity: what that difference does to it."
    ]
    if over_seeds:
        told.append(
            "Runs are paired by seed: the same initial weights where shapes allow, the same batches; 95% t intervals."
        )
    if over_windows:
        told.append(
            "Where there is one common seed, pairs are validation windows: the interval is that of the sample of text, and says "
            "nothing on what another seed would give."
        )
    if corrected:
        clear = sum(row.clear for row in compared)
        told.append(
            f"*: clear of zero after Holm's correction for {plural(corrected, 'comparison')} on this page: {clear} of {corrected}."
        )
    return " ".join(told)


def noise_facts(results: Mapping[str, Any]) -> str:
    """What two runs that differ in rounding only differ by."""
    told: list[str] = []
    unknown: list[str] = []
    several = len(results["groups"]) > 1
    baseline, twin = f"`{results['baseline']}`", f"`{results['noise_arm']}`"
    for group, entry in ordered_groups(results).items():
        noise = noise_of(results, group)
        if noise is None:
            unknown.append(group)
            continue
        where = f"**{group}**: " if several else ""
        pairs = plural(noise.count, "pair")
        if not math.isfinite(noise.level):
            told.append(f"{where}the loss of {baseline} or {twin} is {NOT_FINITE}.")
        elif noise.level == 0:
            told.append(f"{where}{twin} and {baseline} end at identical losses in {pairs}: rounding changed nothing.")
        else:
            band, what = NOISE_BAND * noise.level, entry["arms"][results["noise_arm"]]["describes"]
            of_mean = f", or within ±{number(band / math.sqrt(noise.count))} in a mean of {noise.count},"
            told.append(
                f"{where}{twin} ({what}) and {baseline} differ in rounding only, and their losses end {number(noise.level)} nats "
                f"apart (standard deviation about zero over {pairs}; largest {number(noise.largest)}). A difference within "
                f"±{number(band)} nats in one pair{of_mean if noise.count > 1 else ''} cannot be told from rounding."
            )
    if told:
        told.append("Intervals over seeds have this noise inside; those over windows of one seed do not.")
    if unknown:
        where = f" at {listed(unknown)}" if several else ""
        told.append(f"{twin} was not run beside {baseline}{where}: what rounding alone does there is not known.")
    return "\n\n".join(told)


def claims_table(results: Mapping[str, Any], judged: Sequence[Verdict]) -> str:
    """The claims in the paper's words, what was measured, and what follows."""
    several = len(results["groups"]) > 1
    heading = ("", *(["where"] if several else []), "claim", "measured here", "verdict")
    rows = [heading]
    for one in judged:
        compared = f" against `{one.claim['against']}`" if one.claim.get("against") else ""
        measured = f"`{one.claim['arm']}`{compared}, {measure_name(one.claim['measure'])}: {one.reason}"
        where = [one.group] if several else []
        rows.append(
            (str(one.number), *where, one.claim["says"], measured, f"**{one.verdict}** with “{_expected(one.claim)}”")
        )
    return (
        f"{table(rows).strip()}\n\nA claim agrees where the whole 95% interval lies where it says (in quotes: what was looked "
        "for), and does not where all of it lies elsewhere. These intervals are not corrected for their number."
    )


def _expected(claim: Mapping[str, Any]) -> str:
    words = {"lower": "lower", "higher": "higher", "at_least": "at least {value}", "at_most": "at most {value}"}
    words["same"] = "the same, within ±{within}"
    return words[claim["expect"]].format(value=claim.get("value"), within=claim.get("within"))
