# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Everything that only a GPU can tell, in one run of less than ten minutes and one file.

    python -m depthroute_kernels.benchmarks.gpu --out results.json

    parity     outputs, weights, every gradient against float64, and a rerun bit for bit: a pairwise selection of cases in fp32,
               bf16 and fp16
    exact      the anchored start, and reruns as a model has them, bit for bit
    large      a read with S·T·D > 2³¹: offsets of 32 bits would overflow
    operator   single reads beside other libraries', share of the bandwidth of a copy
    models     train step and peak memory of a 0.6B-like model beside stock Qwen3

Each stage has its share of the time; what did not fit is said in the file, and so is every failure. The targets are written
next to what was measured. `--device cpu --tiny` runs all of it at toy sizes, with Triton where it is told to interpret
(TRITON_INTERPRET=1), to test the script itself.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as OutOfTime
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.errors import CheckFailed, Refused, one_line
from depthroute.files import check_json_file, write_json

from ..check import describe, exact_checks, reason_against, run_twice
from ..dispatch import BACKENDS, depth_read
from ..self_check import Case, PartialCase, pairwise_cases
from .failures import failures, in_one_line
from .machine import check_device, describe_machine
from .model import run_benchmark
from .operator_cases import OperatorSettings
from .operator_run import run_case as run_operator_case
from .peers import PEERS
from .settings import BenchmarkSettings


SECONDS = {"parity": 150.0, "exact": 30.0, "large": 30.0, "operator": 120.0, "models": 240.0}
"""For each stage, at most; a piece of work that has begun is finished. 570 in all."""

PRESETS = ("attnres-block", "delta-block", "attnres", "delta")
TARGETS: dict[str, dict[str, float]] = {
    "attnres-block": {"train_step": 1.035},
    "delta-block": {"train_step": 1.03, "peak_bytes": 1.03},
    "attnres": {"train_step": 1.09},
    "delta": {"train_step": 1.09, "peak_bytes": 1.10},
}
"""Ratios to stock Qwen3 at 0.6B in bf16 with 8 x 4096 tokens, at most."""

SHARE = 0.70
"""Of the bandwidth of a copy that a read is to reach on its fewest bytes, at least; and no peer is to be faster."""


@dataclass(frozen=True)
class Sizes:
    """What the stages work on.

    Attributes:
        cases: of `pairwise_cases` at most, spread evenly; None: all.
        large: S, T and D of the large read; S·T·D > 2³¹ but in a tiny run.
        operator: settings of the operator benchmark, without device.
        models: settings of the model benchmark, without device and presets.
    """

    cases: int | None
    large: tuple[int, int, int]
    operator: OperatorSettings
    models: BenchmarkSettings


FULL = Sizes(
    cases=None,
    large=(33, 65536, 1024),
    operator=OperatorSettings(width=1024, batch=8, tokens=4096, dtype="bfloat16", copy_mib=1024, repeats=10),
    models=BenchmarkSettings(
        layers=28,
        width=1024,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab=151936,
        batch=8,
        tokens=4096,
        dtype="bfloat16",
        repeats=7,
        warmup=2,
    ),
)
TINY = Sizes(
    cases=6,
    large=(3, 5, 16),
    operator=OperatorSettings(sources=(2,), queries=2, width=16, batch=1, tokens=2, repeats=1, warmup=0, copy_mib=1),
    models=BenchmarkSettings(
        layers=2,
        width=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        intermediate=24,
        vocab=50,
        block_size=1,
        batch=1,
        tokens=3,
        repeats=1,
        warmup=0,
    ),
)

Step = tuple[str, Callable[[], Any]]


def run_stage(steps: Iterable[Step], seconds: float) -> dict[str, Any]:
    """Run named pieces of work until the time is up.

    Returns:
        `done`, `left_out` (names, where time was up), `failures` (one line each), `results` (by name, of what gives any) and
        `seconds`.
    """
    begin = time.monotonic()
    stage: dict[str, Any] = {"done": 0, "left_out": [], "failures": [], "results": {}}
    for name, work in steps:
        if time.monotonic() - begin > seconds:
            stage["left_out"].append(name)
            continue
        try:
            result = work()
        except failures() as error:
            text = one_line(error) if isinstance(error, CheckFailed) else in_one_line(error)
            stage["failures"].append(text if text.startswith(name) else f"{name}: {text}")
            continue
        finally:
            stage["done"] += 1
        if result is not None:
            stage["results"][name] = result
    stage["seconds"] = time.monotonic() - begin
    return stage


def implementations_here(device: str) -> tuple[dict[str, str], list[str]]:
    """Those that cannot run with the reason, and those in two phases that can."""
    reasons = {name: reason_against(name, device, "float32") for name in BACKENDS}
    return {name: text for name, text in reasons.items() if text is not None}, [
        name for name, text in reasons.items() if text is None
    ]


