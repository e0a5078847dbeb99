# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""How long a study will take on this machine: a step of each preset, timed, where its model fits; arithmetic where it does not."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import set_seed

from ..training.arguments import DepthRouteTrainingArguments, RunArguments, parse_arguments
from ..training.forecast import Forecast, duration, measured_step, set_accumulation
from ..training.run import forecast_run
from ..training.sources import block_size_of, open_documents
from ..training.starting import load_model, load_tokenizer
from .one_run import Places, threads
from .plan import PlannedRun


BESIDE_STEPS = 1.35
"""Steps take this much longer with the optimizer, measuring and saving beside them (of small models; measured)."""

MEMORY_SHARE = 0.5
"""Part of the machine's memory that a model may take to be timed here."""

TIMED_SECONDS = 20.0
"""A step that by arithmetic takes longer is not timed."""


@dataclass(frozen=True)
class StudyForecast:
    """
    Attributes:
        runs: how many are still to be done.
        done: how many are there already.
        seconds: of those to be done, by `workers` at a time.
        tokens, flops: trained on in all of those.
        measured: whether steps were timed; otherwise work over the rate of this machine's matrix products.
    """

    runs: int
    done: int
    seconds: float
    tokens: int
    flops: float
    measured: bool

    def sentence(self) -> str:
        """For the user."""
        way = (
            "a step of each preset was timed"
            if self.measured
            else "arithmetic: work over this machine's matrix products"
        )
        earlier = f", {self.done} are done already" if self.done else ""
        return (
            f"{self.runs} runs{earlier}; {self.tokens:,} tokens, {self.flops:.3g} floating-point operations: about "
            f"{duration(self.seconds)} ({way})"
        )


def forecast_study(
    runs: Sequence[PlannedRun],
    places: Places,
    workers: int,
    thread_count: int | None,
    tell: Callable[[str], None] = lambda _: None,
) -> StudyForecast:
    """What the runs that are not done yet will take.

    Args:
        runs: of the plan.
        workers, thread_count: how they will be done.
        tell: is given the name of each preset before it is timed.
    """
    left = [run for run in runs if not places.result_of(run).is_file()]
    by_preset: dict[tuple[str, str], list[PlannedRun]] = {}
    for run in left:  # fields over a preset's change little of what a step takes
        by_preset.setdefault((run.group, run.entries["preset"]), []).append(run)
    seconds, tokens, flops, measured = 0.0, 0, 0.0, True
    with threads(thread_count):
        rate = _matmul_rate() if left else 1.0
        for (group, preset), same in by_preset.items():
            tell(f"{preset}, {group}")
            one = _of_one(same[0], places, rate)
            tokens += one.tokens * len(same)
            flops += one.flops * len(same)
            if one.seconds is None:
                one, measured = replace(one, seconds=one.flops / rate), False
            seconds += BESIDE_STEPS * float(one.seconds or 0) * len(same)
    return StudyForecast(len(left), len(runs) - len(left), seconds / workers, tokens, flops, measured)


def _of_one(run: PlannedRun, places: Places, rate: float) -> Forecast:
    """Without a time where a step is too much for this machine."""
    arguments = [
        *run.arguments(places.text, places.base),
        "--output_dir=unused",
        f"--cache_dir={places.runs.parent / 'cache'}",
    ]
    if not torch.cuda.is_available():  # bfloat16 is refused otherwise, and a forecast can be asked for anywhere
        arguments.append("--use_cpu=true")
    told, training = parse_arguments(arguments)
    set_accumulation(training, told.global_batch_size)
    expected = forecast_run(told, training)
    too_large = expected.memory.get("total", 0) > MEMORY_SHARE * _memory()
    if too_large or expected.flops / expected.steps / rate > TIMED_SECONDS:
        return expected
    model, block_size = _model(told, training)
    step = measured_step(model, training, block_size)
    return replace(expected, step_seconds=step, seconds=step * expected.steps)


def _model(run: RunArguments, training: DepthRouteTrainingArguments) -> tuple[torch.nn.Module, int]:
    set_seed(training.seed)
    tokenizer = load_tokenizer(run, open_documents(run, training).texts()) if run.from_scratch else None
    model = load_model(run, tokenizer, training.seed)
    return model, block_size_of(run, model.config)


def _memory() -> int:
    """Bytes of the GPU, or of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _matmul_rate() -> float:
    """Floating-point operations per second of this machine's matrix products, in the dtype that training would take."""
    cuda = torch.cuda.is_available()
    size = 8192 if cuda else 1024
    square = torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=torch.bfloat16 if cuda else torch.float32)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        (square @ square).sum().item()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
