# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The script for a GPU, run here at toy sizes: one file, every stage in it, every failure in it, and the time kept."""

import json
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor

import pytest
import torch

from depthroute.errors import CheckFailed
from depthroute_kernels import cpu
from depthroute_kernels.benchmarks import gpu
from depthroute_kernels.benchmarks.gpu import FULL, PRESETS, SECONDS, SHARE, TARGETS, TINY
from depthroute_kernels.dispatch import BACKENDS


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    """The interpreter would take minutes for what takes a GPU moments; it runs one case below."""
    monkeypatch.setattr(BACKENDS["triton"], "unavailable", lambda *a: "triton: not here")


def run(file, *arguments):
    return gpu.main(["--out", str(file), "--device", "cpu", "--tiny", *arguments])


def test_all_of_it_at_toy_sizes(tmp_path, capsys):
    file = tmp_path / "results.json"
    assert run(file) == 0
    result = json.loads(file.read_text())
    assert set(result["stages"]) == set(SECONDS)
    for name, stage in result["stages"].items():
        assert stage["done"] > 0 and stage["failures"] == [] and stage["left_out"] == [], name
    assert result["implementations"] == ["cpu"] and result["not_run"] == {"triton": "triton: not here"}
    assert result["machine"]["torch"] == torch.__version__ and "cpu" in result["machine"]
    # every target beside its measured number
    judged = {(one["preset"], one["measure"]): one for one in result["targets"]["models"]}
    assert set(judged) == {(preset, key) for preset, targets in TARGETS.items() for key in targets}
    for (preset, key), one in judged.items():
        assert one["target"] == TARGETS[preset][key] and one["ratio"] > 0
        assert one["reached"] == (one["ratio"] <= one["target"])
    operator = result["targets"]["operator"]
    assert len(operator) == 2 * result["stages"]["operator"]["done"]
    assert all(
        one["target"] == SHARE and one["implementation"] == "cpu" and one["reached"] is False for one in operator
    )
    assert "0 failures" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_every_failure_is_in_the_file(tmp_path, monkeypatch):
    right = cpu.phase
    monkeypatch.setattr(cpu, "phase", lambda inputs, **options: right(inputs, **{**options, "eps": 0.1}))
    file = tmp_path / "results.json"
    assert run(file) == 1
    stages = json.loads(file.read_text())["stages"]
    # the reference is right, and some of the six cases have no token, or nothing that depends on eps
    assert stages["parity"]["failures"] and stages["parity"]["done"] == 11
    assert all(line.startswith("cpu on cpu, ") for line in stages["parity"]["failures"])
    for name in ("large", "operator", "models"):
        assert stages[name]["failures"] and not stages[name]["results"], name
    assert stages["models"]["failures"][0].startswith("attnres-block: ")
    judged = json.loads(file.read_text())["targets"]
    assert judged["operator"] == [] and {one["ratio"] for one in judged["models"]} == {None}


def test_what_did_not_fit_is_named():
    def work():
        time.sleep(0.05)

    stage = gpu.run_stage([("one", work), ("two", work), ("three", work)], 0.01)
    assert stage["done"] == 1 and stage["left_out"] == ["two", "three"]


def test_parity_in_a_process_of_its_own():
    """One run, so one process: the case goes there, and what is wrong comes back."""
    case = gpu.parity_runs(["cpu"], "cpu", 1)[0][0]
    stage = gpu.parity_stage([(case, "no such name")], "cpu", 200, 2)
    (line,) = stage["failures"]
    assert line.startswith(f"no such name on cpu, {case}: ValueError: implementation: got 'no such name'")
    assert stage["done"] == 1 and stage["left_out"] == []


def test_processes_stop_when_the_time_is_up(monkeypatch):
    """Threads in place of processes: what has begun is finished and counted, the rest is named."""
    monkeypatch.setattr(gpu, "ProcessPoolExecutor", lambda count, *rest: ThreadPoolExecutor(count))
    monkeypatch.setattr(gpu, "run_parity", lambda case, name, device: time.sleep(0.2))
    runs = gpu.parity_runs(["cpu"], "cpu", 6)
    stage = gpu.parity_stage(runs, "cpu", 0.05, 2)
    assert stage["done"] == 2 and stage["failures"] == []
    assert stage["left_out"] == [f"{name} on cpu, {case}" for case, name in runs[2:]]


