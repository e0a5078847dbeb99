# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Paired differences: scipy's paired t test, pairs by seed, noise and Holm's correction."""

import math

import pytest
from scipy import stats
from synthetic_results import CASES, one_group, synthetic_results

from depthroute.studies.paired import (
    ASYMMETRY,
    SEEDS,
    SHARPNESS,
    WINDOWS,
    comparisons,
    holm,
    level,
    measures_of,
    noise_of,
    ordered_groups,
    paired_difference,
    value_of,
)


def runs_of(losses, **measures):
    return [
        {"seed": seed, "loss": loss, "first_loss": 5.0, "windows": [loss, loss + 1.0], "measures": dict(measures)}
        for seed, loss in losses.items()
    ]


FIRST = {1: 2.0, 2: 2.1, 3: 1.9, 4: 2.05}
SECOND = {4: 2.02, 3: 1.91, 2: 2.05, 1: 1.96}  # another order: pairs are by seed


def test_is_scipys_paired_t_test():
    found = paired_difference(runs_of(FIRST), runs_of(SECOND))
    by_seed = [SECOND[seed] for seed in FIRST], list(FIRST.values())
    expected = stats.ttest_rel(*by_seed)
    low, high = expected.confidence_interval(0.95)
    assert found.mean == pytest.approx(-0.0275)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.p_value == pytest.approx(expected.pvalue)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert (found.better, found.higher, found.count, found.over, found.identical) == (3, 1, 4, SEEDS, False)


def test_only_common_seeds_are_paired():
    found = paired_difference(runs_of(FIRST), runs_of({2: 2.0, 4: 2.0, 9: 7.0}))
    assert found.count == 2 and found.mean == pytest.approx(-0.075)
    assert paired_difference(runs_of(FIRST), runs_of({8: 2.0})) is None


def test_one_seed_is_paired_over_its_windows():
    first, second = runs_of({1: 2.0}), runs_of({1: 1.9, 2: 1.0})
    first[0]["windows"], second[0]["windows"] = [1.0, 2.0, 3.0], [0.9, 1.8, 3.1]
    found = paired_difference(first, second)
    expected = stats.ttest_rel([0.9, 1.8, 3.1], [1.0, 2.0, 3.0]).confidence_interval(0.95)
    assert (found.over, found.count, found.better) == (WINDOWS, 3, 2)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))
    second[0]["windows"].append(1.0)
    with pytest.raises(ValueError, match="windows: got 3 and 4"):
        paired_difference(first, second)


def test_another_measure_of_one_seed_has_no_interval():
    found = paired_difference(runs_of({1: 2.0}, gain=0.5), runs_of({1: 2.0}, gain=0.75), "gain")
    assert (found.mean, found.low, found.half_width, found.p_value, found.over) == (0.25, None, None, None, SEEDS)


@pytest.mark.parametrize("measure", ["loss", "first_loss"])
@pytest.mark.parametrize("seeds", [1, 3])
def test_identical_runs_are_said_to_be(seeds, measure):
    losses = {seed: 2.0 + seed for seed in range(seeds)}
    found = paired_difference(runs_of(losses), runs_of(losses), measure)
    assert found.identical and (found.mean, found.low, found.high, found.p_value, found.better) == (0, 0, 0, 1, 0)


def test_runs_without_the_measure_are_left_out():
    first, second = runs_of(FIRST, gain=0.1), runs_of(SECOND, gain=0.2)
    del second[0]["measures"]["gain"]
    assert paired_difference(first, second, "gain").count == 3
    assert paired_difference(first, runs_of(SECOND), "gain") is None
    assert level(runs_of(FIRST), "gain") is None


def test_a_value_that_is_not_finite_is_not_hidden():
    first, second = runs_of(FIRST), runs_of(SECOND)
    second[0]["loss"] = None  # what JSON has for it
    assert math.isnan(value_of(second[0], "loss"))
    found = paired_difference(first, second)
    assert math.isnan(found.mean) and found.low is found.p_value is None and not found.identical


def test_level_is_scipys_interval_of_a_mean():
    found = level(runs_of(FIRST), "loss")
    values = list(FIRST.values())
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found.mean == pytest.approx(sum(values) / 4)
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high))


