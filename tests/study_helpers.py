# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The studies of the package, made so small that a test can run them: their arms and groups, two steps, tiny models."""

from pathlib import Path
from typing import Any

import yaml

from depthroute.studies.definition import DEFINITIONS


TINY_TEXT = {"documents": 2, "characters": 400, "validation_documents": 2, "validation_characters": 200}
TINY_MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
}


def small_study(name: str, folder: Path, seeds: list[int], **options: Any) -> Path:
    """A file with the study `name` of the package whose size `cpu` takes two steps of models of four layers and width 16, or of
    the checkpoint that is given as its base."""
    study = yaml.safe_load((DEFINITIONS / f"{name}.yaml").read_text(encoding="utf-8"))
    size = study["sizes"]["cpu"]
    size["seeds"], size["text"], size["diagnosed_tokens"] = seeds, TINY_TEXT, 64
    for arm in study["arms"].values():
        arm.pop("seeds", None)
    own = {"block_size": 32, "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, **options}
    if "eval_steps" in options or size.get("settings") is not None:
        own.setdefault("eval_steps", 1)
    size["options"] = {**size.get("options", {}), **own}
    if size["options"].get("model") is None:
        size["options"]["from_scratch"] = TINY_MODEL
    for index, group in enumerate(size.get("groups", {}).values()):
        if "from_scratch" in group:
            group["from_scratch"] = {"num_hidden_layers": 4 + 2 * index}
        if "max_steps" in group:
            group |= {"max_steps": 2 + index, "eval_steps": 1}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(study, allow_unicode=True, sort_keys=False), encoding="utf-8")
    return file
