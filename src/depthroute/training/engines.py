# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The engines that train on several devices: ready-made configurations (accelerate's as YAML, DeepSpeed's as JSON), and which
one a run has."""

import os
from pathlib import Path

import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainingArguments

from ..errors import Refused
from ..modeling.configuration_depthroute import nearest_names


ENGINE_FOLDER = Path(__file__).parent / "engines"


def engine_files() -> dict[str, Path]:
    """The packaged configurations by name: `ddp`, `fsdp2` (for `accelerate launch --config_file`), `zero3` and
    `zero3-offload` (for `--deepspeed`)."""
    return {file.stem: file for file in sorted(ENGINE_FOLDER.iterdir()) if file.suffix in (".yaml", ".json")}


def engine_file(name: str) -> Path:
    """The file of one configuration.

    Raises:
        Refused: an unknown name, with the nearest ones.
    """
    files = engine_files()
    if name not in files:
        raise Refused(f"print_engine: got {name!r}, allowed: {', '.join(files)}; nearest: {nearest_names(name, files)}")
    return files[name]


def engine_of(training: TrainingArguments) -> str:
    """The engine of a run, as `memory.ENGINES` has it. The arguments say so, or `accelerate launch`, by environment variables.
    DeepSpeed without ZeRO is plain data parallelism."""
    if (training.deepspeed or _launched_with("ACCELERATE_USE_DEEPSPEED")) and (stage := _zero_stage(training)) > 0:
        return f"zero{stage}"
    if training.fsdp or _launched_with("ACCELERATE_USE_FSDP"):
        return "fsdp"
    return "ddp" if training.world_size > 1 else "single"


def low_precision_of(training: TrainingArguments) -> torch.dtype | None:
    """The dtype of 16 bits in which a run's products are computed, told likewise; None where they are in that of the weights."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    name = "bf16" if training.bf16 else "fp16" if training.fp16 else launched
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)


def _zero_stage(training: TrainingArguments) -> int:
    """DeepSpeed's stage: its configuration's, which is a file, its text or a dict, or what `accelerate launch` was told without
    one."""
    configuration = training.deepspeed or os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if configuration:
        return int(HfDeepSpeedConfig(configuration).get_value("zero_optimization.stage", 0))
    return int(os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))


def _launched_with(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes", "on", "y", "t")