def test_holm_multiplies_by_what_is_left_and_never_falls():
    # the example by hand: sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_noise_is_the_spread_of_the_twin_about_zero():
    arms = {"attnres-block": {"runs": runs_of(FIRST)}, "rounding twin": {"runs": runs_of({1: 2.03, 2: 2.06})}}
    results = {"baseline": "attnres-block", "noise_arm": "rounding twin", "groups": {"all": {"arms": arms}}}
    noise = noise_of(results, "all")
    assert noise.level == pytest.approx(math.sqrt((0.03**2 + 0.04**2) / 2))
    assert (noise.largest, noise.count) == (pytest.approx(0.04), 2)
    del arms["rounding twin"]
    assert noise_of(results, "all") is None


def test_comparisons_are_corrected_over_the_whole_page_without_the_twin():
    results = CASES["groups by depth"]()
    rows = comparisons(results)
    assert [row.group for row in rows] == ["12 layers"] * 3 + ["24 layers"] * 2 + ["48 layers"] * 2
    corrected = [row for row in rows if row.adjusted_p is not None]
    assert {row.arm for row in corrected} == {"wav", "rezero"} and len(corrected) == 6
    assert [row.adjusted_p for row in corrected] == holm([row.difference.p_value for row in corrected])
    assert [(row.arm, row.group) for row in rows if row.clear] == [("wav", "48 layers")]


def test_one_seed_is_never_clear_and_is_not_corrected_for():
    rows = {row.arm: row for row in comparisons(synthetic_results({"all": one_group(seeds=(1,))}, []))}
    assert rows["states"].difference.over == WINDOWS and rows["states"].difference.p_value < 0.01
    assert not rows["states"].clear and rows["states"].adjusted_p is None


def test_groups_are_in_order_of_their_number():
    def order(*names):
        return list(ordered_groups({"groups": dict.fromkeys(names)}))

    assert order("48 layers", "6 layers", "12 layers") == ["6 layers", "12 layers", "48 layers"]
    assert order("1B", "0.3B", "0.1B") == ["0.1B", "0.3B", "1B"]
    assert order("b 2", "a") == ["b 2", "a"]


def read(sublayer, sources, max_weight, route="main"):
    name = "model.final_read" if sublayer == 12 else f"model.layers.{sublayer // 2}.read"
    return {"name": name, "route": route, "sublayer": sublayer, "sources": sources, "max_weight": max_weight}


def test_sharpness_does_not_depend_on_the_number_of_sources_or_on_a_final_read():
    few = [read(sublayer, 2, 0.5 + 0.5 * 0.3) for sublayer in range(1, 12)]
    many = [read(sublayer, 20, 0.05 + 0.95 * 0.3) for sublayer in range(1, 12)]
    for rows in (few, many, [*many, read(12, 20, 1.0)]):
        assert measures_of({"measures": {"m": 1}, "by_depth": rows}) == {"m": 1, SHARPNESS: pytest.approx(0.3)}
    for weight, sharpness in ((0.05, 0.0), (1.0, 1.0)):
        rows = [read(sublayer, 20, weight) for sublayer in range(1, 12)]
        assert measures_of({"measures": {}, "by_depth": rows})[SHARPNESS] == pytest.approx(sharpness)


def test_the_asymmetry_of_two_streams():
    gains = {"rescue gain on the loss, stream 0": 0.25, "rescue gain on the loss, stream 1": 1.0}
    assert measures_of({"measures": gains}) == {**gains, ASYMMETRY: 0.75}
    gains["rescue gain on the loss, stream 1"] = None  # not finite
    assert ASYMMETRY not in measures_of({"measures": gains})


def test_sharpness_is_of_the_deepest_third_of_the_layers_and_of_every_route():
    rows = [
        read(sublayer, 2, 1.0 if sublayer >= 8 else 0.5) for sublayer in range(1, 12)
    ]  # 6 layers: sublayers 8 to 11
    rows += [read(sublayer, 2, 0.5, route="value") for sublayer in range(2, 12, 2)]
    assert measures_of({"measures": {}, "by_depth": rows}) == {SHARPNESS: 1.0, f"{SHARPNESS}, value": 0.0}
    assert measures_of({"measures": {}, "by_depth": []}) == {}
