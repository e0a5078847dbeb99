# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute check`: what is wrong on this machine is found, and what cannot run is said."""

import itertools
import json
import sys

import pytest
import torch
from rich.console import Console

from depthroute import cli
from depthroute.errors import CheckFailed, Refused
from depthroute_kernels import check, cpu
from depthroute_kernels.check import CheckSettings, exact_cases, number_of_cases, quick_cases, result_table, run_checks
from depthroute_kernels.dispatch import BACKENDS
from depthroute_kernels.self_check import DTYPES, PartialCase, ReadCase, every_case


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    """The interpreter would take minutes for what takes a GPU moments; tests of the kernels themselves are elsewhere."""
    monkeypatch.setattr(BACKENDS["triton"], "unavailable", lambda *a: "triton: not here")


@pytest.fixture
def few(monkeypatch):
    """Three cases of each kind and dtype."""
    monkeypatch.setattr(check, "QUICK_CASES", 3)


def test_quick_cases_hold_every_kind_and_dtype():
    cases = quick_cases()
    found = {(type(case), case.dtype) for case in cases}
    assert found == {(kind, dtype) for kind in (ReadCase, PartialCase) for dtype in DTYPES}
    assert len(cases) == len(set(cases)) == check.QUICK_CASES * len(found)
    assert {case.anchored for case in cases} == {case.heads > 1 for case in cases} == {False, True}
    assert cases == quick_cases()


def test_full_runs_every_combination():
    assert number_of_cases() == sum(1 for _ in every_case()) > 100_000


def test_everything_holds_here(few):
    result = run_checks(CheckSettings(device="cpu"))
    assert result["failures"] == []
    # partial reads are not for the reference; exact: per dtype, a rerun and a start of two cases, and two numbers of heads
    exact = 4 * (2 * 2 + 2)
    assert result["implementations"] == {
        "reference": {"checks": 12 + exact, "failed": 0},
        "cpu": {"checks": 24 + exact, "failed": 0},
        "triton": {"reason": "triton: not here"},
    }
    assert json.loads(json.dumps(result)) == result
    console = Console(width=120, record=True)
    console.print(result_table(result))
    text = console.export_text()
    assert "triton: not here" in text and "a selection" in text


def test_full_takes_its_cases_from_every_combination(monkeypatch):
    some = list(itertools.islice(every_case(), 0, 4000, 1000))
    monkeypatch.setattr(check, "every_case", lambda: iter(some))
    ran = []
    monkeypatch.setattr(check, "run_case", lambda case, name, device: ran.append((case, name, device)))
    run_checks(CheckSettings(full=True, implementation="cpu", device="cpu"))
    assert ran == [(case, "cpu", "cpu") for case in some]


@pytest.mark.parametrize("phase", ["phase", "merge"])
def test_a_wrong_implementation_fails(few, monkeypatch, phase):
    right = getattr(cpu, phase)
    monkeypatch.setattr(cpu, phase, lambda inputs, **options: right(inputs, **{**options, "gain": 3.01}))
    result = run_checks(CheckSettings(implementation="cpu", device="cpu"))
    assert 0 < result["implementations"]["cpu"]["failed"] == len(result["failures"])
    assert any("cpu on cpu, " in line and "differs by" in line for line in result["failures"])


def test_a_kernel_that_breaks_is_a_failure_not_an_end(few, monkeypatch):
    def broken(inputs, **options):
        raise RuntimeError("an illegal access\nand more")

    monkeypatch.setattr(cpu, "merge", broken)
    result = run_checks(CheckSettings(implementation="cpu", device="cpu"))
    found = result["implementations"]["cpu"]
    assert 0 < found["failed"] < found["checks"]
    assert any(line.startswith("run_case partial read") for line in result["failures"])
    assert all("RuntimeError: an illegal access" in line and "\n" not in line for line in result["failures"])


