# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute check`: whether depth reads are right on this machine, by every implementation that can run here.

What has to hold of one case is in `self_check`; here are the cases that are run, two things that are told bit for bit, and the
result.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from depthroute.errors import CheckFailed, Refused

from .benchmarks.failures import failures, in_one_line
from .benchmarks.machine import check_device, describe_machine
from .benchmarks.operator_cases import OperatorCase, make_inputs, with_gradients
from .benchmarks.own_reads import own_read
from .dispatch import BACKENDS, depth_read
from .self_check import (
    DTYPES,
    PARTIAL_FACTORS,
    READ_FACTORS,
    Case,
    PartialCase,
    ReadCase,
    every_case,
    pairwise_cases,
    partial_answers,
    read_answers,
    run_case,
)


IMPLEMENTATIONS = ("reference", *BACKENDS)
QUICK_CASES = 8
"""Of each kind and dtype, in a quick check."""

QUICK_NUMBERS = 2**17
"""In the sources of a read, at most, in a quick check."""


@dataclass(frozen=True)
class CheckSettings:
    """What is checked.

    Attributes:
        full: every combination of `self_check`'s factors, not a selection.
        implementation: one name; None: all that can run.
        device: cpu, cuda or cuda:N; None: the first GPU, otherwise the CPU.
        threads: of torch.
    """

    full: bool = False
    implementation: str | None = None
    device: str | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        if self.implementation not in (None, *IMPLEMENTATIONS):
            raise Refused(f"implementation: got {self.implementation!r}, allowed: {', '.join(IMPLEMENTATIONS)}")
        if self.threads < 1:
            raise Refused(f"threads: got {self.threads}, allowed: a number ≥ 1")
        if self.device is not None:
            check_device(self.device)

    @property
    def chosen_device(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")


def reason_against(name: str, device: str, dtype: str) -> str | None:
    """Why an implementation cannot run; None where it can."""
    if name == "reference":
        return None
    if name == "triton" and device == "cpu" and dtype == "bfloat16":
        return "Triton's interpreter cuts numbers off at bfloat16 where a GPU rounds"
    return BACKENDS[name].unavailable(torch.device(device), getattr(torch, dtype), False)


def quick_cases() -> list[Case]:
    """Some of the small ones among `pairwise_cases`, spread evenly: `QUICK_CASES` of each kind and dtype."""

    def numbers(case: Case) -> int:
        sources = case.sources if isinstance(case, ReadCase) else case.inputs * (case.sources + case.private)
        return 2 * sources * max(case.tokens, 1) * case.width

    chosen: list[Case] = []
    everything = pairwise_cases()
    for kind in (ReadCase, PartialCase):
        for dtype in DTYPES:
            small = [
                case
                for case in everything
                if isinstance(case, kind) and case.dtype == dtype and numbers(case) <= QUICK_NUMBERS
            ]
            chosen += [small[index * len(small) // QUICK_CASES] for index in range(min(QUICK_CASES, len(small)))]
    return chosen


def number_of_cases() -> int:
    """How many `every_case` gives."""
    count = 0
    for factors in (READ_FACTORS, PARTIAL_FACTORS):
        product = len(DTYPES)
        for choices in factors.values():
            product *= len(choices)
        count += product
    return count


# --- bit for bit


def exact_cases(dtype: str, device: str) -> list[OperatorCase]:
    """One read and the reads of one block, anchored."""
    return [
        OperatorCase("full", "anchored", 5, 1, 48, 2, 7, dtype, device),
        OperatorCase("block", "anchored", 4, 3, 48, 2, 7, dtype, device),
    ]


def check_rerun(name: str, case: OperatorCase) -> None:
    """The same reads twice: every result and every gradient is the same, bit for bit.

    Raises:
        CheckFailed: one is not.
    """
    read: Any = own_read(name, case)
    inputs = make_inputs(case, 0)
    first, second = (with_gradients(read(inputs), inputs) for _ in range(2))
    for key in first:
        if not torch.equal(first[key], second[key]):
            raise CheckFailed(f"{name} on {case.device}, {case.name} {case.dtype}: a rerun changes {key}")


def check_start(name: str, case: OperatorCase) -> None:
    """At a query of zeros every anchored read is its base, bit for bit, and the query has a gradient.

    Raises:
        CheckFailed: a read is not, or it has none.
    """
    where = f"{name} on {case.device}, {case.name} {case.dtype}"
    read: Any = own_read(name, case)
    inputs = make_inputs(case, 0)
    inputs.query.data.zero_()
    found = with_gradients(read(inputs), inputs)
    for m, base in enumerate(inputs.bases):
        if not torch.equal(found[f"read {m}"], base):
            raise CheckFailed(f"{where}: anchored read {m} is not its base at the start")
    if not bool((found["gradient of query"].abs().amax(-1) > 0).all()):
        raise CheckFailed(f"{where}: a query has no gradient at the start")


def check_start_with_biases(name: str, dtype: str, device: str, heads: int) -> None:
    """The same of the public operator, with biases and heads.

    Raises:
        CheckFailed: the read is not its base.
    """
    inputs = make_inputs(exact_cases(dtype, device)[0], 0)
    bias = torch.linspace(-2, 1, len(inputs.values), device=device).to(inputs.query.dtype)
    x = depth_read(
        inputs.values,
        torch.zeros_like(inputs.query[0]),
        bias=bias,
        prior_bias=bias,
        base=inputs.bases[0],
        gain=5.0,
        num_heads=heads,
        anchored=True,
        implementation=name,
    )
    if not torch.equal(x, inputs.bases[0]):
        raise CheckFailed(
            f"{name} on {device}, {heads} heads with biases, {dtype}: anchored is not its base at the start"
        )


def run_twice(case: Case, name: str, device: str) -> None:
    """`run_case`, and then a rerun: every read, weight and gradient of two evaluations is the same, bit for bit.

    Raises:
        CheckFailed: a difference, from float64 or between the two.
    """
    run_case(case, name, device)
    evaluate: Any = read_answers if isinstance(case, ReadCase) else partial_answers
    first, second = (evaluate(case, name, torch.device(device))[0] for _ in range(2))
    for what in ("reads", "weights"):
        for index, (one, other) in enumerate(zip(getattr(first, what), getattr(second, what))):
            if not torch.equal(one, other):
                raise CheckFailed(f"{name} on {device}, {case}: a rerun changes {what} {index}")
    for key, one in first.gradients.items():
        if not torch.equal(one, second.gradients[key]):
            raise CheckFailed(f"{name} on {device}, {case}: a rerun changes the gradient of {key}")


# --- all of it


Check = Callable[[], None]


def exact_checks(name: str, device: str) -> Iterator[Check]:
    """What is told bit for bit, in every dtype that the implementation has."""
    for dtype in DTYPES:
        if reason_against(name, device, dtype) is None:
            for case in exact_cases(dtype, device):
                yield partial(check_rerun, name, case)
                yield partial(check_start, name, case)
            for heads in (1, 4):
                yield partial(check_start_with_biases, name, dtype, device, heads)


def case_checks(cases: Iterator[Case], name: str, device: str) -> Iterator[Check]:
    """`run_case` of every case that the implementation can run."""
    for case in cases:
        partial_read = isinstance(case, PartialCase) and name == "reference"
        if not partial_read and reason_against(name, device, case.dtype) is None:
            yield partial(run_case, case, name, device)


def run_checks(settings: CheckSettings, progress: bool = False) -> dict[str, Any]:
    """Run every check of every implementation; none that fails ends the others.

    Returns:
        `settings`, `machine`, `device`, `seconds`, `implementations`: by name `checks` and `failed`, or `reason`: why it
        cannot run here; `failures`: one line each.

    Raises:
        Refused: the one implementation that was asked for cannot run here.
    """
    device = settings.chosen_device
    names = IMPLEMENTATIONS if settings.implementation is None else (settings.implementation,)
    threads, begin = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(settings.threads)
    outcome: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    try:
        for name in names:
            reason = reason_against(name, device, "float32")
            if reason is not None:
                if settings.implementation is not None:
                    raise Refused(f"implementation: got {name!r}; {reason}")
                outcome[name] = {"reason": reason}
                continue
            outcome[name] = run_all(name, device, settings.full, lines, progress)
    finally:
        torch.set_num_threads(threads)
    return {
        "settings": {**vars(settings)},
        "machine": describe_machine(device),
        "device": device,
        "seconds": time.perf_counter() - begin,
        "implementations": outcome,
        "failures": lines,
    }


def run_all(name: str, device: str, full: bool, lines: list[str], progress: bool) -> dict[str, int]:
    """The checks of one implementation: how many, and how many failed; a line for each of those is added to `lines`."""
    quick = [] if full else quick_cases()
    checks = [*exact_checks(name, device)]
    total = number_of_cases() if full else len(quick)
    count = failed = 0

    def everything() -> Iterator[Check]:
        yield from checks
        yield from case_checks(every_case() if full else iter(quick), name, device)

    console = Console(stderr=True)
    for check in track(
        everything(), f"{name} on {device}", len(checks) + total, console=console, disable=not progress, transient=True
    ):
        count += 1
        try:
            check()
        except failures() as error:
            failed += 1
            text = str(error) if isinstance(error, CheckFailed) else f"{describe(check)}: {in_one_line(error)}"
            lines.append(text)
    return {"checks": count, "failed": failed}


def describe(check: Any) -> str:
    """A check in words: its function and what it was given."""
    return " ".join([check.func.__name__, *(getattr(one, "name", str(one)) for one in check.args)])


def result_table(result: dict[str, Any]) -> Table:
    """Implementations and what became of them."""
    which = "every combination" if result["settings"]["full"] else "a selection"
    title = f"{result['device']}: {result['machine'].get('gpu', result['machine']['cpu'])}"
    table = Table(title=title, caption=f"{which}, {result['seconds']:.1f} s", box=SIMPLE_HEAD)
    for column in ("implementation", "checks", "failed"):
        table.add_column(column, justify="left" if column == "implementation" else "right")
    table.add_column("not run, because", overflow="fold")
    for name, found in result["implementations"].items():
        if "reason" in found:
            table.add_row(name, "–", "–", found["reason"])
        else:
            table.add_row(name, str(found["checks"]), str(found["failed"]), "")
    return table
