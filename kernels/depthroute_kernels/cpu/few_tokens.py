# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Complete reads of a few tokens without gradients, as in decoding: there, what costs is the number of calls."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..two_phases import PhaseInput, PhaseOutput


def of_few_tokens(tensor: Tensor) -> bool:
    """Whether the calls cost more than the arithmetic, for a source [..., D], and no gradient is wanted."""
    return not torch.is_grad_enabled() and tensor.numel() <= 2**14


def read_few(
    inputs: Sequence[PhaseInput], prior_bias: Tensor | None, gain: float, eps: float, heads: int
) -> list[PhaseOutput]:
    """A phase whose M reads are all complete. `prior_bias` [S] is given where the reads are anchored."""
    first, groups = inputs[0], len(inputs)
    shape, dtype, count = first.values[0].shape, first.queries.dtype, len(first.values)
    reads, width = first.queries.shape
    values = torch.stack([value for one in inputs for value in one.values]).to(dtype)
    keys = values if first.keys is None else torch.stack([key for one in inputs for key in one.keys or ()]).to(dtype)
    queries = first.queries if groups == 1 else torch.stack([one.queries for one in inputs])
    # sqrt(D · (mean(k²) + eps)) in two calls, so that queries are sqrt(D) times as long
    norms = torch.linalg.vector_norm(keys, dim=-1)
    norms = torch.hypot(norms, norms.new_full((), (width * eps) ** 0.5))
    per_head = (groups, count, 1, -1, heads, width // heads)  # G, S, M, n, H, d
    products = keys.view(per_head) * (queries * width**0.5).view(groups, 1, reads, 1, heads, width // heads)
    logits = products.sum(-1).div_(norms.view(groups, count, 1, -1, 1))  # [G, S, M, n, H]
    if first.bias is not None:
        logits += torch.stack([one.bias.T for one in inputs if one.bias is not None]).view(groups, count, reads, 1, 1)
    weights = torch.softmax(logits, 1)
    if prior_bias is not None:
        weights -= torch.softmax(torch.zeros_like(logits) + prior_bias.view(-1, 1, 1, 1), 1)
    if gain != 1:
        weights *= gain
    mixes = (weights.unsqueeze(-1) * values.view(per_head)).sum(1).view(groups, reads, *shape)
    if first.base is not None:
        mixes = torch.stack([one.base for one in inputs if one.base is not None]).unsqueeze(1) + mixes
        mixes = mixes.to(first.values[0].dtype)
    per_read = (groups, reads, count, *shape[:-1], heads)
    of_reads = logits.transpose(1, 2).reshape(per_read).unbind()
    return [PhaseOutput(list(mix.unbind()), [], of_read) for mix, of_read in zip(mixes.unbind(), of_reads)]
