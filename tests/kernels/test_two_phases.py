# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Every implementation of the depth read that can run here, against the equations and the reference: the pairwise selection,
hostile layouts and gradients, and everything that could leave a stale state behind."""

import itertools
from collections import Counter

import pytest
import torch

from depthroute.errors import CheckFailed
from depthroute.modeling import depth_ops
from depthroute.modeling.depth_backend import MergeInput, PhaseInput
from depthroute_kernels import depth_read, self_check
from depthroute_kernels.dispatch import BACKENDS
from depthroute_kernels.self_check import (
    DTYPES,
    FACTORS,
    PartialCase,
    ReadCase,
    equations,
    every_case,
    implementations_for,
    pairwise_cases,
    run_case,
)


CASES = pairwise_cases()
CASES_HERE = [(case, name) for case in CASES for name in implementations_for(case, "cpu")]
FAST = sorted({name for _, name in CASES_HERE} - {"reference"})
EVERY_FAST = pytest.mark.parametrize("name", FAST)
EVERY_FORM = pytest.mark.parametrize("form", ["complete", "partial"])
ALL_DTYPES = [getattr(torch, dtype) for dtype in DTYPES]


@pytest.fixture
def nan_buffers(monkeypatch):
    """Fresh memory is NaN: what a computation forgets to write is seen."""
    for owner, allocator in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, allocator)

        def filled(*args, original=original, **kwargs):
            buffer = original(*args, **kwargs)
            return buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer

        monkeypatch.setattr(owner, allocator, filled)


@pytest.fixture
def spy(monkeypatch):
    """Counts what runs, as (implementation, function)."""
    calls = Counter()

    def watch(owner, function, key):
        original = getattr(owner, function)

        def counted(*args, **kwargs):
            calls[key] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, function, counted)

    for name, backend in BACKENDS.items():
        watch(backend, "phase", (name, "phase"))
        watch(backend, "merge", (name, "merge"))
    watch(depth_ops, "depth_mix", ("reference", "depth_mix"))
    return calls


# --- the pairwise selection


def test_fast_implementations_run_here():
    assert FAST == ["cpu"]  # Triton has tests of its own, in its interpreter


@pytest.mark.parametrize(("case", "name"), CASES_HERE, ids=[f"{name} {case}" for case, name in CASES_HERE])
def test_parity(case, name, nan_buffers, spy, monkeypatch):
    ran = Counter()
    evaluate = {ReadCase: "read_answers", PartialCase: "partial_answers"}[type(case)]
    original = self_check.differentiated

    def after_the_first(*args):
        if not ran:  # the implementation under test is the first that a case evaluates
            ran.update(spy)
            ran["seen"] = 1
        return original(*args)

    monkeypatch.setattr(self_check, "differentiated", after_the_first)
    assert callable(getattr(self_check, evaluate))
    run_case(case, name)
    del ran["seen"]
    if isinstance(case, PartialCase):
        assert ran == {(name, "phase"): 1, (name, "merge"): case.partial}
    elif name == "reference":
        assert ran == {("reference", "depth_mix"): case.queries}
    else:
        assert ran == {(name, "phase"): 1}


def test_the_selection_is_pairwise_and_the_same_every_time():
    assert pairwise_cases() == CASES and len(CASES) == len(set(CASES)) <= 400
    for kind, factors in FACTORS.items():
        for dtype in DTYPES:
            rows = [case._asdict() for case in CASES if isinstance(case, kind) and case.dtype == dtype]
            for (one, values), (other, others) in itertools.combinations(factors.items(), 2):
                met = {(row[one], row[other]) for row in rows}
                assert met == set(itertools.product(values, others)), (one, other)


def test_every_case_is_every_combination():
    counted = Counter(type(case) for case in every_case())
    for kind, factors in FACTORS.items():
        expected = len(DTYPES)
        for values in factors.values():
            expected *= len(values)
        assert counted[kind] == expected
    names = [str(case) for case in itertools.islice(every_case(), 5000)]
    assert len(set(names)) == len(names)


def wrong_read(read):
    return read + 1e-3


def lost_row(read):
    read = read.clone()
    read[0, 0, 0] = float("nan")
    return read


def lost_gradient(read):
    return read.detach() + 0 * read


def narrow(read):
    return read[..., :-1]


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (wrong_read, "read 0 differs by 0.001"),
        (lost_row, "read 0 differs by nan"),
        (lost_gradient, "gradient of value 0 differs by"),
        (narrow, "read 0 has the shape (2, 17, 15), allowed: (2, 17, 16)"),
    ],
)
def test_a_wrong_implementation_fails_in_one_line(damage, line, monkeypatch):
    case = ReadCase(3, 16, 4, 17, 1, True, True, True, False, False, "float32")
    run_case(case, "cpu")
    phase = BACKENDS["cpu"].phase

    def damaged(*args, **kwargs):
        return [output._replace(complete=list(map(damage, output.complete))) for output in phase(*args, **kwargs)]

    monkeypatch.setattr(BACKENDS["cpu"], "phase", damaged)
    if damage is narrow:
        monkeypatch.setattr(
            self_check, "differentiated", lambda reads, weights, *_: self_check.Answer(reads, weights, {})
        )
    with pytest.raises(CheckFailed) as caught:
        run_case(case, "cpu")
    text = str(caught.value)
    start = "cpu on cpu, read sources=3 width=16 heads=4 tokens=17 queries=1 anchored base bias float32: "
    assert text.startswith(start + line) and "allowed: " in text and "\n" not in text


def test_wrong_merges_fail_too(monkeypatch):
    case = PartialCase(3, 2, 16, 1, 17, 1, 2, 1, True, "start", True, False, "float64")
    run_case(case, "cpu")
    merge = BACKENDS["cpu"].merge

    def other_start(inputs, **options):
        return merge([one._replace(start=one.start + 1e-6) for one in inputs], **options)

    monkeypatch.setattr(BACKENDS["cpu"], "merge", other_start)
    with pytest.raises(CheckFailed, match="gradient of 0 "):
        run_case(case, "cpu")


# --- one read in either form, for what follows


SHARED, COUNT, WIDTH = 3, 5, 24


def normal(*shape, seed=0, dtype=torch.float64, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale).to(dtype)


def source_list(dtype=torch.float64, count=COUNT, shape=(2, 4, WIDTH)):
    return [normal(*shape, seed=10 + index, dtype=dtype) for index in range(count)]


def read_in(form, name, values, query, *, base=None, bias=None, prior_bias=None, keys=None, shared=SHARED, **numbers):
    """x of one folded query [D], by the public operator, or by a phase over the first `shared` sources and a merge."""
    if form == "complete":
        options = {"base": base, "bias": bias, "prior_bias": prior_bias, "keys": keys, **numbers}
        return depth_read(values, query, implementation=name, **options)
    gain = numbers.pop("gain", 1.0)
    statistics = depth_ops.statistics_dtype(values[0])
    query = query.to(statistics)
    bias = None if bias is None else bias.to(statistics)
    prior_bias = None if prior_bias is None else prior_bias.to(statistics)

    def part(tensors, chosen):
        return None if tensors is None else tensors[chosen]

    first, rest = slice(shared), slice(shared, None)
    one = PhaseInput(values[first], query[None], part(keys, first), None if bias is None else bias[None, first], base)
    (phase,) = BACKENDS[name].phase([one], complete=0, prior_bias=part(prior_bias, first), gain=gain, **numbers)
    one = MergeInput(phase.partial[0], values[rest], query, part(keys, rest), part(bias, rest), base)
    (merged,) = BACKENDS[name].merge([one], prior_bias=part(prior_bias, rest), gain=gain, **numbers)
    return merged.x


def assert_near(found, expected, tolerance=1e-11, at_least=0.0):
    """float64: the same sums in another order. Relative to the largest entry, or to `at_least`."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    largest = max(at_least, expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * largest)


