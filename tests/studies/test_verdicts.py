# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Verdicts: where the interval lies decides, and the sentence has the numbers that it was decided by."""

import pytest
from synthetic_results import CASES

from depthroute.studies.verdicts import AGREES, DIFFERS, OPEN, counted, verdicts


def judged(first, second, **claim):
    """The verdict on arm b with these losses (and `gain`s) by seed against arm a."""

    def runs(losses):
        return [
            {"seed": seed, "loss": loss, "windows": [loss - 0.5, loss + 0.5], "measures": {"gain": loss}}
            for seed, loss in enumerate(losses)
        ]

    entry = {"says": "so", "measure": "loss", "arm": "b", "against": "a", **claim}
    results = {
        "baseline": "a",
        "noise_arm": "twin",
        "definition": {"claims": [entry]},
        "groups": {"all": {"arms": {"a": {"runs": runs(first)}, "b": {"runs": runs(second)}}}},
    }
    (one,) = verdicts(results)
    return one


BASE = [2.0, 2.1, 1.9]
LOWER, HIGHER, ABOUT = [1.9, 2.01, 1.8], [2.1, 2.21, 2.0], [2.01, 2.08, 1.9]


@pytest.mark.parametrize(
    ("second", "expect", "verdict"),
    [
        (LOWER, "lower", AGREES),
        (HIGHER, "lower", DIFFERS),
        (ABOUT, "lower", OPEN),
        (LOWER, "higher", DIFFERS),
        (HIGHER, "higher", AGREES),
        (ABOUT, "higher", OPEN),
        (BASE, "lower", DIFFERS),
        (BASE, "higher", DIFFERS),
    ],
)
def test_lower_and_higher(second, expect, verdict):
    assert judged(BASE, second, expect=expect).verdict == verdict


@pytest.mark.parametrize(
    ("second", "within", "verdict"),
    [(ABOUT, 0.1, AGREES), (ABOUT, 0.01, OPEN), (LOWER, 0.05, DIFFERS), (HIGHER, 0.05, DIFFERS), (BASE, 0.001, AGREES)],
)
def test_the_same_is_an_interval_inside_a_band(second, within, verdict):
    assert judged(BASE, second, expect="same", within=within).verdict == verdict


@pytest.mark.parametrize(
    ("expect", "value", "verdict"),
    [
        ("at_least", 1.5, AGREES),
        ("at_least", 2.5, DIFFERS),
        ("at_least", 2.01, OPEN),
        ("at_most", 2.5, AGREES),
        ("at_most", 1.5, DIFFERS),
        ("at_most", 2.01, OPEN),
    ],
)
def test_levels_go_by_their_interval(expect, value, verdict):
    one = judged(BASE, BASE, measure="gain", against=None, expect=expect, value=value)
    assert one.verdict == verdict and "mean of 3 runs" in one.reason


def test_the_level_of_one_run_is_decided_by_its_value():
    one = judged([2.0], [2.0], measure="gain", against=None, expect="at_least", value=1.9)
    assert (one.verdict, one.reason) == (AGREES, "2.0000, one run")
    assert judged([2.0], [2.0], measure="gain", against=None, expect="at_least", value=2.1).verdict == DIFFERS


def test_another_measure_of_one_pair_is_too_small_to_tell():
    one = judged([2.0], [1.0], measure="gain", expect="lower")
    assert one.verdict == OPEN and "one pair: no interval" in one.reason


def test_the_reason_has_the_numbers():
    one = judged(BASE, LOWER, expect="lower")
    assert one.reason == "−0.0967 nats (−9.21% perplexity), 95% −0.1110 … −0.0823, lower in 3 of 3 pairs"
    assert "higher in 3 of 3 pairs" in judged(BASE, HIGHER, expect="higher").reason
    assert judged(BASE, BASE, expect="lower").reason == "identical in all 3 pairs"
    assert judged(BASE, ABOUT, expect="lower").reason.endswith("what could be seen: ±0.0379 nats")


def test_one_seed_says_that_it_is_over_windows():
    one = judged([2.0], [1.9], expect="lower")
    assert one.verdict == OPEN and one.reason.endswith(
        "2 validation windows of one seed: another seed may give something else"
    )


def test_a_run_that_diverged_decides_nothing():
    results = CASES["one group"]()
    results["groups"]["all"]["arms"]["rd-attnres"]["runs"][0]["loss"] = None
    first = verdicts(results)[0]
    assert (first.verdict, first.reason) == (OPEN, "not finite in 1 of 5 pairs")


def test_claims_are_looked_at_in_their_groups_in_order():
    found = verdicts(CASES["groups by depth"]())
    assert [(one.number, one.group) for one in found] == [
        (1, "48 layers"),
        (2, "12 layers"),
        (2, "24 layers"),
        (2, "48 layers"),
    ]
    assert counted(found) == {AGREES: 4, DIFFERS: 0, OPEN: 0}


def test_what_was_not_run_or_not_measured_is_said():
    results = CASES["one group"]()
    del results["groups"]["all"]["arms"]["states"]
    for run in results["groups"]["all"]["arms"]["rd-attnres"]["runs"]:
        run["measures"].clear()
    found = {one.number: one for one in verdicts(results)}
    assert (found[3].verdict, found[3].reason) == (OPEN, "not measured: no run of states")
    assert (found[4].verdict, found[4].reason) == (OPEN, "not measured: no run has this measure")


def test_an_unknown_expectation_is_an_error():
    with pytest.raises(ValueError, match="expect: got 'louder'"):
        judged(BASE, LOWER, expect="louder")
