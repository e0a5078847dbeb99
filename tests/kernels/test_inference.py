# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Reads without gradients against the reference."""

import pytest
import torch

from depthroute.modeling.depth_ops import depth_read
from depthroute_kernels.cpu import InferenceReads, of_inference


WIDTH, READS, EPS = 12, 3, 1e-5
# the last: so many that work is saved, not calls
SHAPES = pytest.mark.parametrize(
    "shape", [(1, 1), (4, 1), (2, 3), (0, 1), (2, 700)], ids=lambda shape: "x".join(map(str, shape))
)
HEADS = pytest.mark.parametrize("heads", [1, 4], ids=lambda heads: f"{heads} heads")
ANCHORED = pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
GROUPS = pytest.mark.parametrize("groups", [1, 2], ids=lambda groups: f"{groups} groups")


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def normal(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def sources(count, shape, seed):
    return list(normal(count, *shape, WIDTH, seed=seed).unbind())


def assert_near(found, expected):
    # float64, another order of summation: a few roundings of 1e-16 of numbers below 100
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@SHAPES
@HEADS
@ANCHORED
@GROUPS
def test_reads_equal_the_reference(groups, anchored, heads, shape):
    """Sources that come one by one and several at once, private ones in between, keys of their own, biases, weights."""
    queries = normal(groups, READS, WIDTH, seed=1)
    values = [sources(6, shape, 10 + group) for group in range(groups)]
    keys = [sources(6, shape, 20 + group) for group in range(groups)]
    reads = InferenceReads(queries, values[0][0], capacity=6, eps=EPS, num_heads=heads, anchored=anchored)
    bias, prior_bias = normal(6, seed=3), normal(6, seed=4)

    def check(read, seen, first, count, options, found):
        mixes, logits = found
        weights = reads.weights(logits)
        for group in range(groups):
            for index in range(count):
                expected, expected_weights = depth_read(
                    [values[group][i] for i in seen],
                    queries[group, first + index],
                    keys=[keys[group][i] for i in seen],
                    bias=bias[seen] if "bias" in options else None,
                    prior_bias=prior_bias[seen],
                    gain=options.get("gain", 1.0),
                    eps=EPS,
                    num_heads=heads,
                    anchored=anchored,
                    return_weights=True,
                )
                assert_near(mixes[group * count + index], expected)
                found_weights = weights[group, index]
                assert_near(found_weights.squeeze(-1) if heads == 1 else found_weights, expected_weights)

    def of(indices):
        return [[tensors[i] for i in indices] for tensors in values], [
            [tensors[i] for i in indices] for tensors in keys
        ]

    def options_of(seen, count, **more):
        return {"bias": bias[seen].expand(count, -1), "prior_bias": prior_bias[seen], **more}

    reads.add(*of([0]))
    reads.add(*of([1, 2]))
    assert reads.count == 3
    options = options_of([0, 1, 2], 1, gain=3.0)
    check(0, [0, 1, 2], 0, 1, options, reads.read(0, **options))
    private, private_keys = of([4, 5])
    options = options_of([0, 1, 2, 4, 5], 2)
    found = reads.read(1, 2, values=private, keys=private_keys, **options)
    check(1, [0, 1, 2, 4, 5], 1, 2, options, found)
    for total, tensors in zip(reads.totals(private), values):
        assert_near(total, sum(tensors[i] for i in (0, 1, 2, 4, 5)))
    assert reads.count == 3  # private sources are gone
    reads.add(*of([3]))
    options = {"prior_bias": prior_bias[:4]}
    check(2, [0, 1, 2, 3], 2, 1, options, reads.read(2, **options))


@pytest.mark.parametrize("shape", [(2, 1), (2, 700)], ids=["few", "many"])
@HEADS
@ANCHORED
def test_crossed_keys_are_the_other_groups_values(anchored, heads, shape):
    queries, values = normal(2, READS, WIDTH, seed=1), [sources(5, shape, 10 + group) for group in range(2)]
    options = {"capacity": 5, "eps": EPS, "num_heads": heads, "anchored": anchored}
    ways = []
    for crossed in (False, True):
        reads = InferenceReads(queries, values[0][0], crossed=crossed, **options)
        keys = (lambda part: None) if crossed else (lambda part: [values[1][part], values[0][part]])
        found = []
        for part in (slice(0, 1), slice(1, 3)):
            reads.add([of_group[part] for of_group in values], keys(part))
        for first, private in ((0, None), (1, slice(3, 4)), (2, slice(3, 5))):
            own = {} if private is None else {"values": [v[private] for v in values], "keys": keys(private)}
            mixes, logits = reads.read(first, **own)
            found += [*mixes, reads.weights(logits)]
        ways.append(found)
    for one, other in zip(*ways):
        assert_near(one, other)


@HEADS
@ANCHORED
def test_what_is_made_ahead_is_what_is_asked_for(anchored, heads):
    values = sources(4, (2, 1), 5)
    ways = []
    for ahead in (0, 1):
        queries, options = normal(1, READS, WIDTH, seed=1), {"num_heads": heads, "anchored": anchored}
        reads = InferenceReads(queries, values[0], capacity=4, eps=EPS, **options)
        reads.add([values[:2]])
        first, _ = reads.read(0, ahead=ahead)
        second, _ = reads.read(1)
        assert (1 in reads.ready) == bool(ahead)
        reads.add([values[2:]])
        assert not reads.ready  # a read over other sources is another one
        third, _ = reads.read(1)
        ways.append([*first, *second, *third])
    for one, other in zip(*ways):
        assert_near(one, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@HEADS
@SHAPES
def test_anchored_at_zero_is_exactly_zero(shape, heads, biased, dtype):
    values = [source.to(dtype) for source in sources(5, shape, 5)]
    statistics = torch.float64 if dtype == torch.float64 else torch.float32
    queries, options = torch.zeros(1, READS, WIDTH, dtype=statistics), {"num_heads": heads, "anchored": True}
    reads = InferenceReads(queries, values[0], capacity=5, eps=EPS, **options)
    reads.add([values[:3]])
    bias = normal(5, seed=3).to(statistics) if biased else None
    column = None if bias is None else bias.expand(2, -1)
    mixes, _ = reads.read(0, 2, values=[values[3:]], bias=column, prior_bias=bias, gain=5.0)
    assert all(mix.shape == (*shape, WIDTH) and mix.dtype == statistics and not mix.any() for mix in mixes)


def test_where_no_gradient_is_wanted():
    assert of_inference(torch.empty(1))
    with torch.enable_grad():
        assert not of_inference(torch.empty(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert not of_inference(torch.empty(1))


def test_sources_are_not_written_to():
    values = sources(3, (1, 1), 5)
    before = [value.clone() for value in values]
    reads = InferenceReads(normal(1, READS, WIDTH, seed=1), values[0], capacity=len(values), eps=EPS)
    reads.add([values[:1]])
    reads.add([values[1:2]])
    reads.read(0, values=[values[2:]])
    reads.read(1)
    assert all(map(torch.equal, values, before))
