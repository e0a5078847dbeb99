# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Phase on a CPU: M queries over S sources by batched products.

Inside, n stands for all tokens (B·T), d for D/H. Sources are stacked [S, n, D] for the length of a call, in the forward and
again in the backward pass; what is kept between is references to them, logits [H, M, S, n] and 1/RMS [S, n].
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthroute.modeling.depth_backend import Part, PhaseInput, PhaseOutput, Prior

from ..backward import first_derivative_only


PRODUCT_ELEMENTS = 2**17
"""Of one product in the backward pass: half a megabyte in float32, which second-level caches hold."""


def stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[S, n, D] in `dtype`, contiguous."""
    if tensors[0].dtype == dtype:
        return torch.stack(tuple(tensors)).view(len(tensors), -1, tensors[0].shape[-1])
    stack = tensors[0].new_empty((len(tensors), *tensors[0].shape), dtype=dtype)
    for row, tensor in zip(stack, tensors):
        row.copy_(tensor)
    return stack.view(len(tensors), -1, tensors[0].shape[-1])


def weigh(logits: Tensor, prior: Tensor | None, complete: int, gain: float) -> tuple[Tensor, ...]:
    """What sources are mixed with: w [H, M, S, n] as in `depth_backend`, e [H, M, S, n] (of complete reads p), Z and c
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
        weights, initial = exponentials, []
    else:
        # of the whole shape and layout: only then is p − p⁰ exactly zero at the start
        initial_exponentials, initial_sums, initial_maxima = softmax(torch.zeros_like(logits) + prior.view(-1, 1))
        weights = exponentials - initial_exponentials
        initial = [initial_exponentials[:, -1], initial_sums[:, -1], initial_maxima[:, -1]]
    if complete and gain != 1:
        weights = torch.cat([weights[:, :complete] * gain, weights[:, complete:]], 1)
    return weights, exponentials, sums, maxima, *initial


def token_major(weights: Tensor) -> Tensor:
    """[H, M, S, n] → [n·H, M, S], contiguous: a batched product with any other left side is many times slower."""
    return weights.permute(3, 0, 1, 2).flatten(0, 1).contiguous()


class Layout(NamedTuple):
    """What a phase's tensors are.

    Attributes:
        routes: for each input, which list of sources has its keys and which its values.
        size: S, the length of each list.
        complete: complete reads of each input.
        gain: of those.
    """

    routes: tuple[tuple[int, int], ...]
    size: int
    complete: int
    gain: float


