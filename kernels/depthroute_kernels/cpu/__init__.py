# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The two phases on a CPU, out of torch's own operations.

phase.py      every query of a group at once: one stack that lives as long as the call, and batched products with it
merge.py      one read's private sources, source by source
few_tokens.py the reads of some tokens without gradients, as in decoding: the fewest calls
"""

import torch

from ..streams import combine, write_streams
from .few_tokens import FewTokens, of_few_tokens
from .merge import merge
from .phase import phase


def unavailable(device: torch.device, dtype: torch.dtype | None = None, compiling: bool = False) -> str | None:
    """Why this cannot run on a device, in words; None where it can."""
    if device.type != "cpu":
        return f"device: got {device.type}, allowed by the CPU depth reads: cpu"
    return "torch.compile: it fuses the reference" if compiling else None


__all__ = ["FewTokens", "combine", "merge", "of_few_tokens", "phase", "unavailable", "write_streams"]
