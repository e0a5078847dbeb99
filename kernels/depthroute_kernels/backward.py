# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not differentiable themselves, and say so."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


NOT_TWICE = (
    "depth_backend: got a second derivative of a fast depth read, allowed: first derivatives; the reference has both, set "
    'depth_backend="reference"'
)


class NotTwice(torch.autograd.Function):
    """The first `count` tensors as they are. Their gradient is refused, on the way to whatever the others depend on."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if tensor is None else tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(NOT_TWICE)


class Once:
    """A context whose saved tensors are asked for once only: checkpointing allows no more."""

    def __init__(self, ctx: Any):
        self._ctx = ctx
        self.saved_tensors: tuple[Tensor | None, ...] = ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def first_derivative_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Run an autograd.Function's `backward` outside autograd and outside autocast."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        device = next((gradient.device for gradient in gradients if gradient is not None), None)
        if device is None:  # what reads the outputs has none to give
            return (None,) * len(ctx.needs_input_grad)
        twice = torch.is_grad_enabled()
        ctx = Once(ctx) if twice else ctx
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            results = backward(ctx, *gradients)
        if not twice:
            return results
        # with what the gradient depends on: torch.autograd.grad passes by what does not lead to its inputs
        return NotTwice.apply(len(results), *results, *ctx.saved_tensors, *gradients)

    return run