def gradients_of(x, leaves, given=None):
    given = torch.ones_like(x) if given is None else given
    return torch.autograd.grad(x, leaves, given, allow_unused=True)


# --- layouts


def transposed_tokens(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def transposed_width(tensor):
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def expanded_batch(tensor):
    return tensor[:1].expand_as(tensor)


def expanded_everywhere(tensor):
    return tensor[:1, :1].expand_as(tensor)


def expanded_width(tensor):
    return tensor[..., :1].expand_as(tensor)


def every_second(tensor):
    return torch.stack([tensor, torch.full_like(tensor, 7.0)], -1).flatten(-2)[..., ::2]


def slice_of_wider(tensor):
    return torch.cat([torch.full_like(tensor, 7.0), tensor, tensor], -1)[..., WIDTH : 2 * WIDTH]


def odd_offset(tensor, by=1):
    buffer = torch.empty(tensor.numel() + by, dtype=tensor.dtype)
    return buffer[by:].view(tensor.shape).copy_(tensor)


def three_off(tensor):
    return odd_offset(tensor, 3)


def flipped_strides(tensor):
    return tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)


LAYOUTS = [
    transposed_tokens,
    transposed_width,
    expanded_batch,
    expanded_everywhere,
    expanded_width,
    every_second,
    slice_of_wider,
    odd_offset,
    three_off,
    flipped_strides,
]


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sources_and_gradients_of_any_layout(layout, anchored, form, name):
    plain = [*source_list(count=2 * COUNT), normal(2, 4, WIDTH, seed=5)]
    tensors = [layout(tensor.clone()).detach().requires_grad_() for tensor in plain]
    assert layout in (odd_offset, three_off) or not tensors[0].is_contiguous()
    values, keys, base = tensors[:COUNT], tensors[COUNT : 2 * COUNT], tensors[-1]
    query = layout(normal(2, 4, WIDTH, seed=1))[1, 2].requires_grad_()
    given = layout(normal(2, 4, WIDTH, seed=2))
    leaves = [*tensors, query]
    options = {"keys": keys, "base": base, "num_heads": 4, "gain": 2.0, "anchored": anchored}
    found = read_in(form, name, values, query, **options)
    expected = depth_ops.depth_read(values, query, **options)
    assert_near(found, expected)
    for one, other in zip(gradients_of(found, leaves, given), gradients_of(expected, leaves, given)):
        # of order one: a key that is one number all along its width has a gradient of nearly zero
        assert_near(one, other, at_least=0.1)


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_storage_that_is_aligned_to_nothing(dtype, form, name):
    """An element off, of two or four bytes: what loads sixteen bytes at a time would fail or read its neighbour."""
    values = [odd_offset(value).requires_grad_() for value in source_list(dtype)]
    query = odd_offset(normal(WIDTH, seed=1, dtype=dtype)).requires_grad_()
    found = read_in(form, name, values, query)
    copies = [value.detach().double().requires_grad_() for value in (*values, query)]
    expected = depth_ops.depth_read(copies[:-1], copies[-1])
    # a rounding of the result, and of the gradients
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    assert_near(found.double(), expected, tolerance)
    given = normal(2, 4, WIDTH, seed=2, dtype=dtype)
    gradients = gradients_of(found, [*values, query], given)
    for one, other in zip(gradients, gradients_of(expected, copies, given.double())):
        assert one.dtype == dtype
        assert_near(one.double(), other, 2 * tolerance)


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("anchored", [False, True])
def test_a_gradient_of_stride_zero(anchored, form, name):
    values, query = [value.requires_grad_() for value in source_list()], normal(WIDTH, seed=1).requires_grad_()
    leaves = [*values, query]
    options = {"base": normal(2, 4, WIDTH, seed=5), "num_heads": 2, "anchored": anchored}
    found = torch.autograd.grad(read_in(form, name, values, query, **options).sum(), leaves)
    expected = torch.autograd.grad(depth_ops.depth_read(values, query, **options).sum(), leaves)
    for one, other in zip(found, expected):
        assert_near(one, other)


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("twice", [(0, 1), (1, 4), (3, 4)], ids=["shared", "shared and private", "private"])
def test_one_tensor_as_two_sources(twice, form, name):
    values, query = source_list(), normal(WIDTH, seed=1).requires_grad_()
    values[twice[1]] = values[twice[0]].requires_grad_()
    leaves = [values[twice[0]], query]
    # as the base as well, like the embedding of the first layer
    options = {"base": values[twice[0]], "anchored": True}
    found, expected = read_in(form, name, values, query, **options), depth_ops.depth_read(values, query, **options)
    assert_near(found, expected)
    given = normal(2, 4, WIDTH, seed=2)
    for one, other in zip(gradients_of(found, leaves, given), gradients_of(expected, leaves, given)):
        assert_near(one, other)


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize(
    "learning",
    [["query"], ["base"], ["bias"], ["value 0"], ["value 4"], ["key 1", "bias"], ["value 1", "key 4", "query"]],
    ids=", ".join,
)
def test_only_what_asks_for_a_gradient_gets_one(learning, form, name):
    named = {f"value {index}": value for index, value in enumerate(source_list())}
    named |= {f"key {index}": normal(2, 4, WIDTH, seed=30 + index) for index in range(COUNT)}
    named |= {"query": normal(WIDTH, seed=1), "base": normal(2, 4, WIDTH, seed=5), "bias": normal(COUNT, seed=6)}
    for one in learning:
        named[one].requires_grad_()
    options = {
        "keys": [named[f"key {index}"] for index in range(COUNT)],
        "base": named["base"],
        "bias": named["bias"],
        "prior_bias": normal(COUNT, seed=7),
        "anchored": True,
    }
    values, given = [named[f"value {index}"] for index in range(COUNT)], normal(2, 4, WIDTH, seed=2)
    gradients = []
    for read in (
        read_in(form, name, values, named["query"], **options),
        depth_ops.depth_read(values, named["query"], **options),
    ):
        read.backward(given)
        gradients.append({key: tensor.grad for key, tensor in named.items() if tensor.grad is not None})
        for tensor in named.values():
            tensor.grad = None
    found, expected = gradients
    assert found.keys() == expected.keys() == set(learning)
    for key in learning:
        assert_near(found[key], expected[key])


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("shape", [(0, 4, WIDTH), (2, 0, WIDTH), (0, 0, WIDTH)], ids=str)
def test_nothing_in_a_batch(shape, form, name):
    values = [value.requires_grad_() for value in source_list(shape=shape)]
    query = normal(WIDTH, seed=1).requires_grad_()
    read = read_in(form, name, values, query, num_heads=4, base=normal(*shape), anchored=True)
    assert read.shape == shape
    gradients = gradients_of(read, [*values, query])
    assert all(gradient.shape == shape for gradient in gradients[:-1])
    assert torch.equal(gradients[-1], torch.zeros(WIDTH, dtype=torch.float64))


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("shape", [(WIDTH,), (7, WIDTH), (2, 3, 5, WIDTH)], ids=str)
def test_any_number_of_leading_dimensions(shape, form, name):
    values = [value.requires_grad_() for value in source_list(shape=shape)]
    query, bias = normal(WIDTH, seed=1).requires_grad_(), normal(COUNT, seed=6).requires_grad_()
    options = {"bias": bias, "num_heads": 2, "base": normal(*shape), "anchored": True}
    found, expected = read_in(form, name, values, query, **options), depth_ops.depth_read(values, query, **options)
    assert_near(found, expected)
    given, leaves = normal(*shape, seed=2), [*values, query, bias]
    for one, other in zip(gradients_of(found, leaves, given), gradients_of(expected, leaves, given)):
        assert_near(one, other)


