# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Merge on a CPU: one read's part of a phase and its P private sources, by online softmax, source by source.

Inside, n stands for all tokens (B·T), d for D/H. Kept for the gradient: references to private sources, numbers per source and
token, and of width D the result, which the norm behind it keeps as well, or the mix alone where the result is rounded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backward import first_derivative_only
from ..two_phases import MergeInput, MergeOutput


def dot(first: Tensor, second: Tensor, heads: int) -> Tensor:
    """Σ over each head's slice of first · second, both [n, D] → [n, H]."""
    first, second = (tensor.reshape(-1, 1, tensor.shape[-1] // heads) for tensor in (first, second))
    return torch.bmm(first, second.mT).view(-1, heads)


def scores_of(key: Tensor, query: Tensor) -> Tensor:
    """q · k per head: key [n, D], query [H, d] → [n, H]."""
    heads = query.shape[0]
    if heads == 1:
        return torch.mv(key, query[0]).unsqueeze(-1)
    return torch.bmm(key.view(-1, *query.shape).transpose(0, 1), query.unsqueeze(-1)).squeeze(-1).T


def softmax_with(sums: Tensor, maxima: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """f [n, H] and p [P, n, H] of a phase's Z and c [n, H] and private logits [P, n, H]."""
    shared = torch.log(sums).add_(maxima)  # Z ≥ 1
    weights = torch.softmax(torch.cat([shared.unsqueeze(0), logits]), 0)
    return weights[0] / sums, weights[1:]


class MergeFunction(torch.autograd.Function):
    """Arguments: P, gain, eps, cast, summands, query [H, d], b [P] or None, b⁰ [P] (anchored) or None, base or None, start or
    None, N, Z, c, then U, Z⁰, c⁰ (anchored) or three Nones, P values [..., D], and P keys unless the values are the keys.
    Outputs: x [..., D] and the constant logits [P, ..., H]."""

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        gain: float,
        eps: float,
        cast: bool,
        summands: int,
        query: Tensor,
        bias: Tensor | None,
        prior_bias: Tensor | None,
        base: Tensor | None,
        start: Tensor | None,
        numerator: Tensor,
        sums: Tensor,
        maxima: Tensor,
        total: Tensor | None,
        prior_sums: Any,
        prior_maxima: Any,
        *sources: Tensor,
    ) -> tuple[Tensor, Tensor]:
        heads, dtype = query.shape[0], query.dtype
        shape, width = numerator.shape, numerator.shape[-1]
        rows = [source.reshape(-1, width).to(dtype) for source in sources]
        values, keys = rows[:count], rows[count:] or rows
        sums, maxima = sums.reshape(-1, heads), maxima.reshape(-1, heads)

        norms = torch.stack([torch.linalg.vector_norm(key, dim=-1) for key in keys])
        inverse_rms = norms.square_().div_(width).add_(eps).rsqrt_().unsqueeze(-1)  # [P, n, 1]
        normalised = torch.stack([scores_of(key, query) for key in keys]).mul_(inverse_rms)  # [P, n, H]
        logits = normalised if bias is None else normalised + bias.view(-1, 1, 1)
        factor, weights = softmax_with(sums, maxima, logits)

        def spread(weight: Tensor) -> Tensor:
            return weight.unsqueeze(-1)

        def sliced(tensor: Tensor) -> Tensor:
            return tensor.reshape(-1, heads, width // heads)

        prior_factor: Any = None
        prior_weights: Any = None
        mix_factor, mix_weights = factor, weights
        if total is not None:
            initial = (
                torch.zeros_like(logits) if prior_bias is None else torch.zeros_like(logits) + prior_bias.view(-1, 1, 1)
            )
            prior_factor, prior_weights = softmax_with(
                prior_sums.reshape(-1, heads), prior_maxima.reshape(-1, heads), initial
            )
            mix_weights = weights - prior_weights
        if gain != 1:
            mix_factor, mix_weights = gain * mix_factor, gain * mix_weights
        mix = sliced(numerator) * spread(mix_factor)
        if total is not None:
            mix.addcmul_(sliced(total), spread(factor - prior_factor), value=gain)
        for value, weight in zip(values, mix_weights):
            mix.addcmul_(sliced(value), spread(weight))
        mix = mix.view(shape)
        result = mix if base is None else base + mix
        x = result.to(sources[0].dtype) if cast else result

        rounded = x.dtype != dtype
        if base is None or (not rounded and start is not None):
            kept, beside = x, start
        elif not rounded:
            kept, beside = x, base
        else:
            # differences of rounded streams would be mostly rounding
            kept, beside = mix.to(x.dtype), None
        ctx.scalars = count, gain, 0 if beside is not start or start is None else summands
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            query, normalised, inverse_rms, factor, weights, prior_factor, prior_weights, total, kept, beside, *sources
        )
        constant = logits.view(count, *shape[:-1], heads)
        ctx.mark_non_differentiable(constant)
        return x, constant

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
        count, gain, summands = ctx.scalars
        query, normalised, inverse_rms, factor, weights, prior_factor, prior_weights, total, kept, beside, *sources = (
            ctx.saved_tensors
        )
        heads, dtype = query.shape[0], query.dtype
        shape, width = kept.shape, kept.shape[-1]
        if gradient is None:
            return (None,) * (16 + len(sources))
        rows = [source.reshape(-1, width).to(dtype) for source in sources]
        values, keys = rows[:count], rows[count:]
        grad = gradient.reshape(-1, width).to(dtype)

        def row(tensor: Tensor) -> Tensor:
            return tensor.reshape(-1, width).to(dtype)

        by_value = [dot(grad, value, heads) for value in values]  # g · v_j, [n, H] each
        # g · (x − base), which is gain · Σ w (g · v) over all sources
        by_mix = dot(grad, row(kept), heads)
        if beside is not None:
            by_mix = by_mix - dot(grad, row(beside), heads)
            for known in by_value[:summands]:
                by_mix = by_mix - known
        by_value = gain * torch.stack(by_value)  # [P, n, H]
        by_total = None
        if total is not None:
            # the softmax's own centre is that of the plain mix: w = p − p⁰
            by_total = gain * dot(grad, row(total), heads)
            by_mix = by_mix + prior_factor * by_total + (prior_weights * by_value).sum(0)
        by_logit = weights * (by_value - by_mix)
        along_query = by_logit * inverse_rms
        pull = (along_query * normalised).sum(-1, keepdim=True) * inverse_rms / width
        along_grad = weights if prior_weights is None else weights - prior_weights
        if gain != 1:
            along_grad = gain * along_grad

        sliced = grad.view(-1, heads, width // heads)
        value_gradients, key_gradients, query_gradient = [], [], torch.zeros_like(query)
        for index, key in enumerate(keys or values):
            value_gradient = sliced * along_grad[index].unsqueeze(-1)
            across = along_query[index].unsqueeze(-1)
            key_gradient = across * query if keys else value_gradient.addcmul_(across, query)
            key_gradient.view(-1, width).addcmul_(pull[index], key, value=-1)
            if heads == 1:
                query_gradient[0] += torch.mv(key.T, along_query[index, :, 0])
            else:
                query_gradient += torch.einsum("nh,nhd->hd", along_query[index], key.view(-1, heads, width // heads))
            value_gradients.append(value_gradient.view(shape).to(sources[index].dtype))
            if keys:
                key_gradients.append(key_gradient.view(shape).to(key.dtype))
        bias_gradient = by_logit.sum((1, 2)) if ctx.needs_input_grad[6] else None
        base_gradient = gradient if ctx.needs_input_grad[8] else None
        numerator_gradient = (sliced * (gain * factor).unsqueeze(-1)).view(shape)
        sums_gradient = -(factor * by_mix).view(*shape[:-1], heads)
        total_gradient = None
        if total is not None:
            total_gradient = (sliced * (gain * (factor - prior_factor)).unsqueeze(-1)).view(shape)
        return (
            *(None,) * 5,
            query_gradient,
            bias_gradient,
            None,
            base_gradient,
            None,
            numerator_gradient,
            sums_gradient,
            None,
            total_gradient,
            None,
            None,
            *value_gradients,
            *key_gradients,
        )


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
    """One partial read with its private sources, as `two_phases` defines it.

    Args:
        inputs: one or more independent reads.
        prior_bias: b⁰ [P] of the private sources; None: zeros. Used only where anchored.
        gain, eps, num_heads, anchored: as in `phase`.
        cast: give x in the dtype of the values, not of the statistics.
    """
    outputs = []
    for one in inputs:
        query = one.query.unflatten(-1, (num_heads, -1))
        prior = one.part.prior if anchored else None
        with torch.autocast(query.device.type, enabled=False):
            outputs.append(
                MergeOutput(
                    *MergeFunction.apply(
                        len(one.values), gain, eps, cast, one.summands, query, one.bias,
                        prior_bias if anchored else None, one.base, one.start, one.part.numerator, one.part.sums,
                        one.part.maxima, *(prior or (None, None, None)), *one.values, *(one.keys or ()),
                    )
                )
            )  # fmt: skip
    return outputs
