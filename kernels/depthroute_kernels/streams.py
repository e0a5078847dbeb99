# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What two streams (DAR, arXiv 2607.18730) do beside their depth reads, element by element, in as few passes over memory and
with as little kept as the equations allow. Out of torch's own operations, for every device.

    combine          x  = α x^0 + (1 − α) x^1                                  plain
                     x  = h + (α − ½) (Σ^0 − Σ^1) + n (α m^0 + (1 − α) m^1)    anchored
    write_streams    P' = [[ρ, 1−ρ], [1−ρ, ρ]] P + (β^0, β^1) u                ρ = σ(r), β^j = 2 σ(c_j)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .backward import first_derivative_only


def along(first: Tensor, second: Tensor, gate: Tensor) -> Tensor:
    """Σ first · second over the width, and over tokens too where the gate is [1] and not [B, T, 1]."""
    second = second.to(first.dtype)
    if gate.dim() == 1:
        return torch.dot(first.flatten(), second.flatten()).view(1)
    return (first * second).sum(-1, keepdim=True)


class Combine(torch.autograd.Function):
    """Arguments: n, how many of the last tensors are subtracted, α, x^0, x^1, h or None (plain), then tensors whose sum, the
    last ones subtracted, is Σ^0 − Σ^1."""

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        minus: int,
        alpha: Tensor,
        first: Tensor,
        second: Tensor,
        stream: Tensor | None,
        *terms: Tensor,
    ) -> Tensor:
        ctx.count, ctx.plus, ctx.dtype = count, len(terms) - minus, None if stream is None else stream.dtype
        ctx.save_for_backward(alpha, first, second, *terms)
        mixed = torch.lerp(second, first, alpha)
        if stream is None:
            return mixed
        gap = terms[0].to(mixed.dtype)
        for index, term in enumerate(terms[1:], 1):
            gap = gap + term if index < ctx.plus else gap - term
        # the stream last: at the start all before it is exactly zero
        return stream + torch.addcmul(count * mixed, alpha - 0.5, gap)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        alpha, first, second, *terms = ctx.saved_tensors
        count = ctx.count if terms else 1
        alpha_gradient = along(gradient, first, alpha) - along(gradient, second, alpha)
        term_gradients: list[Tensor | None] = []
        if terms:
            alpha_gradient *= count
            for index, term in enumerate(terms):
                product = along(gradient, term, alpha)
                alpha_gradient += product if index < ctx.plus else -product
            positive = gradient * (alpha - 0.5)
            for index, term in enumerate(terms):
                term_gradients.append((positive if index < ctx.plus else -positive).to(term.dtype))
        first_gradient = gradient * (count * alpha)
        second_gradient = torch.sub(gradient, first_gradient) if count == 1 else gradient * (count * (1 - alpha))
        stream_gradient = gradient.to(ctx.dtype) if terms else None
        return None, None, alpha_gradient, first_gradient, second_gradient, stream_gradient, *term_gradients


class WriteStreams(torch.autograd.Function):
    """Arguments: the gates' logits a, r, c_0, c_1, [4] or [B, T, 4], u, and P^0, P^1 or two Nones (zero, at a block's start).
    Outputs P'^0, P'^1 in the dtype of u.

    u is not kept: β^j u, which is what the gradient of c_j needs, is what P'^j has gained.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, update: Tensor, first: Tensor | None, second: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        opened = torch.sigmoid(gates)
        _, rho, half_0, half_1 = opened.split(1, -1)
        if first is None or second is None:
            one, other = update * (2 * half_0), update * (2 * half_1)
        else:
            first, second = first.to(gates.dtype), second.to(gates.dtype)
            one = torch.lerp(second, first, rho).addcmul_(half_0, update, value=2)
            other = torch.lerp(first, second, rho).addcmul_(half_1, update, value=2)
        one, other = one.to(update.dtype), other.to(update.dtype)
        # what a sum rounded to 16 bits has gained is mostly rounding
        ctx.keeps_update = update.dtype != gates.dtype
        ctx.save_for_backward(opened, first, second, *((update,) if ctx.keeps_update else (one, other)))
        return one, other

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, gradient_0: Tensor, gradient_1: Tensor) -> tuple[Tensor | None, ...]:
        opened, first, second, *kept = ctx.saved_tensors
        _, rho, half_0, half_1 = opened.split(1, -1)
        dtype = opened.dtype
        gradients = gradient_0.to(dtype), gradient_1.to(dtype)
        by_rho = torch.zeros_like(rho)
        first_gradient = second_gradient = None
        # Σ g^j · β^j u
        if ctx.keeps_update:
            gained = [2 * half * along(gradient, kept[0], rho) for gradient, half in zip(gradients, (half_0, half_1))]
        else:
            gained = [along(gradient, tensor, rho) for gradient, tensor in zip(gradients, kept)]
        if first is not None:
            on_first, on_second = (
                [along(gradient, tensor, rho) for gradient in gradients] for tensor in (first, second)
            )
            if not ctx.keeps_update:
                gained[0] -= rho * on_first[0] + (1 - rho) * on_second[0]
                gained[1] -= (1 - rho) * on_first[1] + rho * on_second[1]
            by_rho = on_first[0] - on_second[0] + on_second[1] - on_first[1]
            first_gradient = torch.lerp(gradients[1], gradients[0], rho).to(gradient_0.dtype)
            second_gradient = torch.lerp(gradients[0], gradients[1], rho).to(gradient_0.dtype)
        # Σ g^j · u dβ^j/dc_j = Σ g^j · β^j u (1 − σ(c_j))
        by_gate = [torch.zeros_like(rho), rho * by_rho, *gained]
        gate_gradient = torch.cat(by_gate, -1) * (1 - opened)
        update_gradient = (gradients[0] * (2 * half_0)).addcmul_(gradients[1], half_1, value=2).to(gradient_0.dtype)
        return gate_gradient, update_gradient, first_gradient, second_gradient


def combine(
    alpha: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    stream: Tensor | None = None,
    count: int = 1,
    plus: Sequence[Tensor] = (),
    minus: Sequence[Tensor] = (),
) -> Tensor:
    """x [B, T, D], in the dtype of the mixes.

    Args:
        alpha: α, [1] or [B, T, 1].
        first, second: x^0 and x^1 (anchored: m^0 and m^1), [B, T, D], float32 (float64).
        stream: h, where anchored.
        count: n, where anchored.
        plus, minus: where anchored, at least one tensor in `plus`; their difference is Σ^0 − Σ^1.
    """
    return Combine.apply(count, len(minus), alpha, first, second, stream, *plus, *minus)


def write_streams(gates: Tensor, update: Tensor, partial: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """P'^0, P'^1 [B, T, D], in the dtype of u.

    Args:
        gates: a, r, c_0, c_1: [4] or [B, T, 4], float32 (float64).
        update: u [B, T, D].
        partial: P^0, P^1 [B, T, D]; none at a block's start.
    """
    return WriteStreams.apply(gates, update, *(partial or (None, None)))