@EVERY_FAST
@pytest.mark.parametrize("anchored", [False, True])
def test_complete_and_partial_reads_of_one_phase_are_alone_what_they_are_together(anchored, name):
    """Two complete and three partial reads, of which one finishes twice with other private sources."""
    backend, values = BACKENDS[name], [value.requires_grad_() for value in source_list(count=9)]
    queries, bias = normal(5, WIDTH, seed=1).requires_grad_(), normal(5, 9, seed=6).requires_grad_()
    prior_bias, base = normal(9, seed=7), normal(2, 4, WIDTH, seed=5).requires_grad_()
    leaves, options = [*values, queries, bias, base], {"num_heads": 2, "anchored": anchored, "eps": 1e-4}
    (phase,) = backend.phase(
        [PhaseInput(values[:3], queries, bias=bias[:, :3], base=base)],
        complete=2,
        prior_bias=prior_bias[:3],
        gain=0.5,
        **options,
    )
    found, privates = list(phase.complete), [[3], [4, 5], [3, 4, 5, 6, 7], [8]]
    for m, private in zip((2, 3, 4, 4), privates):
        one = MergeInput(
            phase.partial[m - 2], [values[i] for i in private], queries[m], bias=bias[m, private], base=base
        )
        (merged,) = backend.merge([one], prior_bias=prior_bias[private], gain=2.0, **options)
        found.append(merged.x)
    expected = []
    for m, gain, private in zip((0, 1, 2, 3, 4, 4), (0.5, 0.5, 2.0, 2.0, 2.0, 2.0), ([], [], *privates)):
        seen = [0, 1, 2, *private]
        (x,), _ = equations(
            [values[i] for i in seen],
            queries[m : m + 1],
            bias=bias[m : m + 1, seen],
            prior_bias=prior_bias[seen],
            base=base,
            gain=gain,
            eps=1e-4,
            heads=2,
            anchored=anchored,
        )
        expected.append(x)
    given = [normal(2, 4, WIDTH, seed=50 + index) for index in range(len(found))]
    for one, other in zip(found, expected):
        assert_near(one, other)
    for one, other in zip(gradients_of(found, leaves, given), gradients_of(expected, leaves, given)):
        assert_near(one, other)


