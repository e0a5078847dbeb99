# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Whether parameters of a low precision can move at a learning rate at all."""

import torch
from torch import nn


def stuck_fraction(model: nn.Module, learning_rate: float) -> float:
    """The fraction of the trainable parameters that a step of `learning_rate` up and down leaves as they are, because it is
    rounded away. AdamW's steps are about that size. bfloat16 has 8 significant bits: a weight w stays where it is at rates
    below about |w| / 512."""
    stuck, total = 0, 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            values = parameter.detach()
            step = torch.tensor(learning_rate, dtype=torch.float32, device=values.device)
            up, down = ((values.float() + sign * step).to(values.dtype) for sign in (1, -1))
            stuck += int(((up == values) & (down == values)).sum())
            total += values.numel()
    return stuck / total if total else 0.0


def low_precision_warning(model: nn.Module, learning_rate: float) -> str | None:
    """One line where trainable parameters are of 16 bits, else None."""
    narrow = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad and parameter.itemsize < 4}
    if not narrow:
        return None
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
    fraction = stuck_fraction(model, learning_rate)
    return (
        f"dtype: trainable parameters are {names}: a step of learning_rate = {learning_rate:g} is rounded away for "
        f"{fraction:.0%} of them, which will not move; load the model in float32 (and use bf16=True for autocast)"
    )
