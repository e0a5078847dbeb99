# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The reference depth read: the one truth that every faster implementation has to agree with.

Dimension letters: B batch, T tokens, D width, S sources of a read, H depth heads, M queries of one call.

`depth_read` is the equation. Its two products over sources, `RoutingLogits` and `WeightedSum`, carry their gradients
written out, because autograd would keep three gradients for every source of every read, and float32 copies of bfloat16
sources. What is kept instead: references to the sources, and logits of [S, ..., H]. The gradients are themselves
differentiable. Sources are never stacked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import maybe_autocast


def statistics_dtype(values: Tensor) -> torch.dtype:
    """Dtype of logits, softmax and accumulation: float64 for float64 sources, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


class RoutingLogits(torch.autograd.Function):
    """l_i = (k_i @ Q) / sqrt(mean(k_i²) + eps): keys k_i [..., D] and Q [D, H] → [S, ..., H] in the dtype of Q.

    Column h of Q is head h's query on that head's slice and zero elsewhere. Second output: 1 / sqrt(…) [S, ..., 1].
    """

    @staticmethod
    def forward(eps: float, query: Tensor, *keys: Tensor) -> tuple[Tensor, Tensor]:
        norms = [torch.linalg.vector_norm(key, dim=-1, keepdim=True, dtype=query.dtype) for key in keys]
        inverse_rms = torch.rsqrt(torch.stack(norms).square_() / query.shape[0] + eps)
        return torch.stack([key.to(query.dtype) @ query for key in keys]) * inverse_rms, inverse_rms

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, *keys, logits, inverse_rms = ctx.saved_tensors
        slices = query.sum(-1).unflatten(-1, (query.shape[1], -1))  # [H, D/H]
        along_query = grad * inverse_rms
        along_key = (grad * logits).sum(-1, keepdim=True) * inverse_rms.square() / query.shape[0]
        query_grad = torch.zeros_like(query)
        key_grads: list[Tensor | None] = []
        for key, by_query, by_key, needed in zip(keys, along_query, along_key, ctx.needs_input_grad[2:]):
            query_grad = query_grad + key.to(query.dtype).flatten(0, -2).mT @ by_query.flatten(0, -2)
            key_grad = (by_query.unsqueeze(-1) * slices).flatten(-2).addcmul_(by_key, key, value=-1) if needed else None
            key_grads.append(None if key_grad is None else key_grad.to(key.dtype))
        return None, query_grad, *key_grads


class WeightedSum(torch.autograd.Function):
    """Σ_i w_i v_i: weights [S, ..., H] and values v_i [..., D] in H slices → [..., D] in the dtype of the weights."""

    @staticmethod
    def forward(weights: Tensor, *values: Tensor) -> Tensor:
        slices = (weights.shape[-1], -1)
        total = weights[0].unsqueeze(-1) * values[0].unflatten(-1, slices)
        for weight, value in zip(weights[1:], values[1:]):
            total.addcmul_(weight.unsqueeze(-1), value.unflatten(-1, slices))
        return total.flatten(-2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *values = ctx.saved_tensors
        slices = (weights.shape[-1], -1)
        grad = grad.unflatten(-1, slices)
        weight_grads = [(grad * value.unflatten(-1, slices)).sum(-1) for value in values]
        value_grads = [
            (weight.unsqueeze(-1) * grad).flatten(-2).to(value.dtype) if needed else None
            for weight, value, needed in zip(weights, values, ctx.needs_input_grad[1:])
        ]
        return torch.stack(weight_grads), *value_grads


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply`, or its forward alone where no gradient is asked for: cheaper, and torch.compile takes a variable
    number of tensors only so."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return function.apply(*inputs)
    return function.forward(*inputs)


def depth_read(
    values: Sequence[Tensor],
    query: Tensor,
    *,
    keys: Sequence[Tensor] | None = None,
    key_norm: Tensor | None = None,
    bias: Tensor | None = None,
    prior_bias: Tensor | None = None,
    base: Tensor | None = None,
    gain: float = 1.0,
    scale: float = 1.0,
    eps: float = 1e-6,
    num_heads: int = 1,
    anchored: bool = False,
    return_weights: bool = False,
) -> Any:
    """One softmax over depth and the mix that it selects (Attention Residuals, arXiv 2603.15031):

        l_i = scale · q · (γ ⊙ k_i / sqrt(mean(k_i²) + eps)) + b_i      p = softmax_i(l)
        w   = p, or p − softmax_i(b⁰) where anchored                    x = base + gain · Σ_i w_i v_i

    The RMS is over the whole width and without γ; then q, k and v are cut into H contiguous slices with one softmax each.
    Logits, softmax and sum are float32 (float64 for float64 sources), also under autocast; x is cast once, at the end.
    Sources are not written to.

    Args:
        values: S ≥ 1 tensors [..., D] of any floating dtype.
        query: [D], or [M, D] for M reads of the same sources.
        keys: S tensors [..., D]; default: the values.
        key_norm: γ [D]; default: ones, or folded into `query` by the caller.
        bias: b [S]; default: zeros.
        prior_bias: b⁰ [S], the biases at initialisation; default: zeros. Used only where anchored.
        base: [..., D]; default: none.
        gain, scale, eps: numbers; eps is inside the root.
        num_heads: H, a divisor of D.
        anchored: subtract the prior's weights. At q = 0 and b = b⁰ the result is then `base` bit for bit in every dtype
            (−0.0 may become +0.0), and the gradient of q is not zero. A non-finite source breaks this (0 · inf).
        return_weights: also return p.

    Returns:
        x [..., D], or [M, ..., D], in the dtype of the first value; with `return_weights` a pair of x and p: [S, ...], or
        [M, S, ...] for M queries, with a trailing H where H > 1.

    Raises:
        ValueError: no source, keys that differ in number from the values, or H that does not divide D.
    """
    keys = values if keys is None else keys
    width = values[0].shape[-1] if values else 0
    if not values or len(keys) != len(values):
        raise ValueError(
            f"values, keys: got {len(values)} and {len(keys)} tensors, allowed: the same number, at least 1"
        )
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"num_heads: got {num_heads}, allowed: a divisor of the width {width}")
    options: dict[str, Any] = {"keys": keys, "key_norm": key_norm, "bias": bias, "prior_bias": prior_bias, "base": base}
    options |= {"gain": gain, "scale": scale, "eps": eps, "num_heads": num_heads, "anchored": anchored}
    if query.dim() == 2:
        reads, read_weights = zip(*(depth_read(values, q, **options, return_weights=True) for q in query))
        return (torch.stack(reads), torch.stack(read_weights)) if return_weights else torch.stack(reads)

    dtype = statistics_dtype(values[0])
    folded = scale * (query.to(dtype) if key_norm is None else query.to(dtype) * key_norm.to(dtype))
    with maybe_autocast(values[0].device.type, enabled=False):
        logits, _ = _apply(RoutingLogits, eps, torch.block_diag(*folded.unflatten(-1, (num_heads, -1))).mT, *keys)
        column = (-1, *[1] * (logits.dim() - 1))
        prior = torch.zeros_like(logits)
        if bias is not None:
            logits = logits + bias.to(dtype).view(column)
        if prior_bias is not None:
            prior = prior + prior_bias.to(dtype).view(column)
        weights = torch.softmax(logits, dim=0)
        # p⁰ through the same operation, shape and layout as p: only then is p − p⁰ exactly zero at the start
        mixing = weights - torch.softmax(prior, dim=0) if anchored else weights
        mix = _apply(WeightedSum, gain * mixing, *values)
    read = (mix if base is None else base + mix).to(values[0].dtype)
    if not return_weights:
        return read
    return read, weights.squeeze(-1) if num_heads == 1 else weights
