# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The public operator against the formula, written here once more, stacked and in float64."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from depthroute_kernels import IMPLEMENTATIONS, depth_read


RUNS_HERE = ["reference", "cpu"]
EVERY_IMPLEMENTATION = pytest.mark.parametrize("implementation", ["auto", *RUNS_HERE])


def naive_read(
    values, query, keys=None, key_norm=None, bias=None, prior_bias=None, base=None, anchored=False, **numbers
):
    """x and p, in float64, on stacked sources [S, ..., D]; one query."""
    v = torch.stack([value.double() for value in values])
    k = v if keys is None else torch.stack([key.double() for key in keys])
    heads, count = numbers.get("num_heads", 1), v.shape[0]
    folded = query.double() if key_norm is None else query.double() * key_norm.double()
    k = k / torch.sqrt((k * k).mean(-1, keepdim=True) + numbers.get("eps", 1e-6))
    logits = numbers.get("scale", 1.0) * (k * folded).unflatten(-1, (heads, -1)).sum(-1)

    def column(b):
        return torch.zeros(count, dtype=torch.float64) if b is None else b.double()

    p = torch.softmax(logits + column(bias).view(-1, *[1] * (logits.dim() - 1)), dim=0)
    w = p - torch.softmax(column(prior_bias), 0).view(-1, *[1] * (logits.dim() - 1)) if anchored else p
    x = numbers.get("gain", 1.0) * (w.unsqueeze(-1) * v.unflatten(-1, (heads, -1))).sum(0).flatten(-2)
    return x if base is None else base.double() + x, p.squeeze(-1) if heads == 1 else p


def sources(count, width, tokens=5, batch=2, dtype=torch.float32, seed=0, magnitude=1.0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tokens, width)
    return [(torch.randn(shape, generator=generator) * magnitude).to(dtype) for _ in range(count)]


def vector(width, dtype=torch.float32, seed=7, centre=0.0):
    return (torch.randn(width, generator=torch.Generator().manual_seed(seed)) + centre).to(dtype)


def every_option(count, width, dtype):
    """Arguments that switch on everything the operator has."""
    return {
        "keys": sources(count, width, dtype=dtype, seed=1),
        "key_norm": vector(width, dtype, seed=2, centre=1.0),
        "bias": vector(count, dtype, seed=3),
        "prior_bias": vector(count, dtype, seed=4),
        "base": sources(1, width, dtype=dtype, seed=5)[0],
        "gain": 3.0,
        "scale": 0.7,
        "eps": 1e-3,
        "anchored": True,
    }


