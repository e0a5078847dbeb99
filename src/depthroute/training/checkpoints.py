# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run goes on from. One of the last step is one too: `DepthRouteTrainer` trains nothing behind it."""

import json
import logging
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from ..errors import Refused


logger = logging.getLogger(__name__)

LAST = ("last", "true", "True")
_NAME = re.compile(r"checkpoint-(\d+)")


def step_of(checkpoint: str | Path) -> int | None:
    """Optimizer steps behind a checkpoint; None: it is not whole. Its state is written last, after weights and optimizer."""
    try:
        state = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None


def newest_checkpoint(folder: str | Path) -> tuple[Path | None, list[Path]]:
    """The newest whole checkpoint of an output folder, None where there is none; and newer ones, which are not whole."""
    numbers = {path: _NAME.fullmatch(path.name) for path in Path(folder).glob("checkpoint-*") if path.is_dir()}
    numbered = [(int(match[1]), path) for path, match in numbers.items() if match]
    broken: list[Path] = []
    for _, path in sorted(numbered, reverse=True):
        if step_of(path) is not None:
            return path, broken
        broken.append(path)
    return None, broken


def checkpoint_to_resume(wanted: str | None, output_dir: str | Path) -> str | None:
    """The checkpoint folder that `resume_from_checkpoint` means. What `last` passes over is warned of, and stays.

    Raises:
        Refused: there is no such folder, or no whole checkpoint in it.
    """
    if wanted is None:
        return None
    if wanted in LAST:
        found, broken = newest_checkpoint(output_dir)
        if found is None:
            among = f" ({', '.join(path.name for path in broken)}: not whole)" if broken else ""
            raise Refused(
                f"resume_from_checkpoint: no checkpoint in {output_dir}{among}, allowed: a folder with a whole checkpoint"
            )
        for path in broken:
            logger.warning("%s is passed over: it has no readable %s", path, TRAINER_STATE_NAME)
        return str(found)
    if not Path(wanted).is_dir():
        raise Refused(f"resume_from_checkpoint: {wanted}: no such folder, allowed: a checkpoint folder, or last")
    if step_of(wanted) is None:
        raise Refused(
            f"resume_from_checkpoint: {wanted} has no readable {TRAINER_STATE_NAME}, allowed: a whole checkpoint, or last"
        )
    return wanted


def check_within(checkpoint: str, steps: int) -> None:
    """Refuse a checkpoint from behind the end of the run that is to go on from it.

    Args:
        checkpoint: a whole one.
        steps: of the run in all.

    Raises:
        Refused: it is of a later step.
    """
    step = step_of(checkpoint)
    if step is not None and step > steps:
        raise Refused(
            f"resume_from_checkpoint: {checkpoint} is at step {step}, allowed: at most {steps}, the steps of this run, "
            "or a longer run"
        )
