# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The two phases on a CPU, out of torch's own operations.

phase.py      every query of a group at once: one stack that lives as long as the call, and batched products with it
merge.py      one read's private sources, source by source
backward.py   what both say where a gradient is differentiated again
"""

import torch

from .merge import merge
from .phase import phase


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this cannot run on tensors of `device` and `dtype`, in words; None where it can."""
    if device.type != "cpu":
        return f"the cpu implementation cannot run on {device.type}"
    if torch.compiler.is_compiling():
        return "torch.compile fuses the reference"
    return None


__all__ = ["merge", "phase", "unavailable"]
