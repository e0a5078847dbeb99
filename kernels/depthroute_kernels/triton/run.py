# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Launches: tensors in, kernels started, tensors out. Imports Triton; `ops` imports this when an operator runs."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from . import launch, merge_kernels, ops, phase_kernels, table


AMD = torch.version.hip is not None
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a kernel will fill. Tests fill it with NaN first."""
    return torch.empty(shape, dtype=dtype, device=device)


class Table:
    """Tensors that a kernel finds by address; None and empty gradients are address 0. Keeps them alive until the launch."""

    def __init__(self, *groups: Sequence[Tensor | None]) -> None:
        self.tensors = [
            None if tensor is None or tensor.numel() == 0 else tensor.contiguous()
            for group in groups
            for tensor in group
        ]

    def is_aligned(self, width: int, itemsize: int) -> bool:
        """Whether every row starts at a multiple of 16 bytes, where rows of all dtypes have `itemsize` or more."""
        return width * itemsize % 16 == 0 and all(t is None or t.data_ptr() % 16 == 0 for t in self.tensors)

    def on(self, device: torch.device) -> Tensor:
        """The addresses, as an int64 tensor."""
        per_launch = table.ADDRESSES_PER_LAUNCH
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        addresses += [0] * (-len(addresses) % per_launch)
        stored = torch.empty(len(addresses), dtype=torch.int64, device=device)
        for start in range(0, len(addresses), per_launch):
            table.store_addresses[(1,)](stored[start:], *addresses[start : start + per_launch], num_warps=1)
        return stored


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


class Sizes:
    """Sizes of a call, and what every kernel of it is compiled with."""

    def __init__(self, values: Sequence[Tensor], groups: int, heads: int) -> None:
        first = values[0]
        self.device, self.dtype = first.device, first.dtype
        self.number = ops.statistics_dtype(first.dtype)
        self.shape, self.width = ops.leading_shape(first), first.shape[-1]
        self.count, self.groups, self.heads, self.head_dim = len(values) // groups, groups, heads, self.width // heads
        self.tokens = first.numel() // self.width
        self.architecture = launch.ARCHITECTURES[launch.architecture_name(self.device)]
        self.constants = {
            "HEADS": heads,
            "HEAD_DIM": self.head_dim,
            "TYPE": TYPES[self.dtype],
            "ACCUMULATOR": TYPES[self.number],
        }

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return empty(shape, dtype, self.device)

    def like(self, sources: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
        """Room for the gradients of the sources, none where it is not wanted."""
        return [self.new(source.shape if want else (0,), source.dtype) for source, want in zip(sources, wanted)]

    def aligned(self, addresses: Table) -> bool:
        return addresses.is_aligned(self.width, self.dtype.itemsize)


def phase_forward(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    queries: Sequence[Tensor],
    biases: Sequence[Tensor],
    bases: Sequence[Tensor],
    prior_bias: Tensor | None,
    complete: int,
    gain: float,
    eps: float,
    heads: int,
    anchored: bool,
) -> Any:
    """See `ops.phase`."""
    sizes = Sizes(values, len(queries), heads)
    outputs = ops.phase_outputs(values, queries, bool(bases), complete, heads, anchored, sizes.new)
    whole, numerators, totals, sums, maxima, prior_sums, prior_maxima, logits, inverse_rms = outputs
    if sizes.tokens == 0:
        return outputs
    m = queries[0].shape[0]
    options = launch.forward_launch(m, heads, sizes.head_dim, sizes.architecture)
    addresses = Table(values, keys, queries, biases, bases, whole, numerators, totals)
    with on_device_of(values[0]):
        grid = (sizes.tokens * -(-m // options["BLOCK_M"]), sizes.groups)
        phase_kernels.phase_forward[grid](
            addresses.on(sizes.device),
            logits if prior_bias is None else prior_bias.contiguous(),
            logits,
            inverse_rms,
            sums,
            maxima,
            prior_sums,
            prior_maxima,
            sizes.tokens,
            sizes.count,
            m,
            complete,
            sizes.groups,
            gain,
            EPS=eps,
            OWN_KEYS=bool(keys),
            BIASED=bool(biases),
            BASED=bool(bases),
            ANCHORED=anchored,
            PRIOR_BIASED=prior_bias is not None,
            ALIGNED=sizes.aligned(addresses),
            **sizes.constants,
            **options,
        )
    return outputs


def phase_backward(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    queries: Sequence[Tensor],
    biases: Sequence[Tensor],
    prior_bias: Tensor | None,
    sums: Tensor,
    maxima: Tensor,
    prior_sums: Tensor,
    prior_maxima: Tensor,
    logits: Tensor,
    inverse_rms: Tensor,
    grad_reads: Sequence[Tensor],
    grad_sums: Tensor | None,
    grad_totals: Sequence[Tensor],
    want_values: Sequence[bool],
    want_keys: Sequence[bool],
    complete: int,
    gain: float,
    heads: int,
    based: bool,
    anchored: bool,
) -> Any:
    """See `ops.phase_backward`."""
    sizes = Sizes(values, len(queries), heads)
    groups, (m, width) = sizes.groups, queries[0].shape
    grad_values, grad_keys = sizes.like(values, want_values), sizes.like(keys, want_keys)
    programs = min(sizes.tokens, sizes.architecture.phase_programs)
    grad_queries = sizes.new((groups, programs, m, width), sizes.number)
    if sizes.tokens == 0:
        empty_bias = (
            sizes.new((groups, m, sizes.count), sizes.number).zero_() if biases else sizes.new((0,), sizes.number)
        )
        return grad_values, grad_keys, grad_queries.sum(1), empty_bias
    grad_logits, pulls = sizes.new(logits.shape, sizes.number), sizes.new(inverse_rms.shape, sizes.number)
    # the table of the kernel: of each input first its complete reads, then the others
    whole, parts = grad_reads[: groups * complete], grad_reads[groups * complete :]
    rows: list[Tensor | None] = []
    for group in range(groups):
        rows += whole[group * complete : (group + 1) * complete]
        rows += parts[group * (m - complete) : (group + 1) * (m - complete)]
    totals: list[Tensor | None] = [*grad_totals] or [None] * groups
    values_out = [grad if want else None for grad, want in zip(grad_values, want_values)]
    keys_out = [grad if want else None for grad, want in zip(grad_keys, want_keys)]
    addresses = Table(values, keys, queries, biases, rows, totals, values_out, keys_out)
    plan = launch.backward_launch(m, heads, sizes.head_dim, sizes.architecture)
    with on_device_of(values[0]):
        stored = addresses.on(sizes.device)
        for options in plan.steps:
            # numbers need no sum over tokens: as many programs as tokens
            count = programs if options["APPLY"] else sizes.tokens
            phase_kernels.phase_backward[(count, plan.splits if options["APPLY"] else 1, groups)](
                stored,
                logits if prior_bias is None else prior_bias.contiguous(),
                logits,
                inverse_rms,
                sums,
                maxima,
                prior_sums,
                prior_maxima,
                logits if grad_sums is None else grad_sums.contiguous(),
                grad_logits,
                pulls,
                grad_queries,
                sizes.tokens,
                sizes.count,
                m,
                complete,
                groups,
                count,
                gain,
                OWN_KEYS=bool(keys),
                BIASED=bool(biases),
                BASED=based,
                ANCHORED=anchored,
                PRIOR_BIASED=prior_bias is not None,
                HAS_GRAD_SUMS=grad_sums is not None,
                AMD=AMD,
                ALIGNED=sizes.aligned(addresses),
                **sizes.constants,
                **options,
            )
    grad_biases = sizes.new((0,), sizes.number)
    if biases:
        grad_biases = (
            grad_logits.view(groups, sizes.tokens, sizes.count, m, heads).sum((1, 4)).transpose(1, 2).contiguous()
        )
    return grad_values, grad_keys, grad_queries.sum(1), grad_biases


def merge_forward(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    queries: Sequence[Tensor],
    biases: Sequence[Tensor],
    numerators: Sequence[Tensor],
    sums: Sequence[Tensor],
    maxima: Sequence[Tensor],
    totals: Sequence[Tensor],
    prior_sums: Sequence[Tensor],
    prior_maxima: Sequence[Tensor],
    bases: Sequence[Tensor],
    prior_bias: Tensor | None,
    gain: float,
    eps: float,
    heads: int,
    cast: bool,
) -> Any:
    """See `ops.merge`."""
    sizes = Sizes(values, len(queries), heads)
    outputs = ops.merge_outputs(values, queries, bool(bases), heads, cast, sizes.new)
    reads, mixes, logits, inverse_rms = outputs
    if sizes.tokens == 0:
        return outputs
    addresses = Table(
        values, keys, queries, biases, numerators, sums, maxima, totals, prior_sums, prior_maxima, bases, reads, mixes
    )
    with on_device_of(values[0]):
        merge_kernels.merge_forward[(sizes.tokens, sizes.groups)](
            addresses.on(sizes.device),
            logits if prior_bias is None else prior_bias.contiguous(),
            logits,
            inverse_rms,
            sizes.tokens,
            sizes.count,
            sizes.groups,
            gain,
            EPS=eps,
            OUT=TYPES[reads[0].dtype],
            OWN_KEYS=bool(keys),
            BIASED=bool(biases),
            BASED=bool(bases),
            ANCHORED=bool(totals),
            PRIOR_BIASED=prior_bias is not None,
            KEEP_MIX=bool(mixes),
            AMD=AMD,
            ALIGNED=sizes.aligned(addresses),
            **sizes.constants,
            **launch.merge_launch(heads, sizes.head_dim, sizes.architecture, backward=False),
        )
    return outputs


def merge_backward(
    values: Sequence[Tensor],
    keys: Sequence[Tensor],
    queries: Sequence[Tensor],
    biases: Sequence[Tensor],
    sums: Sequence[Tensor],
    maxima: Sequence[Tensor],
    totals: Sequence[Tensor],
    prior_sums: Sequence[Tensor],
    prior_maxima: Sequence[Tensor],
    reads: Sequence[Tensor],
    bases: Sequence[Tensor],
    prior_bias: Tensor | None,
    logits: Tensor,
    inverse_rms: Tensor,
    grads: Sequence[Tensor],
    want_values: Sequence[bool],
    want_keys: Sequence[bool],
    want_part: bool,
    summands: int,
    gain: float,
    heads: int,
    kept_mix: bool,
) -> Any:
    """See `ops.merge_backward`."""
    sizes = Sizes(values, len(queries), heads)
    groups = sizes.groups
    grad_values, grad_keys = sizes.like(values, want_values), sizes.like(keys, want_keys)
    row = (*sizes.shape, sizes.width) if want_part else (0,)
    per_head = (*sizes.shape, heads) if want_part else (0,)
    grad_numerators = [sizes.new(row, sizes.number) for _ in range(groups)]
    grad_sums = [sizes.new(per_head, sizes.number) for _ in range(groups)]
    grad_totals = [sizes.new(row, sizes.number) for _ in totals]
    programs = min(sizes.tokens, sizes.architecture.merge_programs)
    grad_queries = sizes.new((groups, programs, sizes.width), sizes.number)
    grad_logits = sizes.new(logits.shape if biases else (0,), sizes.number)
    if sizes.tokens > 0:
        totals_out: list[Tensor | None] = [*grad_totals] or [None] * groups
        written = (grad_numerators, grad_sums, totals_out, grad_values, grad_keys)
        addresses = Table(
            values, keys, queries, biases, sums, maxima, totals, prior_sums, prior_maxima, reads, bases, grads, *written
        )
        with on_device_of(values[0]):
            merge_kernels.merge_backward[(programs, groups)](
                addresses.on(sizes.device),
                logits if prior_bias is None else prior_bias.contiguous(),
                logits,
                inverse_rms,
                grad_logits,
                grad_queries,
                sizes.tokens,
                sizes.count,
                groups,
                programs,
                summands,
                gain,
                OUT=TYPES[grads[0].dtype],
                OWN_KEYS=bool(keys),
                BIASED=bool(biases),
                SUBTRACT=bool(bases),
                SUMMANDS=summands > 0,
                KEEP_MIX=kept_mix,
                ANCHORED=bool(totals),
                PRIOR_BIASED=prior_bias is not None,
                WANT_LOGITS=bool(biases),
                ALIGNED=sizes.aligned(addresses),
                **sizes.constants,
                **launch.merge_launch(heads, sizes.head_dim, sizes.architecture, backward=True),
            )
    grad_biases = sizes.new((0,), sizes.number)
    if biases:
        grad_biases = grad_logits.view(groups, sizes.tokens, sizes.count, heads).sum((1, 3))
    return (
        grad_values, grad_keys, grad_numerators, grad_sums, grad_totals, grad_queries.sum(1), grad_biases,
    )  # fmt: skip