CROSSED = {
    "cross_key": [(1, 0), (0, 1)],
    "self": [(0, 0), (1, 1)],
    "cross_value": [(0, 1), (1, 0)],
    "fixed": [(0, 1)] * 2,
}


@EVERY_FAST
@pytest.mark.parametrize("routes", CROSSED.values(), ids=CROSSED)
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("form", ["complete", "partial", "both", "without gradients"])
def test_inputs_of_one_call_that_share_their_sources(form, anchored, routes, name):
    """Two streams (DAR): each input has keys of one and values of another, and their gradients meet in the same tensors. By
    input: (keys, values)."""
    backend = BACKENDS[name]
    streams = [[normal(2, 4, WIDTH, seed=10 * j + i).requires_grad_() for i in range(COUNT)] for j in (1, 2)]
    queries = [normal(2, WIDTH, seed=j).requires_grad_() for j in (1, 2)]
    leaves, options = [*streams[0], *streams[1], *queries], {"num_heads": 2, "anchored": anchored, "eps": 1e-4}
    complete = {"partial": 0, "both": 1}.get(form, 2)
    # what is complete sees all sources where nothing is partial
    size = COUNT if complete == 2 else SHARED

    def run():
        phases = backend.phase(
            [
                PhaseInput(streams[value][:size], query, streams[key][:size] if key != value else None)
                for (key, value), query in zip(routes, queries)
            ],
            complete=complete,
            **options,
        )
        found = [list(phase.complete) for phase in phases]
        for m in range(complete, 2):
            merged = backend.merge(
                [
                    MergeInput(
                        phase.partial[m - complete],
                        streams[value][size:],
                        query[m],
                        streams[key][size:] if key != value else None,
                    )
                    for phase, (key, value), query in zip(phases, routes, queries)
                ],
                **options,
            )
            for reads, one in zip(found, merged):
                reads.append(one.x)
        return [*found[0], *found[1]]

    expected = []
    for (key, value), query in zip(routes, queries):
        for m in range(2):
            seen = size if m < complete else COUNT
            (x,), _ = equations(
                streams[value][:seen], query[m : m + 1], keys=streams[key][:seen], heads=2, anchored=anchored, eps=1e-4
            )
            expected.append(x)
    with torch.set_grad_enabled(form != "without gradients"):
        found = run()
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)
    if form != "without gradients":
        given = [normal(2, 4, WIDTH, seed=50 + index) for index in range(4)]
        for one, other in zip(gradients_of(found, leaves, given), gradients_of(expected, leaves, given)):
            assert (one is None) == (other is None)
            if other is not None:
                assert_near(one, other)


