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
    """Gradients as they are; their own gradient is refused."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(NOT_TWICE)


def first_derivative_only(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Run an autograd.Function's `backward` outside autograd and outside autocast."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        device = next((gradient.device for gradient in gradients if gradient is not None), None)
        if device is None:  # what reads the outputs has none to give
            return (None,) * len(ctx.needs_input_grad)
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            results = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return results
        return NotTwice.apply(torch.ones((), device=device, requires_grad=True), *results)

    return run
