# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The two phases on a CPU, out of torch's own operations.

phase.py      every query of a group at once: one stack that lives as long as the call, and batched products with it
merge.py      one read's private sources, source by source
inference.py  reads without gradients: every source is looked at once
"""

import torch

from ..streams import combine, write_streams
from .inference import InferenceReads, of_inference
from .merge import merge
from .phase import phase


def unavailable(device: torch.device, dtype: torch.dtype | None = None, compiling: bool = False) -> str | None:
    """Why this cannot run on a device, in words; None where it can."""
    if device.type != "cpu":
        return f"device: got {device.type}, allowed by the CPU depth reads: cpu"
    return "torch.compile: it fuses the reference" if compiling else None


__all__ = ["InferenceReads", "combine", "merge", "of_inference", "phase", "unavailable", "write_streams"]
