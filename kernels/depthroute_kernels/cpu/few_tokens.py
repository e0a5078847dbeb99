# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Complete reads of a few tokens without gradients, as in decoding: there, what costs is the number of calls."""

import torch
from torch import Tensor

from ..two_phases import PhaseInput, PhaseOutput


def of_few_tokens(tensor: Tensor) -> bool:
    """Whether the calls cost more than the arithmetic, for a source [..., D], and no gradient is wanted."""
    return not torch.is_grad_enabled() and tensor.numel() <= 2**14


def read_few(one: PhaseInput, prior_bias: Tensor | None, gain: float, eps: float, heads: int) -> PhaseOutput:
    """A phase whose M reads are all complete. `prior_bias` [S] is given where the reads are anchored."""
    queries, shape = one.queries, one.values[0].shape
    dtype, count, width = queries.dtype, len(one.values), shape[-1]
    stack = torch.stack(tuple(one.values)).to(dtype)
    keys = stack if one.keys is None else torch.stack(tuple(one.keys)).to(dtype)
    sliced = stack.view(count, -1, 1, heads, width // heads)  # [S, n, 1, H, d]
    # norms and small products: fewer and shorter calls than torch's own norm layer and batched products
    norms = torch.linalg.vector_norm(keys, dim=-1).view(count, -1, 1, 1)
    inverse_rms = norms.square_().div_(width).add_(eps).rsqrt_()
    products = keys.view(count, -1, 1, heads, width // heads) * queries.unflatten(-1, (heads, -1))
    logits = products.sum(-1).mul_(inverse_rms)  # [S, n, M, H]
    if one.bias is not None:
        logits += one.bias.T.unsqueeze(1).unsqueeze(-1)
    weights = torch.softmax(logits, 0)
    if prior_bias is not None:
        weights -= torch.softmax(torch.zeros_like(logits) + prior_bias.view(-1, 1, 1, 1), 0)
    if gain != 1:
        weights *= gain
    mixes = (weights.unsqueeze(-1) * sliced).sum(0)  # [n, M, H, d]
    reads = [mix.reshape(shape) for mix in mixes.unbind(1)]
    if one.base is not None:
        reads = [(one.base + read).to(one.base.dtype) for read in reads]
    return PhaseOutput(reads, [], logits.permute(2, 0, 1, 3).view(len(queries), count, *shape[:-1], heads))
