# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The two phases on a CPU, out of torch's own operations.

phase.py      every query of a group at once: one stack that lives as long as the call, and batched products with it
few_tokens.py the same for some tokens without gradients, as in decoding: the fewest calls
merge.py      one read's private sources, source by source
"""

import torch

from ..streams import combine, write_streams
from .few_tokens import of_few_tokens
from .merge import merge
from .phase import phase


def unavailable(device: torch.device, dtype: torch.dtype | None = None, compiling: bool = False) -> str | None:
    """Why this cannot run on a device, in words; None where it can."""
    if device.type != "cpu":
        return f"device: got {device.type}, allowed by the CPU depth reads: cpu"
    return "torch.compile: it fuses the reference" if compiling else None


def phases_pay(stream: torch.Tensor) -> bool:
    """Whether one phase for several reads and a merge for each cost less than a read after the other."""
    return not of_few_tokens(stream)


__all__ = ["combine", "merge", "phase", "phases_pay", "unavailable", "write_streams"]
