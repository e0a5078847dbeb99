# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Runs one after the other, or several at a time in processes of their own, which end when this one does."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ..errors import Refused, Unfinished, one_line
from .plan import PlannedRun


Result = dict[str, Any]

# what a run can meet with outside of this code: a full disk, no memory left, a data set that cannot be had
_FROM_OUTSIDE = (OSError, ValueError, ImportError, RuntimeError, MemoryError)


def results_of(
    runs: Sequence[PlannedRun], do: Callable[[PlannedRun], Result], workers: int
) -> Generator[tuple[PlannedRun, Result], None, None]:
    """Each run with its result, as it ends. Where this is stopped (also by closing the generator) no process is left; where a
    run fails, those beside it are finished first, so that they need not be done again.

    Args:
        do: does a run; with several workers in another process, so it has to be a function of a module, or a partial of one.
        workers: runs at a time.

    Raises:
        Refused: by a run, which the line names.
        Unfinished: a run failed, or its process was killed; the line names it.
    """
    if workers == 1:
        for run in runs:
            with _named(run):
                result = do(run)
            yield run, result
        return
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_end_with_parent)
    left = iter(runs)
    waiting: dict[Future[Result], PlannedRun] = {}
    try:
        while True:
            # no more than there are processes: what waits inside the pool can no longer be called back
            for run in islice(left, workers - len(waiting)):
                with _interrupts_held_back():
                    waiting[pool.submit(do, run)] = run
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                with _named(waiting[future], *(run for other, run in waiting.items() if other is not future)):
                    result = future.result()
                yield waiting.pop(future), result
    except Exception:
        raise
    except BaseException:  # stopped: what is running would be waited for
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _named(run: PlannedRun, *beside: PlannedRun) -> Iterator[None]:
    """Errors name the run; where a process was killed it could have been any of those that ran."""
    try:
        yield
    except BrokenProcessPool as error:
        names = " or ".join(map(_name, (run, *beside)))
        raise Unfinished(f"{names}: its process was killed, perhaps for want of memory") from error
    except Refused as error:
        raise Refused(f"{_name(run)}: {one_line(error)}") from error
    except Unfinished as error:
        raise Unfinished(f"{_name(run)}: {one_line(error)}") from error
    except _FROM_OUTSIDE as error:
        raise Unfinished(f"{_name(run)}: {type(error).__name__}: {one_line(error)}") from error


def _name(run: PlannedRun) -> str:
    return f"{run.group}, {run.arm}, seed {run.seed}"


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A process that is started here never gets Ctrl-C, which a terminal sends to all: this one ends the others."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_parent() -> None:
    """Leave as soon as the process that started this one is gone, however it went."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
