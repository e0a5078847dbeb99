# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Complete reads of a few tokens without gradients, as in decoding: there, what costs is the number of calls."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from ..two_phases import PhaseInput, PhaseOutput


def of_few_tokens(tensor: Tensor) -> bool:
    """Whether the calls cost more than the arithmetic, for a source [..., D], and no gradient is wanted."""
    return not torch.is_grad_enabled() and tensor.numel() <= 2**14


def read_few(one: PhaseInput, prior_bias: Tensor | None, gain: float, eps: float, heads: int) -> PhaseOutput:
    """A phase whose M reads are all complete. `prior_bias` [S] is given where the reads are anchored."""
    queries, shape = one.queries, one.values[0].shape
    dtype = queries.dtype
    stack = torch.stack(tuple(one.values)).to(dtype)
    keys = stack if one.keys is None else torch.stack(tuple(one.keys)).to(dtype)
    count, width = len(stack), shape[-1]
    normed = rms_norm(keys, (width,), eps=eps).view(count, -1, 1, heads, width // heads)
    logits = (normed * queries.unflatten(-1, (heads, -1))).sum(-1)  # [S, n, M, H]
    if one.bias is not None:
        logits = logits + one.bias.T.view(count, 1, -1, 1)
    weights = torch.softmax(logits, 0)
    if prior_bias is not None:
        weights = weights - torch.softmax(torch.zeros_like(logits) + prior_bias.view(-1, 1, 1, 1), 0)
    sliced = stack.view(count, -1, heads, width // heads)
    mixes = torch.matmul(weights.permute(1, 3, 2, 0), sliced.permute(1, 2, 0, 3))  # [n, H, M, D/H]
    reads = [mix.reshape(shape) for mix in mixes.unbind(2)]
    if gain != 1:
        reads = [gain * read for read in reads]
    if one.base is not None:
        reads = [(one.base + read).to(one.base.dtype) for read in reads]
    return PhaseOutput(reads, [], logits.permute(2, 0, 1, 3).view(len(queries), count, *shape[:-1], heads))