def changed(monkeypatch, function):
    """The CPU's reads, with `function` applied to every complete one."""
    right = cpu.phase

    def phase(inputs, **options):
        return [one._replace(complete=[function(x) for x in one.complete]) for one in right(inputs, **options)]

    monkeypatch.setattr(cpu, "phase", phase)


def test_a_rerun_that_differs_is_seen(monkeypatch):
    calls = itertools.count()
    changed(monkeypatch, lambda x: x + 1e-7 * next(calls))
    with pytest.raises(CheckFailed, match="cpu on cpu, full anchored S=5 float64: a rerun changes read 0"):
        check.check_rerun("cpu", exact_cases("float64", "cpu")[0])
    case = quick_cases()[0]
    with pytest.raises(CheckFailed):
        check.run_twice(case, "cpu", "cpu")


def test_a_start_that_is_not_exact_is_seen(monkeypatch):
    one, block = exact_cases("float32", "cpu")
    changed(monkeypatch, lambda x: x * (1 + 2**-22))
    with pytest.raises(CheckFailed, match="full anchored S=5 float32: anchored read 0 is not its base at the start"):
        check.check_start("cpu", one)
    with pytest.raises(CheckFailed, match="4 heads with biases, float32: anchored is not its base at the start"):
        check.check_start_with_biases("cpu", "float32", "cpu", 4)
    check.check_start("reference", block)


def test_a_query_without_gradient_is_seen(monkeypatch):
    one, _ = exact_cases("float32", "cpu")
    right = check.own_read

    def cut(name, case):
        return lambda inputs: right(name, case)(inputs._replace(query=inputs.query.detach()))

    monkeypatch.setattr(check, "own_read", cut)
    with pytest.raises(CheckFailed, match="a query has no gradient at the start"):
        check.check_start("cpu", one)


def test_threads_are_put_back(few):
    before = torch.get_num_threads()
    run_checks(CheckSettings(implementation="reference", device="cpu", threads=before + 1))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"implementation": "fast"}, "implementation: got 'fast', allowed: reference, cpu, triton"),
        ({"device": "tpu"}, "device: got 'tpu', allowed: cpu, cuda or cuda:N"),
        ({"threads": 0}, "threads: got 0, allowed: a number ≥ 1"),
    ],
)
def test_settings_that_cannot_be_meant(values, line):
    with pytest.raises(Refused, match=line):
        CheckSettings(**values)


def test_the_interpreter_is_not_asked_for_bfloat16(monkeypatch):
    monkeypatch.setattr(BACKENDS["triton"], "unavailable", lambda *a: None)
    reasons = {dtype: check.reason_against("triton", "cpu", dtype) for dtype in DTYPES}
    assert [dtype for dtype, reason in reasons.items() if reason] == ["bfloat16"]
    assert check.reason_against("triton", "cuda", "bfloat16") is None


def test_device_that_is_meant(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert CheckSettings().chosen_device == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert CheckSettings().chosen_device == "cpu"


def command(monkeypatch, *arguments):
    """The exit code of the command as a user runs it."""
    monkeypatch.setattr(sys, "argv", ["depthroute", "check", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return left.value.code


def test_exit_codes(few, monkeypatch, capsys, tmp_path):
    file = tmp_path / "check.json"
    assert command(monkeypatch, "--implementation", "cpu", "--json", str(file)) == 0
    assert json.loads(file.read_text())["failures"] == []
    assert command(monkeypatch, "--implementation", "triton") == 2
    assert "refused: implementation: got 'triton'; triton: not here" in capsys.readouterr().err
    right = cpu.phase
    monkeypatch.setattr(cpu, "phase", lambda inputs, **options: right(inputs, **{**options, "eps": 1e-2}))
    assert command(monkeypatch, "--implementation", "cpu", "--json", str(file)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("depthroute:")]
    assert len(lines) == 1 and lines[0].startswith("depthroute: check failed: cpu on cpu, ") and " more)" in lines[0]
    assert len(json.loads(file.read_text())["failures"]) > 1
