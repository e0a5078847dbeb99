# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One progress bar for long work, in place of the several that the libraries below would draw."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.text import Text
from transformers.utils import logging


class Progress:
    """What begins now, and how far it is: `progress("reading", 10_000)`, then `progress.advance(100)`. Draws nothing itself."""

    def __call__(self, text: str, size: int | None = None) -> None:
        """The next step begins: what it does, and how many bytes it will go through, where it is such a step."""

    def advance(self, size: int) -> None:
        """That many more bytes are done."""


Step = Progress


class _Drawn(Progress):
    def __init__(self, bar: Bar, steps: int):
        self._bar, self._steps, self._begun = bar, steps, 0
        self._task = bar.add_task("starting", total=None)

    def __call__(self, text: str, size: int | None = None) -> None:
        self._bar.refresh()  # where the last step ended
        self._bar.remove_task(self._task)
        self._begun += 1
        # a new one: rate and time left are its own
        self._task = self._bar.add_task(f"{self._begun}/{max(self._begun, self._steps)} {text}", total=size or None)

    def advance(self, size: int) -> None:
        self._bar.advance(self._task, size)


class _OfBytes(ProgressColumn):
    """A column that is shown only by steps that count bytes."""

    def __init__(self, column: ProgressColumn):
        super().__init__()
        self._column = column

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else Text(str(self._column.render(task)))


@contextmanager
def steps(total: int, show: bool) -> Iterator[Progress]:
    """A bar of `total` steps on standard error, with bytes, rate and time left, if `show` and if that is a terminal; either
    way the bars of transformers are off inside."""
    console = Console(stderr=True)
    restore = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        *map(_OfBytes, (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))),
        TimeElapsedColumn(),
    )
    try:
        with Bar(*columns, console=console, disable=not (show and console.is_terminal), transient=True) as bar:
            yield _Drawn(bar, total)
    finally:
        if restore:
            logging.enable_progress_bar()


def announce(text: str, show: bool) -> None:
    """One line on standard error, if `show`: what begins now draws its own bar, or none (downloads, dequantization)."""
    if show:
        Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)