def test_a_process_that_ends_is_a_failure(monkeypatch):
    def broken(*arguments):
        raise BrokenExecutor("it ended")

    monkeypatch.setattr(gpu, "ProcessPoolExecutor", lambda count, *rest: ThreadPoolExecutor(count))
    monkeypatch.setattr(gpu, "run_parity", broken)
    runs = gpu.parity_runs(["cpu"], "cpu", 1)
    stage = gpu.parity_stage(runs, "cpu", 100, 2)
    assert stage["failures"] == [f"{name} on cpu, {case}: BrokenExecutor: it ended" for case, name in runs]


def test_a_peer_that_is_faster_is_named():
    def system(ms, share):
        return {
            "status": "measured",
            **{key: {"ms": {"median": ms}, "share": {"median": share}} for key in ("forward", "step")},
        }

    systems = {
        "reference": system(9.0, 0.1),
        "cpu": system(2.0, 0.5),
        "triton": system(1.0, 0.8),
        "fla fused": system(0.9, 0.9),
        "liger": {"status": "differs", "reason": "read 0 differs"},
    }
    one, _ = gpu.judge_operator({"results": {"full plain S=4": {"systems": systems}}})
    assert one["implementation"] == "triton" and one["share"] == 0.8
    assert one["faster_peers"] == ["fla fused"] and one["reached"] is False
    del systems["fla fused"]
    assert gpu.judge_operator({"results": {"full plain S=4": {"systems": systems}}})[0]["reached"] is True


def test_large_read():
    found = gpu.check_large("cpu", "cpu", (3, 70, 16))
    assert found["numbers"] == 3 * 70 * 16 and found["read"] <= 2**-7


def shifted(x, values):
    """A wrong value."""
    return x + 0.1


def spread(x, values):
    """The right value, with a gradient that goes to every token."""
    leak = sum((value.mean() for value in values), torch.zeros(()))
    return x + (leak - leak.detach())


@pytest.mark.parametrize(
    ("change", "line"), [(shifted, "read differs by .* from float64"), (spread, "gradient of values is not zero where")]
)
def test_a_wrong_large_read_is_seen(monkeypatch, change, line):
    right = gpu.depth_read
    monkeypatch.setattr(
        gpu, "depth_read", lambda values, *rest, **options: change(right(values, *rest, **options), values)
    )
    with pytest.raises(CheckFailed, match=line):
        gpu.check_large("cpu", "cpu", (3, 2000, 16))


def test_triton_in_its_interpreter(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.undo()
    assert gpu.check_large("triton", "cpu", (2, 2, 16))["read"] <= 2**-7


def test_sizes_of_the_real_run():
    count, tokens, width = FULL.large
    assert count * tokens * width > 2**31
    assert sum(SECONDS.values()) <= 9.5 * 60
    assert (FULL.models.batch, FULL.models.tokens, FULL.models.dtype) == (8, 4096, "bfloat16")
    assert FULL.cases is None and TINY.cases is not None
    assert {dtype for case, _ in gpu.parity_runs(["cpu"], "cpu", None) for dtype in [case.dtype]} == {
        "float32",
        "bfloat16",
        "float16",
    }
    parameters = FULL.models
    per_layer = (
        parameters.width * parameters.head_dim * 2 * (parameters.heads + parameters.kv_heads)
        + 3 * parameters.width * parameters.intermediate
    )
    assert 0.55e9 < per_layer * parameters.layers + parameters.width * parameters.vocab < 0.65e9
    assert set(TARGETS) == set(PRESETS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "cpu"], "device: got 'cpu', allowed: cuda, or cpu with --tiny"),
        (["--device", "cpu", "--tiny", "--minutes", "0"], "minutes: got 0.0, allowed: a number > 0"),
        (["--device", "cpu", "--tiny", "--processes", "-1"], "processes: got -1, allowed: a number ≥ 1"),
        ([], "device: got 'cuda', allowed: 'cpu' here, as torch"),
    ],
)
def test_refusals_are_one_line(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "results.json"
    assert gpu.main(["--out", str(file), *arguments]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"refused: {line}") and not file.exists()


def test_a_file_that_could_not_be_written(tmp_path, capsys):
    assert run(tmp_path / "nowhere" / "results.json") == 2
    assert "its folder does not exist" in capsys.readouterr().err
