# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Triton kernels in Triton's interpreter (tests/conftest.py sets TRITON_INTERPRET): whole reads, and their reference."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from depthroute.modeling import depth_ops
from depthroute.modeling.depth_backend import MergeInput, PhaseInput
from depthroute_kernels import triton as triton_reads


pytest.importorskip("triton")

from triton.runtime import interpreter

from depthroute_kernels.triton import run


KERNELS = {
    "phase_forward": run.phase_kernels,
    "phase_backward": run.phase_kernels,
    "merge_forward": run.merge_kernels,
    "merge_backward": run.merge_kernels,
}


@cache
def builtins_of(package):
    return [name for name in dir(package) if interpreter.tl.core.is_builtin(getattr(package, name))]


def patch_builtin(package, builder, scope):
    """What the interpreter does at every call of every helper function, without looking through all of Triton's language
    each time: a third of its time."""
    for name in builtins_of(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def convert_float(numbers, source, target, rounding, convert=interpreter._convert_float):
    """float32 to bfloat16 rounds to nearest, as on a GPU; the interpreter cuts off."""
    if (source, target) == (interpreter.tl.float32, interpreter.tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(numbers)).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy()
    return convert(numbers, source, target, rounding)


class Spied:
    """A kernel that counts its launches."""

    def __init__(self, kernel, name, launches):
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid):
        self.launches[self.name] += 1
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch):
    """How often each kernel ran. Every buffer that a kernel is to fill holds NaN before."""
    counted = Counter()

    def full_of_nan(shape, dtype, device):
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(run, "empty", full_of_nan)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, Spied(getattr(module, name), name, counted))
    return counted


def triton_read(
    values, query, *, keys=None, bias=None, prior_bias=None, base=None, private=0, start=None, summands=0, **numbers
):
    """x of one folded query [D], or of M [M, D]: by complete reads, or by partial ones and merges with the last `private`
    of the sources."""
    numbers.setdefault("anchored", False)
    queries = query if query.dim() == 2 else query[None]
    m, shared = queries.shape[0], len(values) - private

    def biases(part):
        return None if bias is None else bias[part].expand(m, -1)

    def prior(part):
        return None if prior_bias is None else prior_bias[part]

    first, last = slice(0, shared), slice(shared, None)
    one = PhaseInput(values[first], queries, keys and keys[first], biases(first), None if private else base)
    complete = 0 if private else m
    (phase,) = triton_reads.phase([one], complete=complete, prior_bias=prior(first), **numbers)
    reads = phase.complete
    if private:
        inputs = [
            MergeInput(
                part,
                values[last],
                one_query,
                keys and keys[last],
                None if bias is None else bias[last],
                base,
                start,
                summands,
            )
            for part, one_query in zip(phase.partial, queries)
        ]
        reads = [merged.x for merged in triton_reads.merge(inputs, prior_bias=prior(last), **numbers)]
    return reads[0] if query.dim() == 1 else torch.stack(reads)


def reference_read(values, query, **options):
    """The same in float64, from the one truth."""
    for name in ("private", "start", "summands"):
        options.pop(name, None)
    return depth_ops.depth_read(values, query, **options)


def distance(got, expected):
    """Largest difference, of tensors or of lists of them, over the largest entry; or over 0.1 where all are smaller (through
    the weight of a single source nothing flows)."""
    if isinstance(expected, list):
        got, expected = (torch.cat([one.flatten() for one in tensors]) for tensors in (got, expected))
    if expected.numel() == 0:
        return 0.0
    return ((got.double() - expected).abs().max() / expected.abs().max().clamp_min(0.1)).item()
