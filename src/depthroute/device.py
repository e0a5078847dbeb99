# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Where a model runs."""

import torch

from .errors import Refused


def check_device(device: str | None) -> str:
    """A device of this machine; None: the first GPU, otherwise the CPU.

    Raises:
        Refused: torch does not know it, or this machine does not have it.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Refused(f"device: got {device!r}, allowed: a device of this machine, such as cpu or cuda:0") from error
    return device