@EVERY_IMPLEMENTATION
@pytest.mark.parametrize(
    ("count", "width", "heads", "tokens"),
    [
        (1, 16, 1, 17),
        (2, 123, 1, 1),
        (3, 16, 4, 17),
        (33, 16, 1, 1),
        (33, 124, 4, 17),
        (2, 16, 4, 0),
        (3, 123, 1, 0),
        (1, 124, 4, 1),
        (33, 123, 1, 17),
        (3, 1, 1, 1),
    ],
)
def test_parity_over_shapes(implementation, count, width, heads, tokens):
    values, query = sources(count, width, tokens), vector(width)
    read, weights = depth_read(values, query, num_heads=heads, return_weights=True, implementation=implementation)
    expected, expected_weights = naive_read(values, query, num_heads=heads)
    assert read.dtype == torch.float32 and weights.dtype == torch.float32
    # float32 sums over 33 sources of width 124
    torch.testing.assert_close(read.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.double(), expected_weights, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "left_out", ["nothing", "keys", "key_norm", "bias", "prior_bias", "base", "gain", "scale", "eps", "anchored"]
)
@pytest.mark.parametrize("heads", [1, 4])
@EVERY_IMPLEMENTATION
def test_parity_over_options(implementation, left_out, heads):
    options = every_option(3, 16, torch.float64)
    options.pop(left_out, None)
    values, query = sources(3, 16, dtype=torch.float64), vector(16, torch.float64)
    read, weights = depth_read(
        values, query, num_heads=heads, return_weights=True, implementation=implementation, **options
    )
    expected, expected_weights = naive_read(values, query, num_heads=heads, **options)
    # both sides are float64
    torch.testing.assert_close(read, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(weights, expected_weights, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
@EVERY_IMPLEMENTATION
def test_many_queries_are_many_reads(implementation, heads):
    values = sources(4, 16, dtype=torch.float64)
    queries = torch.stack([vector(16, torch.float64, seed=seed) for seed in range(3)])
    options = {"num_heads": heads, "implementation": implementation}
    reads, weights = depth_read(values, queries, return_weights=True, **options)
    singles = [depth_read(values, query, return_weights=True, **options) for query in queries]
    # float64: three queries may be one product, whose sums have another order
    exact = {"atol": 0.0, "rtol": 0.0} if implementation == "reference" else {"atol": 1e-14, "rtol": 1e-12}
    torch.testing.assert_close(reads, torch.stack([read for read, _ in singles]), **exact)
    torch.testing.assert_close(weights, torch.stack([weight for _, weight in singles]), **exact)
    assert torch.equal(depth_read(values, queries, **options), reads)


NAMES = ("query", "key_norm", "bias", "base")


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("own_keys", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("implementation", RUNS_HERE)
def test_gradients_and_their_gradients(implementation, heads, own_keys, anchored):
    count, width = 3, 4
    values = sources(count, width, tokens=2, batch=1, dtype=torch.float64)
    options = every_option(count, width, torch.float64)
    keys = sources(count, width, tokens=2, batch=1, dtype=torch.float64, seed=9) if own_keys else []
    base = sources(1, width, tokens=2, batch=1, dtype=torch.float64, seed=5)[0]
    vectors = [vector(width, torch.float64), options["key_norm"], options["bias"], base]
    tensors = [tensor.requires_grad_() for tensor in (*vectors, *values, *keys)]

    def read(*tensors):
        named = dict(zip(NAMES, tensors))
        given = tensors[len(NAMES) :]
        return depth_read(
            given[:count],
            named.pop("query"),
            keys=given[count:] or None,
            prior_bias=options["prior_bias"],
            gain=3.0,
            scale=0.7,
            eps=1e-3,
            num_heads=heads,
            anchored=anchored,
            # of the others the weights are constants
            return_weights=implementation == "reference",
            implementation=implementation,
            **named,
        )

    assert gradcheck(read, tensors)
    if implementation == "reference":  # the others refuse it: test_two_phases.py
        assert gradgradcheck(read, tensors)


def test_gradients_equal_those_of_the_formula_in_float32():
    values, query = sources(5, 32), vector(32)
    leaves = [tensor.requires_grad_() for tensor in (query, *values)]
    weighting = sources(1, 32, seed=11)[0]
    got = torch.autograd.grad((depth_read(values, query, num_heads=4, gain=2.0) * weighting).sum(), leaves)
    expected = torch.autograd.grad((naive_read(values, query, num_heads=4, gain=2.0)[0] * weighting).sum(), leaves)
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)  # the query's is a sum over tokens and width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype):
    values, query = sources(6, 64, dtype=dtype), vector(64, dtype)
    key_norm = torch.full((64,), 1.7, dtype=dtype)
    read, weights = depth_read(values, query, key_norm=key_norm, return_weights=True)
    expected, expected_weights = naive_read(values, query, key_norm=key_norm)
    assert read.dtype == dtype and weights.dtype == torch.float32
    assert (weights - expected_weights).abs().max() < 2e-3  # folding γ·q in half precision moves them by 1e-2
    torch.testing.assert_close(read.double(), expected, atol=1e-2, rtol=2**-7)  # one rounding, at the end


@pytest.mark.parametrize("anchored", [False, True])
def test_large_half_precision_sources_stay_finite(anchored):
    values = [v.requires_grad_() for v in sources(3, 4096, tokens=2, dtype=torch.float16, magnitude=300.0)]
    query = (vector(4096, torch.float16) * 0.02).requires_grad_()
    read = depth_read(values, query, anchored=anchored)
    read.float().mean().backward()
    assert read.isfinite().all() and query.grad.isfinite().all() and all(v.grad.isfinite().all() for v in values)
    assert query.grad.abs().max() > 0


@pytest.mark.parametrize("anchored", [False, True])
def test_autocast_changes_nothing_and_gives_float32_gradients(anchored):
    values = [value.requires_grad_() for value in sources(4, 32)]
    query, key_norm = vector(32).requires_grad_(), vector(32, seed=2, centre=1.0).requires_grad_()
    leaves = [query, key_norm, *values]

    def read_and_gradients():
        read = depth_read(values, query, key_norm=key_norm, num_heads=4, anchored=anchored)
        return read, torch.autograd.grad(read.square().sum(), leaves)

    plain, plain_gradients = read_and_gradients()
    with torch.autocast("cpu", torch.bfloat16):
        read, gradients = read_and_gradients()
    assert read.dtype == torch.float32 and torch.equal(read, plain)
    for gradient, expected in zip(gradients, plain_gradients):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, expected)


def test_mixed_dtypes_give_each_its_own_gradient():
    values = [value.requires_grad_() for value in sources(3, 16, dtype=torch.bfloat16)]
    query = vector(16).requires_grad_()
    depth_read(values, query).float().sum().backward()
    assert query.grad.dtype == torch.float32 and {value.grad.dtype for value in values} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("count", "heads"), [(2, 1), (3, 4), (7, 1), (24, 2), (33, 4)])
