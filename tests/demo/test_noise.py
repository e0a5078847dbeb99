# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The sentences about noise, on numbers made by hand."""

import math

import pytest

from depthroute.demo.noise import Difference, paired_difference, statement


def test_a_mean_and_its_error_by_hand():
    found = paired_difference([1.0, 2.0, 3.0], [2.0, 2.0, 5.0])  # differences 1, 0, 2: mean 1, variance 1
    assert found == Difference(1.0, pytest.approx(math.sqrt(1 / 3)), 3, False)


def test_pairs_take_out_what_both_models_share():
    hard = [0.0, 10.0, 20.0, 30.0]  # items differ far more than the models do
    found = paired_difference(hard, [item + 0.1 + 0.01 * (index % 2) for index, item in enumerate(hard)])
    assert found.mean == pytest.approx(0.105) and not found.within_noise


def test_a_total_over_weights_by_hand():
    # 3 more over 10 units; expected per item 0.6, 0.9, 1.5: residuals 0.4, 0.1, -0.5
    found = paired_difference([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], weights=[2.0, 3.0, 5.0])
    assert found.mean == pytest.approx(0.3)
    assert found.stderr == pytest.approx(math.sqrt((0.16 + 0.01 + 0.25) * 3 / 2) / 10)
    same = paired_difference([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], weights=[1.0, 1.0, 1.0])
    assert same.stderr == pytest.approx(0) and same.mean == 1


@pytest.mark.parametrize(("mean", "stderr", "within"), [(0.1, 0.06, True), (0.1, 0.04, False), (-0.1, 0.04, False)])
def test_the_band_is_two_standard_errors(mean, stderr, within):
    assert Difference(mean, stderr, 9, False).within_noise is within


def test_identical_is_not_called_noise():
    found = paired_difference([0.25, 0.5], [0.25, 0.5])
    assert found.identical and found.mean == 0
    assert statement("b against a", "loss", found, False) == (
        "b against a, loss: 0 (identical) over 2 items: no difference."
    )


def test_opposite_differences_are_not_identical():
    found = paired_difference([0.0, 1.0], [1.0, 0.0])
    assert found.mean == 0 and not found.identical and found.within_noise


def test_one_item_tells_nothing_apart():
    assert paired_difference([1.0], [5.0]).within_noise


@pytest.mark.parametrize(
    ("mean", "higher", "verdict"),
    [(0.5, True, "better"), (0.5, False, "worse"), (-0.5, True, "worse"), (-0.5, False, "better")],
)
def test_statements_know_which_way_is_up(mean, higher, verdict):
    text = statement("b against a", "m", Difference(mean, 0.1, 7, False), higher)
    assert text == f"b against a, m: {mean:+.4f} ± 0.1000 over 7 items: {verdict}, outside the noise."


def test_statement_within_noise():
    text = statement("b against a", "m", Difference(0.05, 0.1, 7, False), True)
    assert text == "b against a, m: +0.0500 ± 0.1000 over 7 items: within noise."


@pytest.mark.parametrize(
    ("first", "second", "weights"), [([], [], None), ([1.0], [], None), ([1.0], [1.0], [1.0, 2.0])]
)
def test_items_must_match(first, second, weights):
    with pytest.raises(ValueError, match="items: got"):
        paired_difference(first, second, weights)
