# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The two phases of a depth read as Triton kernels, forward and backward, for NVIDIA and AMD GPUs.

`phase` and `merge` have the meaning that `depthroute.modeling.depth_backend` gives them. Importing this needs no Triton and no
GPU; `available` says whether a device can run it. With TRITON_INTERPRET=1 set before Python starts, it runs on the CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthroute.modeling.depth_backend import MergeInput, MergeOutput, Part, PhaseInput, PhaseOutput, Prior

from ..streams import combine, write_streams
from . import ops
from .status import unavailable


__all__ = ["available", "combine", "merge", "of_inference", "phase", "unavailable", "write_streams"]


def available(device: torch.device | str, dtype: torch.dtype | None = None) -> str | None:
    """None where the kernels can run on a device (with sources of a dtype), else the reason in one line."""
    return unavailable(torch.device(device), dtype)


def of_inference(stream: Tensor) -> bool:
    """Whether reads without gradients go another way: never here, where a phase is one launch."""
    return False


def phase(
    inputs: Sequence[PhaseInput],
    *,
    complete: int,
    prior_bias: Tensor | None = None,
    gain: float = 1.0,
    eps: float = 1e-6,
    num_heads: int = 1,
    anchored: bool = False,
) -> list[PhaseOutput]:
    """All queries of a group of reads on the sources that all of them see, for every input, in one launch.

    Args:
        inputs: alike in S, M, D, dtype and leading dimensions, and in what is None.
        complete: C; the first C queries are complete reads, the others partial.
        prior_bias: b⁰ [S], constant; None: zeros. Used only where anchored.
        gain: of complete reads.
        eps: inside the root of the RMS.
        num_heads: H, a divisor of D.
        anchored: subtract the prior's weights.

    Raises:
        ValueError: inputs that differ in sizes, H that does not divide D, C outside 0 … M.
        RuntimeError: where `available` gives a reason.
    """
    values, keys = _sources(inputs)
    m = inputs[0].queries.shape[0]
    if not 0 <= complete <= m:
        raise ValueError(f"complete: got {complete}, allowed: 0 to the number of queries, {m}")
    extra = [one.base for one in inputs if one.base is not None]
    dtype = values[0].dtype
    values, keys, bases = _promoted(values, keys, extra)
    number = ops.statistics_dtype(values[0].dtype)
    _check(values, keys, bases, len(inputs), num_heads)
    outputs = torch.ops.depthroute.phase(
        values,
        keys,
        [one.queries.to(number) for one in inputs],
        _all_or_none("bias", [one.bias.to(number) for one in inputs if one.bias is not None], inputs),
        _all_or_none("base", bases, inputs),
        _constant(prior_bias, number) if anchored else None,
        complete,
        float(gain),
        float(eps),
        num_heads,
        anchored,
    )
    whole, numerators, totals, sums, maxima, prior_sums, prior_maxima, logits, _ = outputs
    if extra:
        whole = [read.to(dtype) for read in whole]
    # one node of the graph for all of them
    sums, maxima = (tensor.flatten(0, 1).unbind() for tensor in (sums, maxima))
    prior_sums, prior_maxima, logits = prior_sums.unbind(), prior_maxima.unbind(), logits.unbind()
    results, partial = [], m - complete
    for group in range(len(inputs)):
        prior = None
        if anchored and partial:
            prior = Prior(totals[group], prior_sums[group], prior_maxima[group])
        parts = [
            Part(numerators[group * partial + index], sums[at], maxima[at], prior)
            for index, at in enumerate(range(group * m + complete, (group + 1) * m))
        ]
        of_group = logits[group].movedim((-3, -2), (1, 0))
        results.append(PhaseOutput(list(whole[group * complete : (group + 1) * complete]), parts, of_group))
    return results


