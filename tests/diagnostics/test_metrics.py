# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of a read on weights whose answers are known by hand."""

from math import log

import pytest
import torch

from depthroute import RoutingWeights
from depthroute.diagnostics import read_statistics


def statistics(weights):
    weights = torch.tensor(weights)
    return read_statistics(RoutingWeights([f"source {i}" for i in range(len(weights))], weights))


@pytest.mark.parametrize("count", [2, 5, 61])
def test_uniform(count):
    read = statistics([[1 / count] * 3] * count)
    # the tolerances here are float32's, in which weights are kept
    assert read.max_weight == pytest.approx(1 / count, rel=1e-6)
    assert read.entropy == pytest.approx(log(count), rel=1e-6)
    assert read.entropy_normalized == pytest.approx(1, rel=1e-6)
    assert read.mean_weights == pytest.approx([1 / count] * count, rel=1e-6)


def test_one_hot():
    read = statistics([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])  # each of two tokens takes another source
    assert read.max_weight == 1
    assert read.entropy == 0
    assert read.entropy_normalized == 0
    assert read.mean_weights == [0.5, 0, 0.5]


def test_statistics_are_means_over_tokens_not_of_the_mean():
    read = statistics([[0.9, 0.1], [0.1, 0.9]])
    assert read.max_weight == pytest.approx(0.9, rel=1e-6)  # the mean weights are a half each
    assert read.entropy == pytest.approx(-0.9 * log(0.9) - 0.1 * log(0.1), rel=1e-6)
    assert read.mean_weights == pytest.approx([0.5, 0.5], rel=1e-6)


def test_heads_are_averaged():
    read = statistics([[[1.0, 0.5]], [[0.0, 0.5]]])  # [S=2, N=1, H=2]: one head decided, one not
    assert read.max_weight == pytest.approx(0.75)
    assert read.entropy_normalized == pytest.approx(0.5)
    assert read.mean_weights == pytest.approx([0.75, 0.25])


@pytest.mark.parametrize("weights", [[[1.0, 1.0]], [[], []]], ids=["one source", "no tokens"])
def test_nothing_to_measure_is_refused(weights):
    with pytest.raises(ValueError, match="^weights: got shape .* allowed: two sources or more"):
        statistics(weights)