@EVERY_FAST
def test_a_merge_may_leave_its_result_in_the_dtype_of_the_statistics(name):
    values, query = source_list(torch.bfloat16), normal(1, WIDTH, seed=1, dtype=torch.float32)
    backend = BACKENDS[name]
    (phase,) = backend.phase([PhaseInput(values[:3], query)], complete=0)
    one = MergeInput(phase.partial[0], values[3:], query[0])
    (exact,), (cast,) = backend.merge([one], cast=False), backend.merge([one])
    assert exact.x.dtype == torch.float32 and cast.x.dtype == torch.bfloat16
    assert torch.equal(exact.x.to(torch.bfloat16), cast.x)
    expected = depth_ops.depth_read([value.double() for value in values], query[0].double())
    assert_near(exact.x.double(), expected, 1e-5)


@EVERY_FAST
@EVERY_FORM
def test_sources_are_not_written_to(form, name):
    values, base, query = source_list(), normal(2, 4, WIDTH, seed=5), normal(WIDTH, seed=1)
    given = [*values, base, query]
    before = [tensor.clone() for tensor in given]
    leaves = [tensor.requires_grad_() for tensor in given]
    read = read_in(form, name, values, query, base=base, anchored=True, num_heads=2, gain=2.0)
    kept = read.detach().clone()
    gradients_of(read, leaves, normal(2, 4, WIDTH, seed=2))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before)) and torch.equal(read, kept)


