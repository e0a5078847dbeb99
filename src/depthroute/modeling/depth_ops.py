# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The reference depth read: the one truth that every faster implementation has to agree with.

Dimension letters: B batch, T tokens, D width, S sources of a read, H depth heads, M queries of one call.

`depth_read` is the interface, `DepthMix` the equation. Its gradient is written out, because autograd would keep several
gradients of every source of every read alive at once, and float32 copies of bfloat16 sources. What is kept instead:
references to the sources, and numbers per source and token. The gradient is itself differentiable. Sources are never
stacked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import maybe_autocast


def statistics_dtype(values: Tensor) -> torch.dtype:
    """Dtype of logits, softmax and accumulation: float64 for float64 sources, else float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def check_sources(values: Sequence[Tensor], keys: Sequence[Tensor] | None, num_heads: int) -> None:
    """Raises:
    ValueError: no source, keys that differ in number from the values, or H that does not divide D.
    """
    width = values[0].shape[-1] if values else 0
    given = len(values if keys is None else keys)
    if not values or given != len(values):
        raise ValueError(f"values, keys: got {len(values)} and {given} tensors, allowed: the same number, at least 1")
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"num_heads: got {num_heads}, allowed: a divisor of the width {width}")


class DepthMix(torch.autograd.Function):
    """r_i = 1 / sqrt(mean(k_i²) + eps)   l_i = (q · k_i) r_i   p = softmax_i(l + b)   m = gain · Σ_i (p_i − p⁰_i) v_i

    Arguments: `sources` are S values [..., D], then S keys unless the values are the keys; q [H, D/H] is folded; b (or
    None) is shaped [S, 1, ..., 1]; p⁰ (or None: zero) [S, ..., H] is a constant. Outputs: m [..., D], then l, r and p, all
    [S, ..., H] (r: [S, ..., 1]), in the dtype of q. They are outputs because only through those is the gradient, which
    is made of them, differentiable.
    """

    @staticmethod
    def forward(
        count: int, eps: float, gain: float, query: Tensor, bias: Tensor | None, prior: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        heads, dtype = query.shape[0], query.dtype
        values, keys = sources[:count], sources[count:] or sources
        norms = torch.stack([torch.linalg.vector_norm(key, dim=-1, keepdim=True, dtype=dtype) for key in keys])
        inverse_rms = torch.rsqrt(norms.square_() / query.numel() + eps)
        scores = torch.stack([(key.unflatten(-1, (heads, -1)) * query).sum(-1) for key in keys]) * inverse_rms
        weights = torch.softmax(scores if bias is None else scores + bias, dim=0)
        factors = (gain * (weights if prior is None else weights - prior)).unsqueeze(-1)
        mix = factors[0] * values[0].unflatten(-1, (heads, -1))
        for factor, value in zip(factors[1:], values[1:]):
            mix.addcmul_(factor, value.unflatten(-1, (heads, -1)))
        return mix.flatten(-2), scores, inverse_rms, weights

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.count, _, ctx.gain, query, _, prior, *sources = inputs
        ctx.save_for_backward(query, prior, *output[1:], *sources)

    @staticmethod
    def backward(
        ctx: Any, grad_mix: Tensor, grad_scores: Tensor, grad_inverse_rms: Tensor, grad_weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        query, prior, scores, inverse_rms, weights, *sources = ctx.saved_tensors
        heads, count = query.shape[0], ctx.count
        sliced = [source.unflatten(-1, (heads, -1)) for source in sources]
        values, keys = sliced[:count], sliced[count:]
        grad = grad_mix.unflatten(-1, (heads, -1))

        by_weight = ctx.gain * torch.stack([(grad * value).sum(-1) for value in values]) + grad_weights
        by_logit = weights * (by_weight - (weights * by_weight).sum(0))
        by_score = by_logit + grad_scores
        along_query = (by_score * inverse_rms).unsqueeze(-1)
        pull = (by_score * scores).sum(-1, keepdim=True) + grad_inverse_rms * inverse_rms
        along_key = (pull * inverse_rms.square() / query.numel()).unsqueeze(-1)
        along_grad = (ctx.gain * (weights if prior is None else weights - prior)).unsqueeze(-1)

        # one buffer per source, filled in place: fresh memory is what a gradient over depth costs most
        source_grads, key_grads, query_grad = [], [], torch.zeros_like(query)
        for index, key in enumerate(keys or values):
            source_grad = along_grad[index] * grad
            key_grad = along_query[index] * query if keys else source_grad.addcmul_(along_query[index], query)
            key_grad.addcmul_(along_key[index], key, value=-1)
            source_grads.append(source_grad.flatten(-2).to(sources[index].dtype))
            if keys:
                key_grads.append(key_grad.flatten(-2).to(key.dtype))
            query_grad = query_grad + (along_query[index] * key).sum_to_size(query.shape)
        bias_grad = None
        if ctx.needs_input_grad[4]:
            bias_grad = by_logit.sum(dim=tuple(range(1, by_logit.dim())), keepdim=True)
        return None, None, None, query_grad, bias_grad, None, *source_grads, *key_grads


def depth_mix(
    values: Sequence[Tensor],
    query: Tensor,
    *,
    keys: Sequence[Tensor] | None = None,
    key_norm: Tensor | None = None,
    bias: Tensor | None = None,
    prior_bias: Tensor | None = None,
    gain: float = 1.0,
    scale: float = 1.0,
    eps: float = 1e-6,
    num_heads: int = 1,
    anchored: bool = False,
) -> tuple[Tensor, Tensor]:
    """`depth_read` before its base is added and its result cast: gain · Σ_i w_i v_i [..., D] and p [S, ..., H], both
    float32 (float64), for one query [D]."""
    dtype = statistics_dtype(values[0])
    folded = scale * (query.to(dtype) if key_norm is None else query.to(dtype) * key_norm.to(dtype))
    shape = (len(values), *values[0].shape[:-1], num_heads)
    column = (-1, *[1] * (len(shape) - 1))
    if bias is not None:
        bias = bias.to(dtype).view(column)
    prior = None
    if anchored:
        # through the same operation, shape and layout as p: only then is p − p⁰ exactly zero at the start
        logits = torch.zeros(shape, dtype=dtype, device=values[0].device)
        if prior_bias is not None:
            logits = logits + prior_bias.detach().to(dtype).view(column)
        prior = torch.softmax(logits, dim=0)
    sources = values if keys is None else (*values, *keys)
    with maybe_autocast(values[0].device.type, enabled=False):
        inputs = (len(values), eps, float(gain), folded.unflatten(-1, (num_heads, -1)), bias, prior, *sources)
        needs_gradient = torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in inputs
        )
        # without gradients the forward alone is cheaper, and torch.compile traces a variable number of sources only so
        mix, _, _, weights = (DepthMix.apply if needs_gradient else DepthMix.forward)(*inputs)
    return mix, weights


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
        prior_bias: b⁰ [S], the biases at initialisation, a constant; default: zeros. Used only where anchored.
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
    check_sources(values, keys, num_heads)
    options: dict[str, Any] = {"keys": keys, "key_norm": key_norm, "bias": bias, "prior_bias": prior_bias}
    options |= {"gain": gain, "scale": scale, "eps": eps, "num_heads": num_heads, "anchored": anchored}
    if query.dim() == 1:
        mix, weights = depth_mix(values, query, **options)
    else:
        mix, weights = map(torch.stack, zip(*(depth_mix(values, one, **options) for one in query)))
    read = (mix if base is None else base + mix).to(values[0].dtype)
    if not return_weights:
        return read
    return read, weights.squeeze(-1) if num_heads == 1 else weights
