# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One run of a study: train, measure the model while it is in memory, keep the numbers."""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from filelock import FileLock

from ..files import write_json
from ..training.arguments import parse_arguments
from ..training.checkpoints import newest_checkpoint
from ..training.run import run_training
from .measures import diagnosis_of, window_losses
from .plan import PlannedRun


RESULT, MODEL, LOCK = "result.json", "model", ".lock"


@dataclass(frozen=True)
class Places:
    """Where a study's runs find and leave things.

    Attributes:
        runs: one folder per run, by its key.
        text: folder of the text's files; None: a data set of the hub.
        base: what `model: base` stands for; None where no run says that.
        keep_models: leave trained weights behind; otherwise only the numbers stay.
    """

    runs: Path
    text: Path | None
    base: str | None
    keep_models: bool

    def result_of(self, run: PlannedRun) -> Path:
        """The file that a finished run leaves."""
        return self.runs / run.key / RESULT


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many threads for torch's products; None: as it is. Sums, and so results, depend on their number."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def perform(run: PlannedRun, places: Places, diagnosed_tokens: int, thread_count: int | None = None) -> dict[str, Any]:
    """Do a run, or read what it left when it was done before. One that was stopped goes on from its last checkpoint, where its
    options ask for checkpoints, and otherwise starts again.

    Returns:
        An entry of `runs` in a study's results, and of its arm: `parameters`, `tokens`, `steps`, rates.

    Raises:
        Refused: as `run_training`.
    """
    file = places.result_of(run)
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(LOCK)):  # another study in the same folder may be doing the same run
            if not file.is_file():
                write_json(file, _performed(run, places, diagnosed_tokens, thread_count))
                if not places.keep_models:
                    shutil.rmtree(file.parent / MODEL)
    return json.loads(file.read_text(encoding="utf-8"))  # the same numbers, whether it was done now or before


def _performed(run: PlannedRun, places: Places, diagnosed_tokens: int, thread_count: int | None) -> dict[str, Any]:
    model_folder = places.result_of(run).parent / MODEL
    model_folder.mkdir(exist_ok=True)
    options = [f"--output_dir={model_folder}", f"--cache_dir={places.runs.parent / 'cache'}", "--disable_tqdm=true",
               "--report_to=none", "--overwrite"]  # fmt: skip
    # the start was measured when it was the start, and is in the checkpoint's log
    started = _checkpoint_to_go_on_from(model_folder) is not None
    options.append("--resume_from_checkpoint=last" if started else "--eval_on_start=true")
    measured: dict[str, Any] = {}

    def measure(trainer: Any) -> dict[str, float]:
        windows = trainer.eval_dataset.input_ids.long()
        batch_size = trainer.args.per_device_eval_batch_size
        measured["windows"] = window_losses(trainer.model, windows, batch_size)
        measured.update(diagnosis_of(trainer.model, windows, diagnosed_tokens, batch_size))
        return {"eval_loss": fmean(measured["windows"])}

    begin = time.perf_counter()
    with threads(thread_count):
        arguments = parse_arguments([*run.arguments(places.text, places.base), *options])
        results = run_training(*arguments, at_end=measure)
    return {**_numbers(run, results), "commit": code_commit(), "seconds": time.perf_counter() - begin, **measured}


def _checkpoint_to_go_on_from(folder: Path) -> Path | None:
    """The newest one that is whole; newer ones, which are not, are removed."""
    found, broken = newest_checkpoint(folder)
    for path in broken:
        shutil.rmtree(path)
    return found


def _numbers(run: PlannedRun, results: dict[str, Any]) -> dict[str, Any]:
    log = results["log"]
    curve = [[entry["step"], entry["eval_loss"]] for entry in log if "eval_loss" in entry]
    training = [[entry["step"], entry["loss"]] for entry in log if "loss" in entry]
    last = max(step for step, _ in training)
    final = results["validation"]["eval_loss"]
    if curve[-1][0] != last:
        curve.append([last, final])
    return {
        "group": run.group,
        "arm": run.arm,
        "seed": run.seed,
        "preset": results["preset"],
        "parameters": results["parameters"],
        "tokens": results["forecast"]["tokens"],
        "steps": results["forecast"]["steps"],
        "learning_rate": results["learning_rate"],
        "routing_learning_rate": results["routing_learning_rate"],
        "loss": final,
        "first_loss": curve[0][1],
        "largest_rise": max(0.0, max(loss for _, loss in training) - training[0][1]),
        "curve": curve,
        "training": training,
    }


def code_commit() -> str | None:
    """The commit of the code, with + where files differ from it; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        shown = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return shown.stdout.strip()