def merge(
    inputs: Sequence[MergeInput],
    *,
    prior_bias: Tensor | None = None,
    gain: float = 1.0,
    eps: float = 1e-6,
    num_heads: int = 1,
    anchored: bool = False,
    cast: bool = True,
) -> list[MergeOutput]:
    """Finish one partial read for every input, in one launch.

    Args:
        inputs: alike in P, D, dtype and leading dimensions, and in what is None; anchored ones have the prior of the phase.
        prior_bias: b⁰ [P] of the private sources, constant; None: zeros. Used only where anchored.
        gain, eps, num_heads, anchored: as for `phase`.
        cast: x in the dtype of the values; else it stays in that of the statistics.

    Raises:
        ValueError: inputs that differ in sizes, or H that does not divide D.
        RuntimeError: where `available` gives a reason.
    """
    values, keys = _sources(inputs)
    bases = [one.base for one in inputs if one.base is not None]
    starts = [one.start for one in inputs if one.start is not None]
    dtype = values[0].dtype
    values, keys, extra = _promoted(values, keys, [*bases, *starts])
    bases, starts = extra[: len(bases)], extra[len(bases) :]
    number = ops.statistics_dtype(values[0].dtype)
    _check(values, keys, extra, len(inputs), num_heads)
    summands = {one.summands for one in inputs}
    if len(summands) > 1:
        raise ValueError(f"summands: got {sorted(summands)} in one call, allowed: the same number in every input")
    priors = [one.part.prior for one in inputs if one.part.prior is not None] if anchored else []
    if anchored and len(priors) != len(inputs):
        raise ValueError(f"prior: got {len(priors)} for {len(inputs)} anchored reads, allowed: one for each")
    reads, _, logits, _ = torch.ops.depthroute.merge(
        values,
        keys,
        [one.query.to(number) for one in inputs],
        _all_or_none("bias", [one.bias.to(number) for one in inputs if one.bias is not None], inputs),
        [one.part.numerator for one in inputs],
        [one.part.sums for one in inputs],
        [one.part.maxima for one in inputs],
        [prior.total for prior in priors],
        [prior.sums for prior in priors],
        [prior.maxima for prior in priors],
        _all_or_none("base", bases, inputs),
        _all_or_none("start", starts, inputs),
        _constant(prior_bias, number) if anchored else None,
        summands.pop(),
        float(gain),
        float(eps),
        num_heads,
        cast,
    )
    if cast:
        reads = [read.to(dtype) for read in reads]
    return [MergeOutput(read, one.movedim(-2, 0)) for read, one in zip(reads, logits.unbind())]


def _sources(inputs: Sequence[PhaseInput] | Sequence[MergeInput]) -> tuple[list[Tensor], list[Tensor]]:
    """All values, then all keys, of one number per input."""
    values = [value for one in inputs for value in one.values]
    keys = [key for one in inputs if one.keys is not None for key in one.keys]
    numbers = {len(one.values) for one in inputs} | {len(one.keys) for one in inputs if one.keys is not None}
    if len(numbers) != 1 or not values or len(keys) not in (0, len(values)):
        got = sorted(numbers) if numbers else "no input"
        raise ValueError(f"values, keys: got {got} tensors, allowed: the same number, at least 1, in every input")
    return values, keys


def _promoted(*lists: list[Tensor]) -> list[list[Tensor]]:
    """All tensors in the one dtype that holds them all: usually as they are."""
    dtypes = {tensor.dtype for tensors in lists for tensor in tensors}
    dtype = lists[0][0].dtype
    if len(dtypes) > 1:
        for other in dtypes:
            dtype = torch.promote_types(dtype, other)
        return [[tensor.to(dtype) for tensor in tensors] for tensors in lists]
    return list(lists)


def _check(values: list[Tensor], keys: list[Tensor], others: list[Tensor], groups: int, heads: int) -> None:
    shape = values[0].shape
    for tensor in (*values, *keys, *others):
        if tensor.shape != shape:
            raise ValueError(f"values: got shapes {tuple(shape)} and {tuple(tensor.shape)}, allowed: one shape")
        if tensor.device != values[0].device:
            raise ValueError(f"values: got devices {values[0].device} and {tensor.device}, allowed: one device")
    if heads < 1 or shape[-1] % heads:
        raise ValueError(f"num_heads: got {heads}, allowed: a divisor of the width {shape[-1]}")


def _all_or_none(name: str, given: list[Tensor], inputs: Sequence[Any]) -> list[Tensor]:
    if len(given) not in (0, len(inputs)):
        raise ValueError(f"{name}: got {len(given)} for {len(inputs)} inputs, allowed: one for each, or none")
    return given


def _constant(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.detach().to(dtype)