class PhaseFunction(torch.autograd.Function):
    """Arguments: the layout, eps, b⁰ [S] or None (plain), then by input queries [M, H, d], b [M, S] or None and a base or None,
    then the lists' sources [..., D] in turn.

    Outputs, by input: complete reads, numerators, sums Z [..., H] of the partial ones, U (where anchored and any is partial),
    then constants: c of the partial reads, Z⁰ and c⁰ (like U), logits [M, S, ..., H].
    """

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, eps: float, prior: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        inputs = 3 * len(layout.routes)
        sources: Any = tensors[inputs:]
        count, complete = layout.size, layout.complete
        queries: Any = tensors[0:inputs:3]
        reads, heads, width = queries[0].shape
        shape, dtype, partial = sources[0].shape, queries[0].dtype, reads - complete
        stacks = [stacked(sources[start : start + count], dtype) for start in range(0, len(sources), count)]
        tokens = stacks[0].shape[1]

        def of_tokens(statistic: Tensor) -> Tensor:
            return statistic.T.view(*shape[:-1], heads)

        inverse_rms: list[Tensor | None] = [None] * len(stacks)
        normalised, outputs, constants = [], [], []
        for index, (key, value) in enumerate(layout.routes):
            bias, base = tensors[3 * index + 1 : 3 * index + 3]
            by_rms = inverse_rms[key]
            if by_rms is None:
                by_rms = torch.linalg.vector_norm(stacks[key], dim=-1).square_().div_(heads * width).add_(eps).rsqrt_()
                inverse_rms[key] = by_rms
            by_head = stacks[key].view(-1, heads, width).transpose(0, 1)
            logits = torch.matmul(queries[index].transpose(0, 1), by_head.mT).view(heads, reads, count, tokens)
            logits = logits.mul_(by_rms)
            normalised.append(logits)
            if bias is not None:
                logits = logits + bias.unsqueeze(-1)
            left, _, sums, maxima, *initial = weigh(logits, prior, complete, layout.gain)
            if initial and partial:
                left = torch.cat([left, initial[0].unsqueeze(1)], 1)
            mixes = torch.bmm(token_major(left), stacks[value].view(count, -1, width).transpose(0, 1))
            mixes = mixes.view(tokens, heads, left.shape[1], width).permute(2, 0, 1, 3)

            # contiguous: a view that is kept by what reads it would keep the mixes of the whole phase
            if base is None:
                outputs += [mix.contiguous().view(shape) for mix in mixes[:complete]]
            else:
                outputs += [(base + mix.reshape(shape)).to(sources[value * count].dtype) for mix in mixes[:complete]]
            outputs += [mix.reshape(shape) for mix in mixes[complete:reads]]
            outputs += [of_tokens(z) for z in sums[:, complete:].unbind(1)]
            if initial and partial:
                outputs.append(mixes[reads].contiguous().view(shape))
            here = [of_tokens(c) for c in maxima[:, complete:].unbind(1)]
            if initial and partial:
                here += [of_tokens(initial[1]), of_tokens(initial[2])]
            here.append(logits.permute(1, 2, 3, 0).view(reads, count, *shape[:-1], heads))
            outputs += here
            constants += here
        ctx.layout, ctx.lists = layout, len(stacks)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        # a base is not needed again: keeping it would keep it alive
        arguments = [None if index % 3 == 2 else tensor for index, tensor in enumerate(tensors[:inputs])]
        ctx.save_for_backward(prior, *arguments, *normalised, *inverse_rms, *sources)
        return tuple(outputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        layout: Layout = ctx.layout
        count, complete, gain = layout.size, layout.complete, layout.gain
        number = len(layout.routes)
        prior, *saved = ctx.saved_tensors
        arguments, normalised = saved[: 3 * number], saved[3 * number : 4 * number]
        inverse_rms, sources = saved[4 * number : 4 * number + ctx.lists], saved[4 * number + ctx.lists :]
        reads, heads, width = arguments[0].shape
        dtype, shape, partial = arguments[0].dtype, sources[0].shape, reads - complete
        per_input = len(gradients) // number
        has_total = prior is not None and partial > 0
        stacks = [stacked(sources[start : start + count], dtype) for start in range(0, len(sources), count)]
        tokens = stacks[0].shape[1]
        zeros = stacks[0].new_zeros(()).expand(shape)

        results: list[Tensor | None] = []
        source_gradients = [torch.empty_like(stack) for stack in stacks]
        started = [False] * len(stacks)
        pulls: list[Tensor | None] = [None] * len(stacks)
        for index, (key, value) in enumerate(layout.routes):
            queries, bias, _ = arguments[3 * index : 3 * index + 3]
            given = gradients[index * per_input : (index + 1) * per_input]
            logits = normalised[index] if bias is None else normalised[index] + bias.unsqueeze(-1)
            weights, exponentials, _, _, *initial = weigh(logits, prior, complete, gain)
            mix_gradients = list(given[:reads])
            if has_total:
                mix_gradients.append(given[reads + partial])
                weights = torch.cat([weights, initial[0].unsqueeze(1)], 1)
            right = stacked([zeros if gradient is None else gradient for gradient in mix_gradients], dtype)
            right = right.view(len(mix_gradients), -1, width).transpose(0, 1)  # [n·H, M, d]

            by_weight = torch.bmm(right[:, :reads], stacks[value].view(count, -1, width).permute(1, 2, 0))
            by_logit = by_weight.view(tokens, heads, reads, count).permute(1, 2, 3, 0).contiguous()  # [H, M, S, n]
            if complete:
                of_complete, by_complete = exponentials[:, :complete], by_logit[:, :complete]
                if gain != 1:
                    by_complete *= gain
                by_complete -= (of_complete * by_complete).sum(2, keepdim=True)
            for m, gradient in enumerate(given[reads : reads + partial], complete):
                if gradient is not None:
                    by_logit[:, m] += gradient.reshape(tokens, heads).T.unsqueeze(1)
            by_logit *= exponentials
            along_query = by_logit * inverse_rms[key]  # [H, M, S, n]
            pull = along_query.mul(normalised[index]).sum((0, 1)).mul_(inverse_rms[key]).div_(heads * width)  # [S, n]
            pulls[key] = pull if pulls[key] is None else pulls[key] + pull

            flat = along_query.flatten(2)  # [H, M, S·n]
            by_head = stacks[key].view(-1, heads, width).transpose(0, 1)  # [H, S·n, d]
            wanted = ctx.needs_input_grad[3 + 3 * index : 6 + 3 * index]
            results.append(torch.matmul(flat, by_head).transpose(0, 1) if wanted[0] else None)
            results.append(by_logit.sum((0, 3)) if wanted[1] else None)
            ends = [gradient for gradient in given[:complete] if gradient is not None]
            results.append(sum(ends[1:], ends[0]) if wanted[2] and ends else None)

            # contiguous on the left: a batched product is several times slower without
            left = weights.permute(3, 0, 2, 1).flatten(0, 1).contiguous()  # [n·H, S, M]
            out = source_gradients[key].view(-1, heads, width).transpose(0, 1)
            if started[key]:
                out.baddbmm_(flat.mT, queries.transpose(0, 1))
            else:
                torch.matmul(flat.mT, queries.transpose(0, 1), out=out)
            if not started[value] and value != key:
                source_gradients[value].zero_()
            started[key] = started[value] = True
            out = source_gradients[value].view(count, -1, width).transpose(0, 1)  # [n·H, S, d]
            # some tokens at a time, so that a product is added while it is in the cache; into its place at once is slower
            step = max(32, PRODUCT_ELEMENTS // (count * width))
            for first in range(0, len(left), step):
                here = slice(first, first + step)
                out[here] += torch.bmm(left[here], right[here])
        for gradient, pull, stack in zip(source_gradients, pulls, stacks):
            if pull is not None:
                gradient.addcmul_(pull.unsqueeze(-1), stack, value=-1)
        rows = (row for gradient in source_gradients for row in gradient.unbind(0))
        wanted = ctx.needs_input_grad[3 + 3 * number :]
        results += [
            row.view(shape).to(source.dtype) if want else None for row, source, want in zip(rows, sources, wanted)
        ]
        return None, None, None, *results


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
    """M queries over S sources, as `depth_backend` defines it.

    Args:
        inputs: one or more independent phases.
        complete: how many of the M reads, the first ones, have no other sources.
        prior_bias: b⁰ [S]; None: zeros. Used only where anchored.
        gain: of complete reads.
        eps: inside the root.
        num_heads: H.
        anchored: mix with p − p⁰.
    """
    prior = prior_bias if anchored else None
    if anchored and prior_bias is None:
        prior = inputs[0].queries.new_zeros(len(inputs[0].values))
    partial = inputs[0].queries.shape[0] - complete
    lists: dict[tuple[int, ...], Sequence[Tensor]] = {}  # what is in two inputs is stacked once
    routes = []
    for one in inputs:
        route = []
        for tensors in (one.values if one.keys is None else one.keys, one.values):
            name = tuple(map(id, tensors))
            lists.setdefault(name, tensors)
            route.append(list(lists).index(name))
        routes.append((route[0], route[1]))
    layout = Layout(tuple(routes), len(inputs[0].values), complete, gain)
    arguments = [
        argument for one in inputs for argument in (one.queries.unflatten(-1, (num_heads, -1)), one.bias, one.base)
    ]
    sources = [tensor for tensors in lists.values() for tensor in tensors]
    with torch.autocast(sources[0].device.type, enabled=False):
        outputs = iter(PhaseFunction.apply(layout, eps, prior, *arguments, *sources))
    results = []
    for _ in inputs:
        finished, numerators, sums = (list(islice(outputs, size)) for size in (complete, partial, partial))
        total = next(outputs) if anchored and partial else None
        maxima = list(islice(outputs, partial))
        initial = None if total is None else Prior(total, next(outputs), next(outputs))
        parts = [Part(*of_read, initial) for of_read in zip(numerators, sums, maxima)]
        results.append(PhaseOutput(finished, parts, next(outputs)))
    return results