def parity_runs(names: Sequence[str], device: str, limit: int | None) -> list[tuple[Case, str]]:
    """Selected cases, each with every implementation that it is for; float64 is not among what GPUs train in."""
    cases = [case for case in pairwise_cases() if case.dtype != "float64"]
    if limit is not None:
        small = [case for case in cases if case.width <= 64 and case.sources <= 8]
        cases = [small[index * len(small) // limit] for index in range(limit)]
    return [
        (case, name)
        for case in cases
        for name in ([*names] if isinstance(case, PartialCase) else ["reference", *names])
        if reason_against(name, device, case.dtype) is None
    ]


def run_parity(case: Case, name: str, device: str) -> str | None:
    """One line that says what failed, or None. Runs in a process of its own."""
    try:
        run_twice(case, name, device)
    except failures() as error:
        return (
            one_line(error) if isinstance(error, CheckFailed) else f"{name} on {device}, {case}: {in_one_line(error)}"
        )
    return None


def parity_stage(runs: Sequence[tuple[Case, str]], device: str, seconds: float, processes: int) -> dict[str, Any]:
    """What `run_stage` returns, worked off by several processes: most of the time goes into compiling kernels, one set for each
    combination of sizes and options."""
    if processes == 1:
        steps = [(f"{name} on {device}, {case}", partial(run_twice, case, name, device)) for case, name in runs]
        return run_stage(steps, seconds)
    begin = time.monotonic()

    def outcome(future: "Future[str | None]") -> str | None:
        try:
            return future.result()
        except BrokenExecutor as error:  # a process ended with all of its memory, as after a wrong access on the device
            return f"{futures[future]}: {in_one_line(error)}"

    # a fork would inherit a device that has been used
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = {pool.submit(run_parity, case, name, device): f"{name} on {device}, {case}" for case, name in runs}
        try:
            for _ in as_completed(futures, seconds):
                pass
        except OutOfTime:
            pool.shutdown(cancel_futures=True)  # what is under way is finished
    lines = [outcome(future) for future in futures if not future.cancelled()]
    return {
        "done": len(lines),
        "left_out": [name for future, name in futures.items() if future.cancelled()],
        "failures": [line for line in lines if line is not None],
        "results": {},
        "seconds": time.monotonic() - begin,
    }


def exact_steps(names: Sequence[str], device: str) -> list[Step]:
    return [(describe(check), check) for name in names for check in exact_checks(name, device)]


def large_steps(names: Sequence[str], device: str, sizes: tuple[int, int, int]) -> list[Step]:
    return [(f"{name} S, T, D = {sizes}", partial(check_large, name, device, sizes)) for name in names]


def check_large(name: str, device: str, sizes: tuple[int, int, int]) -> dict[str, Any]:
    """One read of sources that lie in one tensor of S·T·D numbers, forward and backward, against the equations on its last
    tokens, in bfloat16.

    Raises:
        CheckFailed: they differ.
    """
    count, tokens, width = sizes
    generator = torch.Generator(device).manual_seed(0)
    stack = torch.empty(count, tokens, width, dtype=torch.bfloat16, device=device)
    for source in stack:
        source.normal_(generator=generator)
    stack.requires_grad_()
    query = (torch.randn(width, generator=generator, device=device) * width**-0.5).requires_grad_()
    grad = torch.zeros(tokens, width, dtype=torch.bfloat16, device=device)
    last = slice(max(tokens - 64, 0), None)
    grad[last].normal_(generator=generator)
    x = depth_read(stack.unbind(0), query, implementation=name)
    found = torch.autograd.grad(x, (stack, query), grad)
    exact_stack = stack.detach()[:, last].double().requires_grad_()
    exact_query = query.detach().double().requires_grad_()
    normed = exact_stack / torch.sqrt(exact_stack.square().mean(-1, keepdim=True) + 1e-6)
    exact = (torch.softmax((normed * exact_query).sum(-1, keepdim=True), 0) * exact_stack).sum(0)
    truth = torch.autograd.grad(exact, (exact_stack, exact_query), grad[last].double())
    differences = {
        "read": difference(x[last], exact),
        "gradient of values": difference(found[0][:, last], truth[0]),
        "gradient of query": difference(found[1], truth[1]),
    }
    for what, worst in differences.items():
        # two roundings of bfloat16 for each, and of the float32 query's gradient the order of a sum
        if not worst <= 2**-7:
            raise CheckFailed(f"{what} differs by {worst:.3g} from float64, allowed: {2**-7:.3g}")
    if bool(found[0][:, : last.start].any()):
        raise CheckFailed("gradient of values is not zero where the read's gradient is")
    return {"numbers": stack.numel(), **differences}


def difference(got: Tensor, exact: Tensor) -> float:
    """The largest, as a fraction of the largest entry."""
    return ((got.double() - exact).abs().max() / exact.abs().max()).item()


def operator_steps(settings: OperatorSettings) -> list[Step]:
    return [(case.name, partial(run_operator_case, case, settings)) for case in settings.cases()]


def model_steps(settings: BenchmarkSettings) -> list[Step]:
    """Stock and one preset at a time, so that a failure is one preset's, and what did not fit is left out by name."""
    return [(preset, partial(run_benchmark, replace(settings, presets=(preset,)))) for preset in PRESETS]


def judge_operator(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """For every case the fastest of our implementations: its share beside the target, and peers that were faster."""
    verdicts = []
    for name, case in stage["results"].items():
        measured = {key: system for key, system in case["systems"].items() if system["status"] == "measured"}
        ours = [key for key in measured if key in BACKENDS]
        peers = [key for key in measured if key in {peer.name for peer in PEERS}]
        for measure in ("forward", "step"):

            def median(key: str, measure: str = measure, measured: dict[str, Any] = measured) -> float:
                return measured[key][measure]["ms"]["median"]

            if ours:
                best = min(ours, key=median)
                share = measured[best][measure]["share"]["median"]
                faster = [peer for peer in peers if median(peer) < median(best)]
                verdicts.append(
                    {
                        "case": name,
                        "measure": measure,
                        "implementation": best,
                        "share": share,
                        "target": SHARE,
                        "faster_peers": faster,
                        "reached": share >= SHARE and not faster,
                    }
                )
    return verdicts


def judge_models(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """Every target beside its measured ratio; None where it was not measured."""
    verdicts = []
    for preset, targets in TARGETS.items():
        for key, target in targets.items():
            result = stage["results"].get(preset)
            ratio = result["systems"][preset][key]["ratio"] if result else None
            value = ratio["median"] if isinstance(ratio, dict) else ratio
            reached = None if value is None else value <= target
            verdicts.append({"preset": preset, "measure": key, "ratio": value, "target": target, "reached": reached})
    return verdicts


def run_all(device: str, sizes: Sizes, seconds: dict[str, float], processes: int = 1) -> dict[str, Any]:
    """Every stage, and what it says about the targets."""
    reasons, names = implementations_here(device)

    def steps(stage: Callable[..., Iterable[Step]], *arguments: Any) -> Callable[[float], dict[str, Any]]:
        return lambda limit: run_stage(stage(*arguments), limit)

    stages: dict[str, Callable[[float], dict[str, Any]]] = {
        "parity": lambda limit: parity_stage(parity_runs(names, device, sizes.cases), device, limit, processes),
        "exact": steps(exact_steps, names, device),
        "large": steps(large_steps, names, device, sizes.large),
        "operator": steps(operator_steps, replace(sizes.operator, device=device)),
        "models": steps(model_steps, replace(sizes.models, device=device)),
    }
    begin = time.monotonic()
    results: dict[str, Any] = {
        "machine": describe_machine(device),
        "device": device,
        "implementations": names,
        "not_run": reasons,
        "peers": {peer.name: peer.version for peer in PEERS},
        "stages": {},
    }
    for stage, run in stages.items():
        print(f"{stage} ...", end=" ", file=sys.stderr, flush=True)
        found = results["stages"][stage] = run(seconds[stage])
        print(
            f"{found['done']} done, {len(found['failures'])} failed, {len(found['left_out'])} left out, "
            f"{found['seconds']:.0f} s",
            file=sys.stderr,
        )
        if device != "cpu":
            torch.cuda.empty_cache()
    results["targets"] = {
        "operator": judge_operator(results["stages"]["operator"]),
        "models": judge_models(results["stages"]["models"]),
    }
    results["seconds"] = time.monotonic() - begin
    return results


def failed(results: dict[str, Any]) -> list[str]:
    """Every failure of every stage."""
    return [f"{name}: {line}" for name, stage in results["stages"].items() for line in stage["failures"]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 nothing failed, 1 something did (the file says what), 2 refused. Targets do not count as failures."""
    parser = argparse.ArgumentParser(prog="python -m depthroute_kernels.benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="file that gets everything (.json)")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N; cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test the script")
    parser.add_argument("--batch", type=int, help="sequences of a step, where 8 do not fit; the targets are for 8")
    parser.add_argument("--processes", type=int, help="for parity; default: as many as cores, 12 at most; tiny: 1")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all stages together")
    given = parser.parse_args(arguments)
    try:
        check_json_file(given.out)
        device = check_device(given.device)
        if device == "cpu" and not given.tiny:
            raise Refused("device: got 'cpu', allowed: cuda, or cpu with --tiny")
        if not given.minutes > 0:
            raise Refused(f"minutes: got {given.minutes}, allowed: a number > 0")
        share = given.minutes * 60 / sum(SECONDS.values())
        sizes = TINY if given.tiny else FULL
        if given.batch is not None:
            sizes = replace(
                sizes,
                operator=replace(sizes.operator, batch=given.batch),
                models=replace(sizes.models, batch=given.batch),
            )
        processes = given.processes or (1 if given.tiny else min(12, os.cpu_count() or 1))
        if processes < 1:
            raise Refused(f"processes: got {processes}, allowed: a number ≥ 1")
        results = run_all(device, sizes, {stage: share * limit for stage, limit in SECONDS.items()}, processes)
        if not results["implementations"]:
            results["note"] = "no implementation but the reference can run here"
        write_json(given.out, results)
    except (Refused, OSError) as error:
        print(f"refused: {one_line(error)}", file=sys.stderr)
        return 2
    print(f"{len(failed(results))} failures, {results['seconds']:.0f} s; all of it is in {given.out}")
    return 1 if failed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