# --- numbers


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("anchored", [False, True])
def test_large_half_precision_sources_stay_finite(anchored, form, name):
    """Squares of 300 summed over 4096 are beyond float16."""
    values = [normal(2, 2, 4096, seed=i, dtype=torch.float16, scale=300.0).requires_grad_() for i in range(COUNT)]
    query = normal(4096, seed=99, dtype=torch.float16, scale=0.02).requires_grad_()
    read = read_in(form, name, values, query, anchored=anchored)
    gradients = gradients_of(read, [*values, query], torch.full_like(read, 1e-3))
    assert read.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[-1].abs().max() > 0
    exact = depth_ops.depth_read([value.double() for value in values], query.double(), anchored=anchored)
    assert_near(read.double(), exact, 2**-10)


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("heads", [1, 4])
def test_autocast_changes_nothing_and_gives_float32_gradients(heads, form, name):
    values = [value.requires_grad_() for value in source_list(torch.float32)]
    query = normal(WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    given, leaves = normal(2, 4, WIDTH, seed=2, dtype=torch.float32), [*values, query]

    def run():
        read = read_in(form, name, values, query, num_heads=heads, anchored=True)
        return [read, *gradients_of(read, leaves, given)]

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        found = run()
    assert all(tensor.dtype == torch.float32 for tensor in found) and all(map(torch.equal, found, plain))


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_float32_parameters_with_half_precision_sources(stored, form, name):
    values = [value.requires_grad_() for value in source_list(stored)]
    query = normal(WIDTH, seed=1, dtype=torch.float32).requires_grad_()
    read = read_in(form, name, values, query)
    *source_gradients, query_gradient = gradients_of(read, [*values, query])
    assert read.dtype == stored and query_gradient.dtype == torch.float32
    assert {gradient.dtype for gradient in source_gradients} == {stored}


@EVERY_FAST
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=DTYPES)
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize(
    ("count", "private"), [(2, 0), (3, 0), (7, 0), (24, 0), (33, 0), (1, 1), (3, 1), (3, 2), (8, 5), (31, 5)]
)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_anchored_at_zero_query_is_the_base_bit_for_bit(heads, count, private, biased, dtype, name):
    values = source_list(dtype, count + private, (2, 5, 48))
    base = normal(2, 5, 48, seed=5, dtype=dtype)
    query = torch.zeros(48, dtype=dtype, requires_grad=True)
    bias = normal(count + private, seed=6, dtype=dtype) if biased else None
    options = {"bias": bias, "prior_bias": bias, "base": base, "num_heads": heads, "anchored": True}
    options["gain"] = float(count + private)
    read = read_in("partial" if private else "complete", name, values, query, shared=count, **options)
    assert torch.equal(read, base)
    (gradient,) = gradients_of(read, [query], normal(2, 5, 48, seed=2, dtype=dtype))
    assert gradient.float().abs().max() > 0
    with torch.no_grad():  # other computations may serve where no gradient is wanted
        assert torch.equal(
            read_in("partial" if private else "complete", name, values, query, shared=count, **options), base
        )


