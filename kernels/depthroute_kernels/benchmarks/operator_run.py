# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute bench operator`: single reads, ours beside other libraries', each after it was seen to be right."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from depthroute.errors import CheckFailed

from .failures import failures, in_one_line
from .machine import describe_machine
from .measure import Work, copying, interleaved_times, quartiles
from .operator_cases import (
    OperatorCase,
    OperatorSettings,
    Read,
    ReadInputs,
    in_float64,
    largest_difference,
    make_inputs,
    with_gradients,
)
from .own_reads import own_read
from .peers import PEERS


COPY = "copy"


def run_operator_benchmark(settings: OperatorSettings, progress: bool = False) -> dict[str, Any]:
    """Measure the reads of every case.

    Returns:
        `command`, `settings`, `machine`, `peers` (their installed versions, or None) and `cases`, each with its fields,
        `minimum_bytes`, `copy_gb_per_s` and `systems`: by name a `status` and, where that is

            "measured"   `largest_difference` from float64; `forward` (without gradients) and `step` (forward and backward),
                         each with quartiles of milliseconds (`ms`) and of the share of the bandwidth of a copy in the same
                         round that the fewest bytes were moved at (`share`; above 1 where caches hold the sources)
            "differs"    `reason`: its result or a gradient is not that of float64; it is not timed
            "refuses"    `reason`: it cannot do the case, or not here

    Raises:
        CheckFailed: one of our implementations computes something else; nothing is reported.
        Refused: a setting that is not accepted.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        cases: Iterable[OperatorCase] = track(
            settings.cases(), description="reads", console=Console(stderr=True), disable=not progress
        )
        results = [run_case(case, settings) for case in cases]
    finally:
        torch.set_num_threads(threads)
    return {
        "command": settings.command(),
        "settings": {
            key: list(value) if isinstance(value, tuple) else value for key, value in asdict(settings).items()
        },
        "machine": describe_machine(settings.device),
        "peers": {peer.name: peer.version for peer in PEERS} if settings.peers else {},
        "cases": results,
    }


def run_case(case: OperatorCase, settings: OperatorSettings) -> dict[str, Any]:
    """One entry of `cases`.

    Raises:
        CheckFailed: one of our implementations differs.
    """
    inputs = make_inputs(case, settings.seed)
    truth = in_float64(case, inputs)
    systems: dict[str, dict[str, Any]] = {}
    reads: dict[str, Read] = {}
    for name in settings.implementations:
        read = own_read(name, case)
        if isinstance(read, str):
            systems[name] = {"status": "refuses", "reason": read}
            continue
        difference, wrong = largest_difference(with_gradients(read(inputs), inputs), truth, case)
        if wrong is not None:
            raise CheckFailed(f"{name}: {case.name} {case.dtype}: {wrong}; nothing was measured")
        systems[name], reads[name] = {"status": "measured", "largest_difference": difference}, read
    for peer in PEERS if settings.peers else ():
        read = peer.read(case)
        if isinstance(read, str):
            systems[peer.name] = {"status": "refuses", "reason": read}
            continue
        try:
            difference, wrong = largest_difference(with_gradients(read(inputs), inputs), truth, case)
        except failures() as error:
            systems[peer.name] = {"status": "refuses", "reason": in_one_line(error)}
            continue
        if wrong is None:
            systems[peer.name], reads[peer.name] = {"status": "measured", "largest_difference": difference}, read
        else:
            systems[peer.name] = {"status": "differs", "reason": wrong}
    del truth
    copied = settings.copy_mib * 2**20
    copy = copying(copied, case.device)
    least = case.minimum_bytes()
    bandwidths: list[float] = []
    for measure, make_work, moved in (
        ("forward", forward_work, least["forward"]),
        ("step", step_work, least["forward"] + least["backward"]),
    ):
        works: dict[str, Work] = {COPY: copy, **{name: make_work(read, inputs) for name, read in reads.items()}}
        rounds = list(interleaved_times(works, settings.repeats, settings.warmup, case.device))
        bandwidths += [2 * copied / times[COPY] for times in rounds]
        for name in reads:
            systems[name][measure] = {
                "ms": quartiles([times[name] * 1e3 for times in rounds]),
                "share": quartiles([moved / times[name] / (2 * copied / times[COPY]) for times in rounds]),
            }
    return {
        "name": case.name,
        **case._asdict(),
        "minimum_bytes": least,
        "copy_gb_per_s": quartiles([bandwidth / 1e9 for bandwidth in bandwidths]),
        "systems": systems,
    }


def forward_work(read: Read, inputs: ReadInputs) -> Work:
    """The reads without gradients."""
    return partial(torch.no_grad()(read), inputs)


def step_work(read: Read, inputs: ReadInputs) -> Work:
    """The reads, and the gradients of everything."""

    def work() -> None:
        results = read(inputs)
        grads = [grad.to(result.dtype) for grad, result in zip(inputs.grads, results)]
        torch.autograd.grad(results, list(inputs.leaves.values()), grads)

    return work
