# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Merge on a CPU: partial reads and their P private sources, by online softmax, source by source.

Inside, G is the number of reads of a call, n stands for all tokens (B·T), d for D/H. What has numbers per token is computed
for all reads at once, what has width D in one pass after the other. Kept for the gradient: references to private sources,
numbers per source and token, and of width D the result, which the norm behind it keeps as well, or the mix alone where the
result is rounded.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.modeling.depth_backend import MergeInput, MergeOutput

from ..backward import first_derivative_only


class Layout(NamedTuple):
    """What a merge's tensors are.

    Attributes:
        reads: G.
        private: P, of each.
        summands: as in `MergeInput`.
        gain: of the mix.
        cast: give x in the dtype of the values.
    """

    reads: int
    private: int
    summands: int
    gain: float
    cast: bool


def dot(first: Tensor, second: Tensor, heads: int) -> Tensor:
    """Σ over each head's slice of first · second, both [n, D] → [n, H]."""
    sliced = (-1, heads, first.shape[-1] // heads)
    # not a batched product: products of single rows take it twice as long
    return torch.linalg.vecdot(first.reshape(sliced), second.reshape(sliced))


def scores_of(key: Tensor, query: Tensor) -> Tensor:
    """q · k per head: key [n, D], query [H, d] → [n, H]."""
    if len(query) == 1:
        return torch.mv(key, query[0]).unsqueeze(-1)
    return torch.bmm(key.view(-1, *query.shape).transpose(0, 1), query.unsqueeze(-1)).squeeze(-1).T


def softmax_with(sums: Tensor, maxima: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """f [G, n, H] and p [G, P, n, H] of phases' Z and c [G, n, H] and private logits [G, P, n, H]."""
    shared = torch.log(sums).add_(maxima)  # Z ≥ 1
    weights = torch.softmax(torch.cat([shared.unsqueeze(1), logits], 1), 1)
    return weights[:, 0] / sums, weights[:, 1:]


class MergeFunction(torch.autograd.Function):
    """Arguments: the layout, eps, b⁰ [P] or None, then ten for each read: query [H, d], b [P] or None, base or None, start or
    None, N, Z, c, and U, Z⁰, c⁰ (anchored) or three Nones; then all values [..., D], and all keys unless the values are the
    keys. Outputs: x [..., D] of each read, and of each the constant logits [P, ..., H]."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, eps: float, prior_bias: Tensor | None, *tensors: Any) -> tuple[Tensor, ...]:
        reads, count, _, gain, cast = layout
        queries, biases, bases, starts, numerators, sums, maxima, totals, prior_sums, prior_maxima = (
            tensors[place : 10 * reads : 10] for place in range(10)
        )
        sources = tensors[10 * reads :]
        heads, dtype, shape = queries[0].shape[0], queries[0].dtype, numerators[0].shape
        width = shape[-1]
        rows = [source.reshape(-1, width).to(dtype) for source in sources]
        values, keys = rows[: reads * count], rows[reads * count :] or rows

        def per_read(statistics: Sequence[Tensor]) -> Tensor:
            return torch.stack(tuple(statistics)).view(reads, -1, heads)

        norms = torch.stack([torch.linalg.vector_norm(key, dim=-1) for key in keys])
        inverse_rms = norms.square_().div_(width).add_(eps).rsqrt_().view(reads, count, -1, 1)  # [G, P, n, 1]
        scores = torch.stack([scores_of(key, queries[index // count]) for index, key in enumerate(keys)])
        normalised = scores.view(reads, count, -1, heads).mul_(inverse_rms)  # [G, P, n, H]
        logits = normalised
        if biases[0] is not None:
            logits = normalised + torch.stack(biases).view(reads, count, 1, 1)
        factor, weights = softmax_with(per_read(sums), per_read(maxima), logits)
        prior_factor: Any = None
        prior_weights: Any = None
        mix_factor, mix_weights, total_factor = factor, weights, None
        if totals[0] is not None:
            initial = torch.zeros_like(logits)
            if prior_bias is not None:
                initial += prior_bias.view(-1, 1, 1)
            prior_factor, prior_weights = softmax_with(per_read(prior_sums), per_read(prior_maxima), initial)
            mix_weights, total_factor = weights - prior_weights, gain * (factor - prior_factor)
        if gain != 1:
            mix_factor, mix_weights = gain * mix_factor, gain * mix_weights

        def sliced(tensor: Tensor) -> Tensor:
            return tensor.reshape(-1, heads, width // heads)

        results, kept, beside = [], [], []
        for index, base in enumerate(bases):
            mix = sliced(numerators[index]) * mix_factor[index].unsqueeze(-1)
            if total_factor is not None:
                mix.addcmul_(sliced(totals[index]), total_factor[index].unsqueeze(-1))
            for place, weight in enumerate(mix_weights[index], index * count):
                mix.addcmul_(sliced(values[place]), weight.unsqueeze(-1))
            mix = mix.view(shape)
            x = mix if base is None else base + mix
            x = x.to(sources[0].dtype) if cast else x
            results.append(x)
            # differences of rounded streams would be mostly rounding
            keeps_mix = base is not None and x.dtype != dtype
            kept.append(mix.to(x.dtype) if keeps_mix else x)
            beside.append(None if base is None or keeps_mix else base if starts[index] is None else starts[index])
        ctx.layout = layout
        ctx.subtracts_values = beside[0] is not None and starts[0] is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            normalised, inverse_rms, factor, weights, prior_factor, prior_weights,
            *queries, *totals, *kept, *beside, *sources,
        )  # fmt: skip
        constants = [of_read.view(count, *shape[:-1], heads) for of_read in logits]
        ctx.mark_non_differentiable(*constants)
        return *results, *constants

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        reads, count, summands, gain, _ = ctx.layout
        normalised, inverse_rms, factor, weights, prior_factor, prior_weights, *saved = ctx.saved_tensors
        queries, totals, kept, beside = (saved[place * reads : (place + 1) * reads] for place in range(4))
        sources = saved[4 * reads :]
        heads, dtype, shape = queries[0].shape[0], queries[0].dtype, kept[0].shape
        width = shape[-1]

        def row(tensor: Tensor) -> Tensor:
            return tensor.reshape(-1, width).to(dtype)

        zeros = normalised.new_zeros(()).expand(shape)
        grads = [row(zeros if gradient is None else gradient) for gradient in gradients[:reads]]
        rows = [row(source) for source in sources]
        values, keys = rows[: reads * count], rows[reads * count :]

        by_value = torch.stack([dot(grads[index // count], value, heads) for index, value in enumerate(values)])
        by_value = by_value.view(reads, count, -1, heads)  # g · v_j
        # g · (x − base), which is gain · Σ w (g · v) over all sources
        by_mix = torch.stack([dot(grad, row(one), heads) for grad, one in zip(grads, kept)])  # [G, n, H]
        if beside[0] is not None:
            by_mix -= torch.stack([dot(grad, row(one), heads) for grad, one in zip(grads, beside)])
        if ctx.subtracts_values and summands:
            by_mix -= by_value[:, :summands].sum(1)
        if gain != 1:
            by_value = gain * by_value
        mix_weights, total_factor = weights, None
        if prior_weights is not None:
            # the softmax's own centre is that of the plain mix, w = p − p⁰
            by_total = torch.stack([dot(grad, row(total), heads) for grad, total in zip(grads, totals)])
            by_mix = by_mix + gain * prior_factor * by_total + (prior_weights * by_value).sum(1)
            mix_weights, total_factor = weights - prior_weights, gain * (factor - prior_factor)
        by_logit = weights * (by_value - by_mix.unsqueeze(1))
        along_query = by_logit * inverse_rms
        pull = (along_query * normalised).sum(-1, keepdim=True).mul_(inverse_rms).div_(width)  # [G, P, n, 1]
        if gain != 1:
            mix_weights = gain * mix_weights
        along_numerator = gain * factor if gain != 1 else factor
        sums_gradient = (factor * by_mix).neg_()

        results: list[Any] = []
        value_gradients, key_gradients = [], []
        for index, (query, grad) in enumerate(zip(queries, grads)):
            wide = grad.view(-1, heads, width // heads)
            query_gradient = torch.zeros_like(query)
            for place in range(count):
                at = index * count + place
                key = (keys or values)[at]
                across = along_query[index, place].unsqueeze(-1)
                value_gradient = wide * mix_weights[index, place].unsqueeze(-1)
                key_gradient = across * query if keys else value_gradient.addcmul_(across, query)
                key_gradient.view(-1, width).addcmul_(pull[index, place], key, value=-1)
                if heads == 1:
                    query_gradient[0] += torch.mv(key.T, along_query[index, place, :, 0])
                else:
                    of_key = key.view(-1, heads, width // heads)
                    query_gradient += torch.einsum("nh,nhd->hd", along_query[index, place], of_key)
                value_gradients.append(value_gradient.view(shape).to(sources[at].dtype))
                if keys:
                    key_gradients.append(key_gradient.view(shape).to(sources[at].dtype))
            wants_bias, wants_base = ctx.needs_input_grad[4 + 10 * index], ctx.needs_input_grad[5 + 10 * index]
            results += [
                query_gradient,
                by_logit[index].sum((1, 2)) if wants_bias else None,
                gradients[index] if wants_base else None,
                None,
                (wide * along_numerator[index].unsqueeze(-1)).view(shape),
                sums_gradient[index].view(*shape[:-1], heads),
                None,
                None if total_factor is None else (wide * total_factor[index].unsqueeze(-1)).view(shape),
                None,
                None,
            ]
        return None, None, None, *results, *value_gradients, *key_gradients


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
    """Partial reads with their private sources, as `depth_backend` defines it.

    Args:
        inputs: one or more independent reads.
        prior_bias: b⁰ [P] of the private sources; None: zeros. Used only where anchored.
        gain, eps, num_heads, anchored: as in `phase`.
        cast: give x in the dtype of the values, not of the statistics.
    """
    layout = Layout(len(inputs), len(inputs[0].values), inputs[0].summands, gain, cast)
    arguments: list[Tensor | None] = []
    for one in inputs:
        prior = one.part.prior if anchored else None
        query = one.query.unflatten(-1, (num_heads, -1))
        arguments += [query, one.bias, one.base, one.start, *one.part[:3], *(prior or (None, None, None))]
    sources = [value for one in inputs for value in one.values] + [key for one in inputs for key in one.keys or ()]
    with torch.autocast(sources[0].device.type, enabled=False):
        outputs = MergeFunction.apply(layout, eps, prior_bias if anchored else None, *arguments, *sources)
    return [MergeOutput(*of_read) for of_read in zip(outputs[: len(inputs)], outputs[len(inputs) :])]
