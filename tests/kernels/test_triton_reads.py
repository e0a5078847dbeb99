# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, interpreted: hostile layouts, exact starts, half precision, several inputs in one launch."""

import pytest
import torch


pytest.importorskip("triton")

from triton_helpers import distance, launches, reference_read, triton_read  # noqa: F401 - a fixture

from depthroute.modeling import depth_ops
from depthroute.modeling.depth_backend import MergeInput, PhaseInput
from depthroute_kernels import triton as triton_reads
from depthroute_kernels.triton import launch, run


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def misaligned(tensor):
    """The same numbers at an address that is a multiple of nothing but the size of one."""
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return memory[1:].view(tensor.shape).copy_(tensor)


LAYOUTS = {
    "transposed": lambda: randn(24, 3, 2).permute(2, 1, 0),
    "batch transposed": lambda: randn(3, 2, 24).transpose(0, 1),
    "expanded": lambda: randn(24).expand(2, 3, 24),
    "expanded tokens": lambda: randn(2, 1, 24).expand(2, 3, 24),
    "sliced": lambda: randn(2, 3, 40)[..., 7:31],
    "every second": lambda: randn(2, 3, 48)[..., ::2],
    "odd offset": lambda: misaligned(randn(2, 3, 24)),
}


@pytest.mark.parametrize("private", [0, 2], ids=["complete", "merge"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, private, launches):  # noqa: F811
    strange = LAYOUTS[layout]().detach()
    values = [strange, randn(2, 3, 24, seed=1), randn(2, 3, 24, seed=2), strange]
    before = [value.clone() for value in values]
    base, query = LAYOUTS[layout]().detach() + 0, randn(24, seed=3) / 5
    # the gradient of a sum is one number, expanded
    grads = []
    for read, to in ((triton_read, torch.float32), (reference_read, torch.float64)):
        leaves = [one.to(to).requires_grad_() for one in (query, base, values[0], values[1])]
        given = [leaves[2], leaves[3], values[2].to(to), leaves[2]]
        assert to is torch.float64 or leaves[2].stride() == strange.stride()
        x = read(given, leaves[0], base=leaves[1], num_heads=2, private=private)
        grads.append([x, *torch.autograd.grad(x.sum(), leaves)])
    for got, expected in zip(*grads):
        assert got.shape == expected.shape and distance(got, expected) < 1e-5
    assert all(map(torch.equal, values, before))
    assert launches["phase_forward"] == 1


def test_gradient_in_any_layout(launches):  # noqa: F811
    values, query = [randn(2, 3, 24, seed=seed).requires_grad_() for seed in range(3)], randn(24, seed=5)
    grads = (randn(24, 3, 2).permute(2, 1, 0), randn(1).expand(2, 3, 24), misaligned(randn(2, 3, 24)))
    for grad, roads in zip(grads, ((0, 1), (1,), (0,))):
        for private in roads:
            got = torch.autograd.grad(triton_read(values, query, private=private), values, grad)
            expected = torch.autograd.grad(depth_ops.depth_read(values, query), values, grad)
            assert distance(list(got), list(expected)) < 1e-5


@pytest.mark.parametrize("private", [0, 1], ids=["complete", "merge"])
def test_what_needs_no_gradient_gets_none(private, launches):  # noqa: F811
    values = [randn(3, 16, seed=seed) for seed in range(3)]
    values[1].requires_grad_()
    triton_read(values, randn(16), private=private).sum().backward()
    assert values[0].grad is None and values[2].grad is None
    expected = values[1].detach().double().requires_grad_()
    reference_read([values[0].double(), expected, values[2].double()], randn(16).double()).sum().backward()
    assert distance(values[1].grad, expected.grad) < 1e-5


@pytest.mark.parametrize("private", [0, 2], ids=["complete", "merge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("count", "heads"), [(3, 1), (7, 4)])
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
def test_anchored_at_zero_query_is_the_base_bit_for_bit(dtype, count, heads, biased, private, launches):  # noqa: F811
    values, base = [randn(2, 24, seed=seed, dtype=dtype) for seed in range(count)], randn(2, 24, seed=50, dtype=dtype)
    query = torch.zeros(24, requires_grad=True)
    # the biases of details, in the dtype of their parameter
    bias = torch.tensor([0.0, *[-2.1] * (count - 1)]).to(dtype).float() if biased else None
    read = triton_read(
        values,
        query,
        base=base,
        bias=bias,
        prior_bias=bias,
        gain=float(count),
        num_heads=heads,
        anchored=True,
        private=private,
    )
    assert torch.equal(read, base)
    read.float().square().sum().backward()
    assert query.grad.abs().max() > 0


@pytest.mark.parametrize("private", [0, 1], ids=["complete", "merge"])
def test_large_half_precision_sources_stay_finite(private, launches):  # noqa: F811
    values = [(randn(1, 4096, seed=seed) * 300).half().requires_grad_() for seed in range(3)]
    query = (randn(4096, seed=9) * 0.02).requires_grad_()
    base = (randn(1, 4096, seed=8) * 300).half()
    read = triton_read(values, query, base=base, anchored=True, gain=3.0, private=private)
    read.float().mean().backward()
    assert read.isfinite().all() and query.grad.isfinite().all() and query.grad.abs().max() > 0
    assert all(value.grad.isfinite().all() for value in values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_weights(dtype, launches):  # noqa: F811
    # γ = 1.7 is no number of 8 bits: folded in float32 it moves no weight
    values = [randn(2, 64, seed=seed, dtype=dtype) for seed in range(6)]
    folded = randn(64, seed=7, dtype=dtype).float() * torch.full((64,), 1.7, dtype=dtype).float()
    (phase,) = triton_reads.phase([PhaseInput(values, folded[None])], complete=1)
    weights = torch.softmax(phase.logits[0, :, :, 0], 0)
    _, expected = depth_ops.depth_read([v.double() for v in values], folded.double(), return_weights=True)
    assert (weights - expected).abs().max() < 2e-3


def test_logits_are_those_of_the_formula(launches):  # noqa: F811
    values, private = [randn(2, 3, 24, seed=seed) for seed in range(3)], [randn(2, 3, 24, seed=7)]
    queries, bias = randn(2, 24, seed=11), randn(2, 4, seed=12)
    (phase,) = triton_reads.phase([PhaseInput(values, queries, bias=bias[:, :3])], complete=1, num_heads=2)
    (merged,) = triton_reads.merge([MergeInput(phase.partial[0], private, queries[1], bias=bias[1, 3:])], num_heads=2)
    assert phase.logits.shape == (2, 3, 2, 3, 2) and merged.logits.shape == (1, 2, 3, 2)
    assert not phase.logits.requires_grad
    for m, sources, logits in (
        (0, values, phase.logits[0]),
        (1, [*values, *private], torch.cat([phase.logits[1], merged.logits])),
    ):
        _, expected = depth_ops.depth_read(
            sources, queries[m], bias=bias[m, : len(sources)], num_heads=2, return_weights=True
        )
        torch.testing.assert_close(torch.softmax(logits, 0), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("anchored", [False, True])
def test_two_streams_are_one_launch(anchored, launches):  # noqa: F811
    """DAR: stream j's values with the other's keys, and its own query, bias, base; both at once equal one after the other."""
    streams = [[randn(1, 2, 16, seed=10 * j + i).requires_grad_() for i in range(4)] for j in (0, 1)]
    queries = [randn(2, 16, seed=30 + j).requires_grad_() for j in (0, 1)]
    bases = [randn(1, 2, 16, seed=40 + j).requires_grad_() for j in (0, 1)]
    biases = [randn(2, 4, seed=60 + j).requires_grad_() for j in (0, 1)]
    leaves = [*streams[0], *streams[1], *queries, *bases, *biases]
    numbers = {"gain": 2.0, "num_heads": 2, "anchored": anchored}

    def reads(which):
        inputs = [PhaseInput(streams[j][:3], queries[j], streams[1 - j][:3], biases[j][:, :3], bases[j]) for j in which]
        phases = triton_reads.phase(inputs, complete=1, **numbers)
        inputs = [
            MergeInput(one.partial[0], streams[j][3:], queries[j][1], streams[1 - j][3:], biases[j][1, 3:], bases[j])
            for one, j in zip(phases, which)
        ]
        return [x for one in phases for x in one.complete], [one.x for one in triton_reads.merge(inputs, **numbers)]

    def of(results):
        xs = [x for one in results for x in one]
        return xs, torch.autograd.grad(sum((x * randn(1, 2, 16, seed=70 + i)).sum() for i, x in enumerate(xs)), leaves)

    xs, gradients = of(reads((0, 1)))
    assert dict(launches) == dict.fromkeys(("phase_forward", "phase_backward", "merge_forward", "merge_backward"), 1)
    (one, two), (three, four) = zip(*[reads((j,)) for j in (0, 1)])
    singles, single_gradients = of([one + two, three + four])
    assert all(map(torch.equal, xs, singles))
    assert distance(list(gradients), list(single_gradients)) < 1e-6  # autograd adds in another order


def test_two_queries_are_one_launch(launches):  # noqa: F811
    values, queries = [randn(3, 16, seed=seed).requires_grad_() for seed in range(3)], randn(2, 16, seed=9)
    reads = triton_read(values, queries)
    gradients = torch.autograd.grad(reads.square().sum(), values)
    assert dict(launches) == {"phase_forward": 1, "phase_backward": 1}
    expected = torch.stack([depth_ops.depth_read(values, query) for query in queries])
    assert distance(reads, expected.double()) < 1e-5
    assert distance(list(gradients), list(torch.autograd.grad(expected.square().sum(), values))) < 1e-5


@pytest.mark.parametrize("queries", [3, 5])
def test_more_queries_than_a_program_holds(queries, launches, monkeypatch):  # noqa: F811
    """Blocks of queries in the forward pass and in DOTS, pieces of the width in APPLY, and few programs for many tokens."""
    small = launch.Architecture(
        forward_numbers=1, forward_warps=1, backward_numbers=1, backward_warps=1, fused_numbers=0, phase_programs=2,
        merge_programs=2,
    )  # fmt: skip
    assert launch.backward_launch(queries, 2, 10, small).splits > 2
    assert launch.forward_launch(queries, 2, 10, small)["BLOCK_M"] < queries
    monkeypatch.setitem(launch.ARCHITECTURES, "default", small)
    values, query = (
        [randn(3, 20, seed=seed).requires_grad_() for seed in range(3)],
        randn(queries, 20, seed=9).requires_grad_(),
    )
    base = randn(3, 20, seed=8).requires_grad_()
    leaves, options = [*values, query, base], {"num_heads": 2, "gain": 2.0, "base": base, "anchored": True}
    expected = depth_ops.depth_read(values, query, **options)
    expected_gradients = torch.autograd.grad(expected.square().sum(), leaves)
    for private in (0, 1):
        reads = triton_read(values, query, private=private, **options)
        assert distance(reads, expected.double()) < 1e-5
        gradients = torch.autograd.grad(reads.square().sum(), leaves)
        assert distance(list(gradients), list(expected_gradients)) < 1e-5
    assert launches["phase_backward"] == 4  # DOTS and APPLY, twice


def test_complete_and_partial_reads_of_one_phase(launches):  # noqa: F811
    """Only one of three reads has a gradient."""
    values, queries = (
        [randn(3, 16, seed=seed).requires_grad_() for seed in range(3)],
        randn(3, 16, seed=9).requires_grad_(),
    )
    private = randn(3, 16, seed=20).requires_grad_()
    (phase,) = triton_reads.phase([PhaseInput(values, queries)], complete=1)
    merged = [triton_reads.merge([MergeInput(part, [private], q)])[0].x for part, q in zip(phase.partial, queries[1:])]
    sources = [values, [*values, private], [*values, private]]
    for m, x in enumerate([*phase.complete, *merged]):
        expected = depth_ops.depth_read(sources[m], queries[m])
        assert distance(x, expected.double()) < 1e-5
        leaves = [*sources[m], queries]
        gradients = torch.autograd.grad(x.square().sum(), leaves, retain_graph=True)
        assert distance(list(gradients), list(torch.autograd.grad(expected.square().sum(), leaves))) < 1e-5


def test_retained_graphs_and_two_forwards(launches):  # noqa: F811
    values, query = [randn(3, 16, seed=seed).requires_grad_() for seed in range(3)], randn(16, seed=9)
    first, second = triton_read(values, query, private=1), triton_read([v * 2 for v in values], query, private=1)
    once = torch.autograd.grad(first.sum(), values[:1], retain_graph=True)
    torch.autograd.grad(second.sum(), values)
    everything = torch.autograd.grad(first.sum(), values)
    assert torch.equal(once[0], everything[0])
    with torch.inference_mode():
        assert torch.equal(triton_read(values, query, private=1), first)


def test_autocast_changes_nothing_and_gives_float32_gradients(launches):  # noqa: F811
    values, query = [randn(3, 16, seed=seed).requires_grad_() for seed in range(3)], randn(16, seed=9).requires_grad_()
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            x = triton_read(values, query, private=1)
            results.append([x, *torch.autograd.grad(x.square().sum(), [query, *values])])
    assert all(one.dtype == torch.float32 and torch.equal(one, other) for one, other in zip(*results))


def test_merge_without_a_cast(launches):  # noqa: F811
    values, base = (
        [randn(3, 16, seed=s, dtype=torch.bfloat16) for s in range(2)],
        randn(3, 16, seed=5, dtype=torch.bfloat16),
    )
    query = randn(16, seed=9).requires_grad_()
    (phase,) = triton_reads.phase([PhaseInput(values[:1], query[None])], complete=0)
    arguments = [MergeInput(phase.partial[0], values[1:], query, base=base, start=base - values[1], summands=1)]
    (whole,) = triton_reads.merge(arguments, cast=False)
    (cut,) = triton_reads.merge(arguments)
    assert whole.x.dtype == torch.float32 and torch.equal(whole.x.bfloat16(), cut.x)
    expected = depth_ops.depth_read([v.double() for v in values], query.double(), base=base.double())
    assert distance(whole.x, expected) < 1e-6
    # a start of 16 bits must not stand for the base: the gradient is as exact as x
    (got,), (right,) = (torch.autograd.grad(x.double().square().sum(), query) for x in (whole.x, expected))
    assert distance(got, right.double()) < 1e-5


def test_sources_of_several_dtypes_meet_in_the_widest(launches):  # noqa: F811
    values = [randn(3, 16).bfloat16().requires_grad_(), randn(3, 16, seed=1).requires_grad_()]
    read = triton_read(values, randn(16, seed=2), base=randn(3, 16, seed=3))
    assert read.dtype == torch.bfloat16
    read.float().sum().backward()
    assert [value.grad.dtype for value in values] == [torch.bfloat16, torch.float32]


def test_what_is_saved_for_backward(launches):  # noqa: F811
    """References to sources, numbers per source and token; of width D: nothing new, but the mix of a 16-bit merge."""
    tokens, width = 16, 64
    for dtype, kept in ((torch.float32, 0), (torch.bfloat16, 1)):
        values = [randn(tokens, width, seed=s, dtype=dtype).requires_grad_() for s in range(4)]
        base, start = (randn(tokens, width, seed=s, dtype=dtype).requires_grad_() for s in (8, 9))
        query, saved = randn(2, width, seed=7).requires_grad_(), []

        def pack(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            (phase,) = triton_reads.phase([PhaseInput(values[:3], query)], complete=1)
            (merged,) = triton_reads.merge(
                [MergeInput(phase.partial[0], values[3:], query[1], base=base, start=start, summands=1)]
            )
        known = {one.untyped_storage().data_ptr() for one in (*values, start, merged.x, query)}
        new = {one.untyped_storage().data_ptr(): one for one in saved if one.untyped_storage().data_ptr() not in known}
        rows = [one for one in new.values() if one.numel() >= tokens * width]
        assert len(rows) == kept


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"num_heads": 3}, "num_heads: got 3, allowed: a divisor of the width 16"),
        ({"values": []}, "values, keys: got [0] tensors, allowed: the same number, at least 1, in every input"),
        (
            {"keys": [randn(3, 16)]},
            "values, keys: got [1, 2] tensors, allowed: the same number, at least 1, in every input",
        ),
        (
            {"values": [randn(3, 16), randn(2, 16)]},
            "values: got shapes (3, 16) and (2, 16), allowed: one shape",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, line):
    arguments = {"values": [randn(3, 16), randn(3, 16)], "query": randn(16), **arguments}
    with pytest.raises(ValueError) as caught:
        triton_read(arguments.pop("values"), arguments.pop("query"), **arguments)
    assert str(caught.value) == line


def test_the_buffers_are_those_that_kernels_fill(launches, monkeypatch):  # noqa: F811
    """Without the kernel, NaN remains: what the tests above compare was written by it."""

    class Nothing:
        def __getitem__(self, grid):
            return lambda *arguments, **options: None

    monkeypatch.setattr(run.phase_kernels, "phase_forward", Nothing())
    assert triton_read([randn(3, 16), randn(3, 16, seed=1)], randn(16)).isnan().all()
