# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Where a measurement was made: device, driver, versions; nothing that tells whose machine it is."""

import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

import depthroute
from depthroute.errors import Refused


DEVICES = ("cpu", "cuda")


def check_device(device: str) -> str:
    """`device`, if it is there.

    Raises:
        Refused: another kind of device, a GPU that is not there, or a number that no GPU has.
    """
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise Refused(f"device: got {device!r}, allowed: cpu, cuda or cuda:N")
    if device == "cpu":
        return device
    if not torch.cuda.is_available():
        raise Refused(f"device: got {device!r}, allowed: 'cpu' here, as torch {torch.__version__} finds no GPU")
    count = torch.cuda.device_count()
    if (torch.device(device).index or 0) >= count:
        raise Refused(f"device: got {device!r}, allowed: cuda:0 to cuda:{count - 1} here")
    return device


def installed(package: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Processor or GPU, cores and versions."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "depthroute": depthroute.__version__,
        **({} if torch.device(device).type == "cpu" else describe_gpu(device)),
    }


def describe_gpu(device: str) -> dict[str, Any]:
    """Name, memory, architecture, driver and the toolkit that torch was built with."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_architecture": getattr(properties, "gcnArchName", None) if torch.version.hip else _capability(device),
        "driver": driver_version(),
        "toolkit": torch.version.hip or torch.version.cuda,
        "triton": installed("triton") or installed("pytorch-triton-rocm"),
    }


def _capability(device: str) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def driver_version() -> str | None:
    """Of the NVIDIA driver as its own tool names it, or of the kernel's AMD module; None where neither tells."""
    module = Path("/sys/module/amdgpu/version")
    if torch.version.hip:
        return module.read_text(encoding="utf-8").strip() if module.is_file() else None
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.splitlines()[0].strip() if found.returncode == 0 and found.stdout.strip() else None
