# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Runs in processes of their own: stopped they leave none, and what fails is named."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from depthroute.errors import CheckFailed, Refused, Unfinished
from depthroute.studies.plan import PlannedRun
from depthroute.studies.workers import results_of


RUNS = [PlannedRun("all", arm, 1, {}, "") for arm in ("first", "second", "third")]


def done(run, folder, seconds=0.0):
    (folder / run.arm).write_text(str(os.getpid()))
    time.sleep(seconds)
    return {"arm": run.arm}


def failing(run, error, folder=None):
    if run.arm == "second":
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise error
    return {} if folder is None else done(run, folder, seconds=0.2)


def test_every_run_comes_with_its_result(tmp_path):
    found = {run.arm: result["arm"] for run, result in results_of(RUNS, partial(done, folder=tmp_path), workers=1)}
    assert found == {run.arm: run.arm for run in RUNS}


@pytest.mark.parametrize(
    "error, kind, said",
    [
        (Refused("dataset: got 'x', allowed: y"), Refused, "all, second, seed 1: dataset: got 'x', allowed: y"),
        (Unfinished("disk: full"), Unfinished, "all, second, seed 1: disk: full"),
        (RuntimeError("no\nmemory"), Unfinished, "all, second, seed 1: RuntimeError: no memory"),
        (CheckFailed("a check"), Unfinished, "all, second, seed 1: CheckFailed: a check"),
    ],
)
def test_a_run_that_fails_is_named(error, kind, said):
    with pytest.raises(kind, match=f"^{said}$"):
        list(results_of(RUNS, partial(failing, error=error), workers=1))


def test_a_failure_in_another_process_is_named_and_the_run_beside_it_is_finished(tmp_path):
    with pytest.raises(Refused, match="^all, second, seed 1: no$"):
        list(results_of(RUNS, partial(failing, error=Refused("no"), folder=tmp_path), workers=2))
    assert (tmp_path / "first").exists()


def test_a_process_that_is_killed_is_told():
    with pytest.raises(Unfinished, match="all, second, seed 1.*: its process was killed"):
        list(results_of(RUNS[1:2], partial(failing, error=None), workers=2))


STUDY = """
import signal
import sys
from functools import partial
from pathlib import Path

from depthroute import cli, cli_studies
from depthroute.studies import reproduce as module
from test_workers import RUNS, done

def stopped():
    with module._stopped(lambda: "stopped"), module.closing(
        module.results_of(RUNS, partial(done, folder=Path(sys.argv[1]), seconds=600), 2)
    ) as results:
        list(results)

if __name__ == "__main__":
    # tests that a shell runs in the background are started with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.app = stopped
    cli.main()
"""


def alive(session):
    """Processes of a session, and not those that have ended and wait to be read."""
    listed = subprocess.run(["ps", "-e", "-o", "sid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [
        row
        for row in rows
        if row[0] == str(session) and not row[1].startswith("Z") and "resource_tracker" not in row[2]
    ]


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals of POSIX")
@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM", "SIGKILL"])
def test_stopped_it_leaves_no_process(how, tmp_path):
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, script, tmp_path], start_new_session=True, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(1200):  # until both are at work
            if all((tmp_path / arm).exists() for arm in ("first", "second")):
                break
            time.sleep(0.1)
        if how == "Ctrl-C":  # which a terminal sends to all
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
        for _ in range(100):
            if not alive(process.pid):
                break
            time.sleep(0.1)
        assert alive(process.pid) == []
        assert not (tmp_path / "third").exists()
        if how != "SIGKILL":
            assert process.returncode == 3
            assert said == "depthroute: unfinished: stopped; the same command goes on\n"
    finally:
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
