# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, interpreted, against the reference in float64: outputs and every gradient."""

import itertools

import pytest
import torch


pytest.importorskip("triton")

from triton_helpers import distance, launches, reference_read, triton_read  # noqa: F401 - a fixture


FACTORS = {
    "S": [1, 2, 3, 8, 31, 33, 57, 129],
    "D": [16, 64, 123, 257, 1024],
    "H": [1, 4],
    "T": [1, 17],
    "road": ["complete", "merge", "start"],
    "anchored": [False, True],
    "base": [False, True],
    "bias": [False, True],
    "keys": [False, True],
    "dtype": [torch.float32, torch.float64, torch.bfloat16, torch.float16],
}
# gradients of bf16 and fp16 sources: their own rounding (2⁻⁹, 2⁻¹¹), through x, twice
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def allowed(case):
    """Sizes that mean something and that the interpreter, some 3 ms for each token and source, can do."""
    if case.get("H") == 4 and case.get("D") in (123, 257):
        return False
    if case.get("T") == 17 and case.get("S", 0) > 3:
        return False
    if case.get("road") in ("merge", "start") and case.get("S") == 1:
        return False
    return not (case.get("road") == "start" and case.get("base") is False)


def pairs_of(case):
    return {
        ((one, case[one]), (other, case[other]))
        for one, other in itertools.combinations(FACTORS, 2)
        if {one, other} <= case.keys()
    }


def pairwise():
    """Cases in which every allowed pair of values of two factors occurs, chosen greedily and always the same."""
    wanted = [
        {one: a, other: b}
        for one, other in itertools.combinations(FACTORS, 2)
        for a, b in itertools.product(FACTORS[one], FACTORS[other])
        if allowed({one: a, other: b})
    ]
    covered, cases = set(), []
    for start in wanted:
        if pairs_of(start) <= covered:
            continue
        case = dict(start)
        for name in [name for name in FACTORS if name not in start]:
            options = [{**case, name: value} for value in FACTORS[name]]
            case = max(filter(allowed, options), key=lambda option: len(pairs_of(option) - covered))
        covered |= pairs_of(case)
        cases.append(case)
    return cases


CASES = pairwise()
# nothing to compute: only shapes, dtypes and zeros
CASES += [{**CASES[index], "T": 0} for index in (0, 5, 10, 15)]


def name_of(case):
    parts = [f"{name}{case[name]}" for name in "SDHT"] + [case["road"]]
    parts += [name for name in ("anchored", "base", "bias", "keys") if case[name]]
    return "-".join([*parts, str(case["dtype"]).removeprefix("torch.")])


def randn(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_parity(case, launches):  # noqa: F811
    count, width, heads, tokens, dtype = (case[name] for name in ("S", "D", "H", "T", "dtype"))
    generator, number = torch.Generator().manual_seed(3), torch.float64 if dtype == torch.float64 else torch.float32
    values = [randn(generator, tokens, width).to(dtype) for _ in range(count)]
    leaves = {"query": (randn(generator, width) / width**0.5).to(number)}
    options = {"num_heads": heads, "anchored": case["anchored"], "gain": 2.5}
    if case["bias"]:
        leaves["bias"] = randn(generator, count).to(number)
        options["prior_bias"] = randn(generator, count).to(number)
    if case["base"]:
        leaves["base"] = randn(generator, tokens, width).to(dtype)
    keys = [randn(generator, tokens, width).to(dtype) for _ in range(count)] if case["keys"] else []
    weighting = randn(generator, tokens, width)

    road = {"private": 0 if case["road"] == "complete" else count - count // 2}
    if case["road"] == "start":
        added = values[count // 2]
        road |= {"start": leaves["base"] - added, "summands": 1}

    def read_and_gradients(read, to, **options):
        named = {name: leaf.to(to(leaf)).requires_grad_() for name, leaf in leaves.items()}
        own_values, own_keys = ([one.to(to(one)).requires_grad_() for one in sources] for sources in (values, keys))
        x = read(
            own_values,
            named["query"],
            keys=own_keys or None,
            **{k: v for k, v in named.items() if k != "query"},
            **options,
        )
        inputs = [*named.values(), *own_values, *own_keys]
        gradients = torch.autograd.grad((x.double() * weighting).sum(), inputs)
        ends = (len(named), len(named) + count)
        return x, [*gradients[: ends[0]], list(gradients[ends[0] : ends[1]]), list(gradients[ends[1] :])]

    x, gradients = read_and_gradients(triton_read, lambda leaf: leaf.dtype, **options, **road)
    # and once more: bit for bit
    if 0 < count * tokens < 9:
        again, gradients_again = read_and_gradients(triton_read, lambda leaf: leaf.dtype, **options, **road)
        assert torch.equal(x, again)
        for one, other in zip(gradients, gradients_again):
            assert all(map(torch.equal, one, other)) if isinstance(one, list) else torch.equal(one, other)
    double = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    expected, expected_gradients = read_and_gradients(reference_read, lambda leaf: torch.float64, **double)

    assert x.dtype == (dtype if case["base"] or road["private"] else number) and x.shape == expected.shape
    assert distance(x, expected) < max(TOLERANCE[dtype] / 4, 1e-11)
    for got, right in zip(gradients, expected_gradients):
        if isinstance(right, list) and not right:
            continue
        assert distance(got, right) < TOLERANCE[dtype]
    ran = {"phase_forward", "phase_backward"} | ({"merge_forward", "merge_backward"} if road["private"] else set())
    assert set(launches) == (ran if tokens else set())