@EVERY_FAST
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["complete", "partial", "without gradients"])
def test_weights_of_a_learned_norm_in_half_precision(form, dtype, name):
    """γ = 1.7, where γ·q folded in half precision would move weights by 1e-2."""
    values, query = source_list(dtype, 6, (2, 5, 64)), normal(64, seed=1, dtype=dtype)
    key_norm = torch.full((64,), 1.7, dtype=dtype)
    _, expected = depth_ops.depth_read(
        [value.double() for value in values], query.double(), key_norm=key_norm.double(), return_weights=True
    )
    if form == "partial":
        folded = (query.float() * key_norm.float())[None]
        (phase,) = BACKENDS[name].phase([PhaseInput(values[:4], folded)], complete=0)
        (merged,) = BACKENDS[name].merge([MergeInput(phase.partial[0], values[4:], folded[0])])
        weights = torch.softmax(torch.cat([phase.logits[0], merged.logits]), 0).squeeze(-1)
    else:
        with torch.set_grad_enabled(form == "complete"):
            _, weights = depth_read(values, query, key_norm=key_norm, return_weights=True, implementation=name)
    assert weights.dtype == torch.float32 and (weights - expected).abs().max() < 2e-3


@EVERY_FAST
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("options", [{}, {"anchored": True, "gain": 3.0}], ids=["plain", "anchored"])
@pytest.mark.parametrize("queries", [1, 3])
def test_without_gradients(queries, options, heads, name):
    """A few tokens and many, with and without gradients: one outcome."""
    query = normal(queries, WIDTH, seed=1)
    query = query[0] if queries == 1 else query
    bias = normal(COUNT, seed=6)
    for tokens in (1, 400):
        values = source_list(shape=(2, tokens, WIDTH))
        options = {**options, "num_heads": heads, "base": normal(2, tokens, WIDTH, seed=5), "bias": bias}
        options |= {"keys": source_list(shape=(2, tokens, WIDTH))[::-1], "return_weights": True}
        expected = depth_ops.depth_read(values, query, **options)
        for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with context:
                found = depth_read(values, query, implementation=name, **options)
            assert_near(found[0], expected[0])
            assert_near(found[1], expected[1])


# --- no stale state


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reruns_are_bit_equal(dtype, form, name):
    values = [value.requires_grad_() for value in source_list(dtype, 12, (2, 33, 64))]
    query = normal(64, seed=1, dtype=dtype).requires_grad_()
    given, kept = normal(2, 33, 64, seed=2, dtype=dtype), []
    runs = []
    for run in range(4):
        read = read_in(form, name, values, query, num_heads=2, anchored=True)
        runs.append([read, *gradients_of(read, [*values, query], given)])
        kept.append(torch.full((1000 * run + 1,), float("nan")))  # memory is used otherwise in between
    for run in runs[1:]:
        assert all(map(torch.equal, runs[0], run))


@pytest.fixture
def example():
    """Leaves, and two reads of them with their gradients from the equations."""
    values = [value.requires_grad_() for value in source_list()]
    queries = [normal(WIDTH, seed=seed).requires_grad_() for seed in (1, 2)]
    given = normal(2, 4, WIDTH, seed=3)
    expected = []
    for query in queries:
        (x,), _ = equations(values, query[None], heads=2)
        expected.append(gradients_of(x, [*values, query], given))
    return values, queries, given, expected


def assert_all_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


