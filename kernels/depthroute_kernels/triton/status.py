# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Whether the kernels can run here. Imports Triton only to ask."""

import importlib.util
import os
from functools import cache

import torch


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def interpreted() -> bool:
    """Whether Triton was told to run kernels in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


@cache
def _without_driver() -> str | None:
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def unavailable(device: torch.device, dtype: torch.dtype | None = None, compiling: bool = False) -> str | None:
    """One line that says why the kernels cannot run on a device (and with sources of a dtype), or None where they can."""
    try:
        found = importlib.util.find_spec("triton") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        return "triton: the package is not installed, needed by the Triton depth reads (pip install triton)"
    if dtype is not None and dtype not in DTYPES:
        names = ", ".join(str(one).removeprefix("torch.") for one in DTYPES)
        return f"dtype: got {str(dtype).removeprefix('torch.')} sources, allowed by the Triton depth reads: {names}"
    if interpreted():
        # the kernels follow addresses, which the interpreter does on the CPU
        return None if device.type == "cpu" else f"device: got {device.type}, allowed with TRITON_INTERPRET=1: cpu"
    if device.type == "cpu":
        return "device: got cpu, allowed by the Triton depth reads: cuda, or cpu with TRITON_INTERPRET=1 set before the start"
    if device.type == "cuda":
        reason = _without_driver()
        return None if reason is None else f"triton: found no driver for {device} ({reason})"
    return f"device: got {device.type}, allowed by the Triton depth reads: cuda (NVIDIA and AMD GPUs)"
