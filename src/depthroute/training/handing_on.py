# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a trained folder takes over from the model it started from, beside the weights."""

import shutil
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from depthroute_conversion.side_files import GENERATION, LEGAL_PATTERNS, legal_files

from ..files import download


HANDED_ON = ("depthroute_conversion.json", "depthroute_source.json")
"""Where the model comes from, as its conversion wrote it."""


def folder_of(model: str) -> Path:
    """The folder of a model that was just loaded, from this machine or from the hub's cache, with the files to hand on."""
    if Path(model).is_dir():
        return Path(model)
    return download(model, [*HANDED_ON, GENERATION, *LEGAL_PATTERNS])


def set_aside_generation(model: Any) -> bool:
    """Put an empty generation configuration in place of one that transformers refuses to save: a training run must not lose
    its weights to a temperature without `do_sample`. Returns whether it did; the file is then to be handed on as it is."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return False
    try:
        settings.validate(strict=True)
    except ValueError:
        model.generation_config = GenerationConfig()
        return True
    return False


def hand_on(start: Path, out: Path, generation: bool) -> None:
    """Copy licence and origin, and with `generation` the generation configuration byte for byte."""
    if start.resolve() == out.resolve():
        return
    for name in (*HANDED_ON, *legal_files(start), *([GENERATION] if generation else [])):
        if (start / name).is_file():
            shutil.copyfile(start / name, out / name)