@EVERY_FAST
@EVERY_FORM
def test_two_forwards_before_one_backward(form, name, example):
    values, queries, given, expected = example
    first, second = (read_in(form, name, values, query, num_heads=2) for query in queries)
    assert_all_near(gradients_of(second, [*values, queries[1]], given), expected[1])
    assert_all_near(gradients_of(first, [*values, queries[0]], given), expected[0])
    first, second = (read_in(form, name, values, query, num_heads=2) for query in queries)
    total = torch.autograd.grad([first, second], values, [given, given])
    assert_all_near(total, [one + other for one, other in zip(expected[0][:-1], expected[1][:-1])])


@EVERY_FAST
@EVERY_FORM
def test_a_retained_graph_gives_the_same_again(form, name, example):
    values, (query, _), given, expected = example
    leaves = [*values, query]
    read = read_in(form, name, values, query, num_heads=2)
    runs = [torch.autograd.grad(read, leaves, given, retain_graph=True) for _ in range(3)]
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))
    assert_all_near(runs[0], expected[0])
    assert_all_near(torch.autograd.grad(read, leaves, 2 * given), [2 * gradient for gradient in expected[0]])


@EVERY_FAST
@EVERY_FORM
def test_some_gradients_and_then_all(form, name, example):
    values, (query, _), given, expected = example
    leaves = [*values, query]
    read = read_in(form, name, values, query, num_heads=2)
    for part in ([5], [0], [4, 1]):
        some = torch.autograd.grad(read, [leaves[index] for index in part], given, retain_graph=True)
        assert_all_near(some, [expected[0][index] for index in part])
    read.backward(given)
    assert_all_near([leaf.grad for leaf in leaves], expected[0])


@EVERY_FAST
@EVERY_FORM
def test_inference_and_then_training(form, name, example):
    values, (query, _), given, expected = example
    with torch.inference_mode():
        inference = read_in(form, name, values, query, num_heads=2)
    with torch.no_grad():
        read_in(form, name, values, query, num_heads=2)
    read = read_in(form, name, values, query, num_heads=2)
    assert_near(inference.clone(), read.detach())
    assert_all_near(gradients_of(read, [*values, query], given), expected[0])


@EVERY_FAST
@EVERY_FORM
def test_an_exception_and_then_a_good_run(form, name, example):
    values, (query, _), given, expected = example
    broken = [*values[:-1], normal(2, 4, WIDTH - 1)]
    with pytest.raises((RuntimeError, ValueError)):
        read_in(form, name, broken, query, num_heads=2)
    read = read_in(form, name, values, query, num_heads=2)
    hook = values[2].register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        torch.autograd.grad(read, [*values, query], given)
    hook.remove()
    read = read_in(form, name, values, query, num_heads=2)
    assert_all_near(gradients_of(read, [*values, query], given), expected[0])


@EVERY_FAST
@EVERY_FORM
@pytest.mark.parametrize("anchored", [False, True])
def test_a_second_derivative_is_refused_by_name(anchored, form, name):
    values, query = [value.requires_grad_() for value in source_list()], normal(WIDTH, seed=1).requires_grad_()
    read = read_in(form, name, values, query, anchored=anchored)
    first = torch.autograd.grad(read.square().sum(), [query, *values], create_graph=True)
    for gradient, leaf in itertools.product(first, (query, values[0], values[4])):
        # also where the caller would take no gradient for an answer, or has other paths to the leaf
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad((gradient.square() * leaf).sum(), [leaf], retain_graph=True, allow_unused=True)
        assert 'set depth_backend="reference"' in str(caught.value) and "\n" not in str(caught.value)
    # and the first derivatives are as without a graph of their own
    read = read_in(form, name, values, query, anchored=anchored)
    plain = torch.autograd.grad(read.square().sum(), [query, *values])
    assert all(map(torch.equal, first, plain))


@EVERY_FAST
def test_no_gradient_at_all_reaches_the_read(name):
    """What reads x may have none to give."""

    class Silent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    values, query = [value.requires_grad_() for value in source_list()], normal(WIDTH, seed=1).requires_grad_()
    for form in ("complete", "partial"):
        x = read_in(form, name, values, query)
        found = gradients_of(Silent.apply(x), [query, *values])
        assert all(gradient is None or not gradient.any() for gradient in found)
