# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The numbers on weights and representations whose answers are known by hand."""

from math import isnan, log

import pytest
import torch
from conftest import tiny_config

from depthroute.diagnostics import ReadStatistics, jensen_shannon, linear_cka, read_statistics, source_usage
from depthroute.diagnostics.metrics import HsicSum, source_order, source_sublayer
from depthroute.modeling.depth_schedule import live_reads, read_name, source_labels


def statistics(weights):
    weights = torch.tensor(weights)
    return read_statistics([f"source {i}" for i in range(len(weights))], weights)


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


def test_divergence_of_equal_and_of_disjoint_routes():
    route = torch.softmax(torch.randn(7, 5, generator=torch.Generator().manual_seed(0)), dim=0)
    assert jensen_shannon(route, route).tolist() == pytest.approx([0] * 5, abs=1e-12)
    left, right = torch.tensor([[0.3, 1.0], [0.7, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 0.5], [1.0, 0.5]])
    # float32 weights of 0.3 and 0.7 sum to 1 up to 1e-8
    assert jensen_shannon(left, right).tolist() == pytest.approx([log(2)] * 2, abs=1e-7)
    assert torch.equal(jensen_shannon(left, right), jensen_shannon(right, left))
    # half of the mass in common: H(3/4, 1/4) − ln 2 / 2
    halfway = jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5]))
    assert halfway.item() == pytest.approx(-0.75 * log(0.75) - 0.25 * log(0.25) - log(2) / 2)


def features(seed, tokens=1500, width=24):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def test_cka_of_equal_and_of_independent_streams():
    stream = features(0)
    assert linear_cka(stream, stream) == pytest.approx(1, abs=1e-12)
    rotation = torch.linalg.qr(features(1, 24))[0]
    # equal up to rotation, scale and shift; float32 products
    assert linear_cka(stream, 3 * stream @ rotation + 5) == pytest.approx(1, abs=1e-5)
    # 0 ± 1 / sqrt(tokens · minibatch); the biased estimator would give 24 / 256 and more
    assert abs(linear_cka(stream, features(2))) < 0.02
    # half of the variance in common, in every direction: between the two
    assert 0.2 < linear_cka(stream, stream + features(2)) < 0.8


def test_cka_by_the_definition():
    """One minibatch against the unbiased estimator written out (Song et al. 2012, equation 5)."""
    first, second = features(3, 9, 4).double(), features(4, 9, 6).double()

    def hsic(x, y):
        n, gram, other = len(x), (x @ x.T).fill_diagonal_(0), (y @ y.T).fill_diagonal_(0)
        cross = gram @ other
        terms = cross.trace() + gram.sum() * other.sum() / ((n - 1) * (n - 2)) - 2 * cross.sum() / (n - 2)
        return terms / (n * (n - 3))

    expected = hsic(first, second) / (hsic(first, first) * hsic(second, second)).sqrt()
    assert linear_cka(first, second) == pytest.approx(expected.item(), rel=1e-10)


def test_cka_has_no_value_without_variation_or_tokens():
    assert isnan(linear_cka(torch.ones(8, 3), features(0, 8)))
    with pytest.raises(ValueError, match="^tokens: got 3 and 3"):
        linear_cka(features(0, 3), features(1, 3))
    with pytest.raises(ValueError, match="^tokens: got 8 and 9"):
        linear_cka(features(0, 8), features(1, 9))
    few = HsicSum()
    few.add([features(0, 3)])
    assert few.cka() is None


def uniform_reads(preset, **values):
    config = tiny_config(preset, **values)
    return config, {
        f"model.{read_name(config, s)}": ReadStatistics(labels, 0, 0, 0, [1 / len(labels)] * len(labels))
        for s in live_reads(config)
        for labels in [source_labels(config, s)]
    }


@pytest.mark.parametrize("preset", ["attnres", "attnres-block", "attnres-states", "delta", "delta-block", "wav", "dar"])
def test_usage_of_uniform_routing_is_the_uniform_one(preset):
    config, reads = uniform_reads(preset)
    usage = source_usage(reads, config)
    labels = {label for read in reads.values() for label in read.sources}
    assert [entry["source"] for entry in usage.by_source] == sorted(labels, key=source_order)
    for entry in usage.by_source:
        assert entry["mean"] == pytest.approx(entry["uniform"])
        assert entry["reads"] == sum(entry["source"] in read.sources for read in reads.values())
        assert entry["share"] == pytest.approx(entry["mean"] * entry["reads"] / len(reads))
    for shares in (usage.by_source, usage.by_distance):
        assert sum(entry["share"] for entry in shares) == pytest.approx(1)
    assert [entry["share"] for entry in usage.by_distance] == pytest.approx([e["uniform"] for e in usage.by_distance])


def test_usage_by_distance_by_hand():
    config = tiny_config("attnres-block")  # blocks of two layers: four sublayers
    reads = {
        "model.layers.2.mlp_read": ReadStatistics(["embedding", "block 0", "partial"], 0, 0, 0, [0.2, 0.3, 0.5]),
        "model.layers.4.attn_read": ReadStatistics(["embedding", "block 0", "block 1"], 0, 0, 0, [0.0, 0.0, 1.0]),
    }
    # read 5: e is 5 away, block 0 (complete before sublayer 4) 1, the partial 0; read 8: block 1 is complete at 8
    by_distance = {entry["sublayers"]: entry["share"] for entry in source_usage(reads, config).by_distance}
    assert by_distance == pytest.approx({0: 0.75, 1: 0.15, 4: 0, 5: 0.1, 8: 0})


@pytest.mark.parametrize(
    ("label", "sublayer"),
    [("embedding", 0), ("layer 1 attn", 3), ("layer 1 mlp", 4), ("block 1", 8), ("block 1 split", 8), ("state 6", 6)]
    + [("partial", 11), ("partial phase", 11), ("null", None)],
)
def test_where_a_source_is_complete(label, sublayer):
    assert source_sublayer(label, 11, 4) == sublayer
