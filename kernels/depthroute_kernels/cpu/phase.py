# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Phase on a CPU: M queries over S sources by batched products.

Inside, n stands for all tokens (B·T), d for D/H. Sources are stacked [S, n, D] for the length of a call, in the forward and
again in the backward pass; what is kept between is references to them, logits [H, M, S, n] and 1/RMS [S, n].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..two_phases import Part, PhaseInput, PhaseOutput, Prior
from ..backward import first_derivative_only
from .few_tokens import of_few_tokens, read_few


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[S, n, D] in `dtype`, contiguous."""
    if tensors[0].dtype == dtype:
        return torch.stack(tuple(tensors)).view(len(tensors), -1, tensors[0].shape[-1])
    stack = torch.empty(len(tensors), *tensors[0].shape, dtype=dtype)
    for row, tensor in zip(stack, tensors):
        row.copy_(tensor)
    return stack.view(len(tensors), -1, tensors[0].shape[-1])


def weigh(logits: Tensor, prior: Tensor | None, complete: int, gain: float) -> tuple[Tensor, ...]:
    """What sources are mixed with: w [H, M, S, n] as in `two_phases`, e [H, M, S, n] (of complete reads p), Z and c
    [H, M, n]; and where anchored e⁰, Z⁰ and c⁰ of one query, [H, S, n] and [H, n]."""

    def softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maxima = logits.amax(2, keepdim=True)
        exponentials = torch.sub(logits, maxima).exp_()
        sums = exponentials.sum(2, keepdim=True)
        if complete:
            exponentials[:, :complete] /= sums[:, :complete]
        return exponentials, sums.squeeze(2), maxima.squeeze(2)

    exponentials, sums, maxima = softmax(logits)
    if prior is None:
        weights, initial = exponentials, ()
    else:
        # of the whole shape and layout: only then is p − p⁰ exactly zero at the start
        initial_exponentials, initial_sums, initial_maxima = softmax((torch.zeros_like(logits) + prior.view(-1, 1)))
        weights = exponentials - initial_exponentials
        initial = (initial_exponentials[:, -1], initial_sums[:, -1], initial_maxima[:, -1])
    if complete and gain != 1:
        weights = torch.cat([weights[:, :complete] * gain, weights[:, complete:]], 1)
    return weights, exponentials, sums, maxima, *initial


def token_major(weights: Tensor) -> Tensor:
    """[H, M, S, n] → [n·H, M, S], contiguous: a batched product with any other left side is many times slower."""
    return weights.permute(3, 0, 1, 2).flatten(0, 1).contiguous()


class PhaseFunction(torch.autograd.Function):
    """Arguments: S, complete reads, gain, eps, queries [M, H, d], b [M, S] or None, b⁰ [S] or None (plain), base or None, S
    values [..., D], and S keys unless the values are the keys.

    Outputs: complete reads, numerators, sums Z [..., H] of the partial ones, U (where anchored and any is partial), then
    constants: c of the partial reads, Z⁰ and c⁰ (like U), logits [M, S, ..., H].
    """

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        complete: int,
        gain: float,
        eps: float,
        queries: Tensor,
        bias: Tensor | None,
        prior: Tensor | None,
        base: Tensor | None,
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        reads, heads, width = queries.shape
        values, keys = sources[:count], sources[count:]
        shape, dtype = values[0].shape, queries.dtype
        stack = stacked(values, dtype)
        key_stack = stacked(keys, dtype) if keys else stack
        tokens = stack.shape[1]

        by_head = key_stack.view(-1, heads, width).transpose(0, 1)
        inverse_rms = torch.linalg.vector_norm(key_stack, dim=-1).square_().div_(heads * width).add_(eps).rsqrt_()
        logits = torch.matmul(queries.transpose(0, 1), by_head.mT).view(heads, reads, count, tokens).mul_(inverse_rms)
        ctx.scalars = count, complete, gain
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, bias, prior, logits, inverse_rms, *sources)
        if bias is not None:
            logits = logits + bias.unsqueeze(-1)
        weights, _, sums, maxima, *initial = weigh(logits, prior, complete, gain)
        partial = reads > complete
        left = weights
        if initial and partial:
            left = torch.cat([weights, initial[0].unsqueeze(1)], 1)
        mixes = torch.bmm(token_major(left), stack.view(count, -1, width).transpose(0, 1))
        mixes = mixes.view(tokens, heads, left.shape[1], width).permute(2, 0, 1, 3)

        def of_tokens(statistic: Tensor) -> Tensor:
            return statistic.T.view(*shape[:-1], heads)

        # contiguous: a view that is kept by what reads it would keep the mixes of the whole phase
        if base is None:
            finished = [mix.contiguous().view(shape) for mix in mixes[:complete]]
        else:
            finished = [(base + mix.reshape(shape)).to(base.dtype) for mix in mixes[:complete]]
        numerators = [mix.reshape(shape) for mix in mixes[complete:reads]]
        constants = [of_tokens(c) for c in maxima[:, complete:].unbind(1)]
        totals = []
        if initial and partial:
            totals = [mixes[reads].contiguous().view(shape)]
            constants += [of_tokens(initial[1]), of_tokens(initial[2])]
        constants.append(logits.permute(1, 2, 3, 0).view(reads, count, *shape[:-1], heads))
        ctx.mark_non_differentiable(*constants)
        return *finished, *numerators, *(of_tokens(z) for z in sums[:, complete:].unbind(1)), *totals, *constants

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count, complete, gain = ctx.scalars
        queries, bias, prior, normalised, inverse_rms, *sources = ctx.saved_tensors
        reads, heads, width = queries.shape
        values, keys = sources[:count], sources[count:]
        dtype, shape = queries.dtype, values[0].shape
        partial = reads - complete
        logits = normalised if bias is None else normalised + bias.unsqueeze(-1)
        weights, exponentials, _, _, *initial = weigh(logits, prior, complete, gain)
        mix_gradients = list(gradients[:reads])
        base_gradient = None
        if ctx.needs_input_grad[7]:
            given = [gradient for gradient in mix_gradients[:complete] if gradient is not None]
            base_gradient = sum(given[1:], given[0]) if given else None
        sum_gradients = gradients[reads : reads + partial]
        if initial and partial:
            mix_gradients.append(gradients[reads + partial])
            weights = torch.cat([weights, initial[0].unsqueeze(1)], 1)
        zeros = torch.zeros((), dtype=dtype).expand(shape)
        right = stacked([zeros if gradient is None else gradient for gradient in mix_gradients], dtype)
        right = right.view(len(mix_gradients), -1, width).transpose(0, 1).contiguous()  # [n·H, M, d]
        tokens = right.shape[0] // heads

        stack = stacked(values, dtype)
        by_weight = torch.bmm(right[:, :reads].contiguous(), stack.view(count, -1, width).permute(1, 2, 0))
        by_weight = by_weight.view(tokens, heads, reads, count).permute(1, 2, 3, 0)  # [H, M, S, n]
        if gain != 1 and complete:
            by_weight = torch.cat([by_weight[:, :complete] * gain, by_weight[:, complete:]], 1)
        centre = torch.zeros(heads, reads, 1, tokens, dtype=dtype)
        if complete:
            centre[:, :complete] = -(exponentials[:, :complete] * by_weight[:, :complete]).sum(2, keepdim=True)
        for m, gradient in enumerate(sum_gradients, complete):
            if gradient is not None:
                centre[:, m, 0] = gradient.reshape(tokens, heads).T
        by_logit = (by_weight + centre).mul_(exponentials)
        along_query = by_logit * inverse_rms  # [H, M, S, n]
        pull = along_query.mul(normalised).sum((0, 1)).mul_(inverse_rms).div_(heads * width)  # [S, n]

        key_stack = stacked(keys, dtype) if keys else stack
        flat = along_query.flatten(2)  # [H, M, S·n]
        by_head = key_stack.view(-1, heads, width).transpose(0, 1)  # [H, S·n, d]
        query_gradient = torch.matmul(flat, by_head).transpose(0, 1) if ctx.needs_input_grad[4] else None
        bias_gradient = by_logit.sum((0, 3)) if ctx.needs_input_grad[5] else None

        key_gradients = torch.empty_like(key_stack)
        out = key_gradients.view(-1, heads, width).transpose(0, 1)
        torch.matmul(flat.mT, queries.transpose(0, 1), out=out)
        key_gradients.addcmul_(pull.unsqueeze(-1), key_stack, value=-1)
        value_gradients = torch.empty_like(stack) if keys else key_gradients
        out = value_gradients.view(count, -1, width).transpose(0, 1)  # [n·H, S, d]
        torch.baddbmm(out, token_major(weights).mT, right, beta=0 if keys else 1, out=out)

        results = [*value_gradients, *(key_gradients if keys else ())]
        results = [
            gradient.view(shape).to(source.dtype) if wanted else None
            for gradient, source, wanted in zip(results, sources, ctx.needs_input_grad[8:])
        ]
        return None, None, None, None, query_gradient, bias_gradient, None, base_gradient, *results


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
    """M queries over S sources, as `two_phases` defines it.

    Args:
        inputs: one or more independent phases.
        complete: how many of the M reads, the first ones, have no other sources.
        prior_bias: b⁰ [S]; None: zeros. Used only where anchored.
        gain: of complete reads.
        eps: inside the root.
        num_heads: H.
        anchored: mix with p − p⁰.
    """
    return [
        _phase(one, complete, prior_bias if anchored else None, gain, eps, num_heads, anchored) for one in inputs
    ]


def _phase(
    one: PhaseInput, complete: int, prior_bias: Tensor | None, gain: float, eps: float, heads: int, anchored: bool
) -> PhaseOutput:
    reads, count = one.queries.shape[0], len(one.values)
    partial = reads - complete
    if anchored and prior_bias is None:
        prior_bias = torch.zeros(count, dtype=one.queries.dtype)
    if not partial and of_few_tokens(one.values[0]):
        with torch.autocast(one.queries.device.type, enabled=False):
            return read_few(one, prior_bias, gain, eps, heads)
    queries = one.queries.unflatten(-1, (heads, -1))
    with torch.autocast(one.queries.device.type, enabled=False):
        outputs = PhaseFunction.apply(
            count, complete, gain, eps, queries, one.bias, prior_bias, one.base, *one.values, *(one.keys or ())
        )
    outputs = list(outputs)

    def take(number: int) -> list[Tensor]:
        taken = outputs[:number]
        del outputs[:number]
        return taken

    finished, numerators, sums = take(complete), take(partial), take(partial)
    totals = take(1 if anchored and partial else 0)
    maxima = take(partial)
    prior = Prior(totals[0], *take(2)) if totals else None
    parts = [Part(*of_read, prior) for of_read in zip(numerators, sums, maxima)]
    return PhaseOutput(finished, parts, outputs[0])