@pytest.mark.parametrize("biased", [False, True])
def test_anchored_at_zero_query_is_the_base_bit_for_bit(dtype, count, heads, biased):
    values, base = sources(count, 48, dtype=dtype), sources(1, 48, dtype=dtype, seed=5)[0]
    query = torch.zeros(48, dtype=dtype, requires_grad=True)
    bias = vector(count, dtype) if biased else None
    read = depth_read(
        values, query, bias=bias, prior_bias=bias, base=base, gain=float(count), num_heads=heads, anchored=True
    )
    assert torch.equal(read, base)
    read.float().square().sum().backward()
    assert query.grad.float().abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sources_are_not_written_to(dtype):
    options = every_option(3, 16, dtype)
    values, query = sources(3, 16, dtype=dtype), vector(16, dtype)
    given = [*values, *options["keys"], options["base"], options["bias"], options["prior_bias"], query]
    before = [tensor.clone() for tensor in given]
    leaves = [tensor.requires_grad_() for tensor in (query, *values, *options["keys"])]
    depth_read(values, query, num_heads=2, **options).float().sum().backward()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before))
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("anchored", [False, True])
def test_nothing_of_the_width_is_saved_but_the_sources(dtype, anchored):
    count, width, tokens = 5, 64, 16
    values = [value.requires_grad_() for value in sources(count, width, tokens, dtype=dtype)]
    base = sources(1, width, tokens, dtype=dtype, seed=5)[0].requires_grad_()
    query = vector(width).requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        depth_read(values, query, base=base, anchored=anchored)
    own = {value.untyped_storage().data_ptr() for value in values}
    new = {t.untyped_storage().data_ptr(): t for t in saved if t.untyped_storage().data_ptr() not in own}
    assert own <= {tensor.untyped_storage().data_ptr() for tensor in saved}
    # four numbers per source and token at most (l, r, p, p⁰), and vectors; one [B, T, D] alone would be more
    limit = 4 * count * 2 * tokens * 4 + 8 * width * 4
    assert sum(tensor.untyped_storage().nbytes() for tensor in new.values()) <= limit < 2 * tokens * width * 4


def test_sources_without_leading_dimensions():
    values, query = [value[0, 0].requires_grad_() for value in sources(3, 16)], vector(16).requires_grad_()
    read = depth_read(values, query, num_heads=2, bias=vector(3), anchored=True)
    expected, _ = naive_read(values, query, num_heads=2, bias=vector(3), anchored=True)
    torch.testing.assert_close(read.double(), expected, atol=1e-5, rtol=1e-5)
    read.sum().backward()
    assert query.grad.shape == (16,) and values[0].grad.shape == (16,)


def test_inside_no_grad_and_inference_mode():
    values, query = sources(3, 16), vector(16)
    with torch.no_grad():
        expected = depth_read(values, query)
    assert torch.equal(depth_read(values, query), expected)
    with torch.inference_mode():
        assert torch.equal(depth_read(values, query), expected)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"implementation": "cuda"}, f"implementation: got 'cuda', allowed: auto, {', '.join(IMPLEMENTATIONS)}"),
        ({"num_heads": 3}, "num_heads: got 3, allowed: a divisor of the width 16"),
        ({"num_heads": 0}, "num_heads: got 0, allowed: a divisor of the width 16"),
        ({"keys": []}, "values, keys: got 2 and 0 tensors, allowed: the same number, at least 1"),
        ({"values": []}, "values, keys: got 0 and 0 tensors, allowed: the same number, at least 1"),
    ],
)
def test_bad_arguments_are_one_line(arguments, line):
    arguments = {"values": sources(2, 16), "query": vector(16), **arguments}
    with pytest.raises(ValueError) as caught:
        depth_read(**arguments)
    assert str(caught.value) == line


def test_a_new_row_of_the_table_is_reachable(monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "first", lambda values, query, **options: values[0])
    values = sources(2, 16)
    assert depth_read(values, vector(16), implementation="first") is values[0]
