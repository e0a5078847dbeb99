# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One progress bar for long work, in place of the several that the libraries below would draw."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers.utils import logging


Step = Callable[[str], None]
"""Called with what begins now."""


@contextmanager
def steps(total: int, show: bool) -> Iterator[Step]:
    """A bar of `total` steps on standard error, if `show` and if that is a terminal; either way the bars of transformers are
    off inside."""
    console = Console(stderr=True)
    restore = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as progress:
            task = progress.add_task("starting", total=total)
            begun = 0

            def step(description: str) -> None:
                nonlocal begun
                progress.update(task, description=description, completed=begun)
                begun += 1

            yield step
            progress.update(task, description="done", completed=total)
    finally:
        if restore:
            logging.enable_progress_bar()


def announce(text: str, show: bool) -> None:
    """One line on standard error, if `show`: what begins now draws its own bar, or none (downloads, dequantization)."""
    if show:
        Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)
