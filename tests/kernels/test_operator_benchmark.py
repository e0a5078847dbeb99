# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute bench operator`: the fewest bytes, what is right is measured, what is wrong or cannot run is said."""

import importlib.util
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from depthroute.errors import CheckFailed, Refused
from depthroute.modeling import depth_ops
from depthroute_kernels import cpu
from depthroute_kernels.benchmarks import OperatorSettings, operator_cases, run_operator_benchmark
from depthroute_kernels.benchmarks.measure import copying, peak_bytes, seconds
from depthroute_kernels.benchmarks.operator_cases import (
    FORMS,
    SCHEDULES,
    OperatorCase,
    by_equations,
    in_float64,
    largest_difference,
    make_inputs,
    with_gradients,
)
from depthroute_kernels.benchmarks.operator_report import draw, result_tables
from depthroute_kernels.benchmarks.own_reads import own_read
from depthroute_kernels.benchmarks.peers import PEERS


SMALL = OperatorSettings(
    sources=(2,), queries=3, width=16, tokens=3, repeats=2, warmup=0, copy_mib=1, implementations=("reference", "cpu")
)
BY_NAME = {peer.name: peer for peer in PEERS}


def case_of(schedule="full", form="plain", sources=3, queries=1, width=16, dtype="float32", device="cpu"):
    return OperatorCase(schedule, form, sources, queries, width, 2, 3, dtype, device)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_our_reads_are_the_equations(name, schedule, form, dtype):
    case = case_of(schedule, form, 4, 1 if schedule == "full" else 3, dtype=dtype)
    inputs = make_inputs(case, 0)
    truth = in_float64(case, inputs)
    found = with_gradients(own_read(name, case)(inputs), inputs)
    difference, wrong = largest_difference(found, truth, case)
    assert wrong is None and difference > 0
    assert len([key for key in truth if key.startswith("read")]) == case.queries


def test_triton_in_its_interpreter():
    pytest.importorskip("triton")
    case = case_of("block", "anchored", 2, 2)
    inputs = make_inputs(case, 0)
    read = own_read("triton", case)
    assert callable(read), read
    truth = in_float64(case, inputs)
    assert largest_difference(with_gradients(read(inputs), inputs), truth, case)[1] is None


def test_the_equations_are_the_reference_s():
    """Two roads to one truth: these equations, and the modeling folder's own reference, in float64."""
    case = case_of("block", "anchored", 5, 3, dtype="float64")
    inputs = make_inputs(case, 0)
    with torch.no_grad():
        for m, x in enumerate(by_equations(case, inputs)):
            sources = [*inputs.values, *inputs.partials[m - 1 : m]] if m else inputs.values
            expected = depth_ops.depth_read(sources, inputs.query[m], base=inputs.bases[m], anchored=True)
            torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


def test_some_tokens_at_a_time(monkeypatch):
    """Float64 needs no more memory for more tokens: in pieces of one, four and all six tokens the same comes out."""
    case = case_of("block", "added", 3, 2)
    inputs = make_inputs(case, 0)
    whole = in_float64(case, inputs)
    for numbers in (1, 4 * 2 * 4 * 16):
        monkeypatch.setattr(operator_cases, "NUMBERS_AT_ONCE", numbers)
        pieces = in_float64(case, inputs)
        assert pieces.keys() == whole.keys() == with_gradients(by_equations(case, inputs), inputs).keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(pieces[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "form", "queries", "forward", "backward"),
    [
        # tensors of 2 x 3 x 16 numbers; forward: sources, running sums, bases, results; backward: results' gradients, and
        # sources and running sums twice
        ("full", "plain", 1, 4 + 0 + 0 + 1, 1 + 2 * 4),
        ("full", "anchored", 1, 4 + 0 + 1 + 1, 1 + 2 * 4),
        ("block", "plain", 3, 4 + 2 + 0 + 3, 3 + 2 * 6),
        ("block", "added", 3, 4 + 2 + 3 + 3, 3 + 2 * 6),
    ],
)
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_fewest_bytes(schedule, form, queries, forward, backward, dtype, size):
    tensor = 2 * 3 * 16 * size
    case = case_of(schedule, form, 4, queries, dtype=dtype)
    assert case.minimum_bytes() == {"forward": forward * tensor, "backward": backward * tensor}


def test_copying_moves_what_it_says():
    work = copying(1000, "cpu")
    assert work().untyped_storage().nbytes() == 1000
    assert seconds(work) > 0


class FakeCuda:
    """What `seconds` and `peak_bytes` ask torch.cuda for; the clock is that of the events alone."""

    def __init__(self, patch):
        self.log, self.clock, self.peak = [], 0.0, 0
        for name in ("synchronize", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats", "device"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "Event", lambda **options: FakeEvent(self))

    def synchronize(self, device):
        self.log.append("synchronize")

    def memory_allocated(self, device):
        return 1000

    def max_memory_allocated(self, device):
        return self.peak

    def reset_peak_memory_stats(self, device):
        self.log.append("reset")
        self.peak = 1000

    def device(self, device):
        return nullcontext()


class FakeEvent:
    def __init__(self, cuda):
        self.cuda = cuda

    def record(self):
        self.cuda.log.append("record")
        self.at = self.cuda.clock

    def synchronize(self):
        self.cuda.log.append("wait")

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


def test_time_and_memory_of_a_gpu(monkeypatch):
    """Between two events, the second of which is waited for; the peak of this work alone."""
    cuda = FakeCuda(monkeypatch)

    def work():
        cuda.log.append("work")
        cuda.clock += 2.5
        cuda.peak = 4096

    assert seconds(work, "cuda") == 2.5
    assert cuda.log == ["synchronize", "record", "work", "record", "wait"]
    cuda.log.clear()
    assert peak_bytes(work, "cuda:0") == 3096
    assert cuda.log == ["synchronize", "reset", "work", "synchronize"]


@pytest.fixture(scope="module")
def result():
    return run_operator_benchmark(replace(SMALL, sources=(2, 3), forms=FORMS, implementations=("reference", "cpu")))


def test_result(result):
    assert json.loads(json.dumps(result)) == result
    assert len(result["cases"]) == 2 * 3 * 2
    for case in result["cases"]:
        assert set(case["systems"]) == {"reference", "cpu", *BY_NAME}
        assert case["copy_gb_per_s"]["median"] > 0
        for name in ("reference", "cpu"):
            system = case["systems"][name]
            assert system["status"] == "measured" and 0 < system["largest_difference"] <= 1e-5
            for measure in ("forward", "step"):
                ms, share = system[measure]["ms"], system[measure]["share"]
                assert 0 < ms["q1"] <= ms["median"] <= ms["q3"]
                # the same numbers once more: fewest bytes over time, over the copy's bandwidth
                least = case["minimum_bytes"]
                moved = least["forward"] + (least["backward"] if measure == "step" else 0)
                assert share["q1"] * 0.2 < moved / ms["median"] * 1e-6 / case["copy_gb_per_s"]["median"]
                assert share["q3"] * 5 > moved / ms["median"] * 1e-6 / case["copy_gb_per_s"]["median"]
        # every peer is named, with a reason where it was not measured
        assert all(case["systems"][name].get("reason") or case["systems"][name]["forward"] for name in BY_NAME)


def test_tables_and_figure(result, tmp_path):
    console = Console(width=220, record=True)
    for table in result_tables(result):
        console.print(table)
    text = console.export_text()
    assert "2 x 3 tokens, width 16, float32, cpu, 1 thread(s)" in text and "block anchored S=3" in text
    assert "not measured" in text and all(name in text for name in BY_NAME)
    draw(result, tmp_path / "shares.png")
    assert (tmp_path / "shares.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_run_is_listed(monkeypatch):
    from depthroute_kernels.dispatch import BACKENDS

    monkeypatch.setattr(BACKENDS["triton"], "unavailable", lambda *a: "device: got cpu")
    settings = replace(SMALL, schedules=("full",), forms=("plain",), implementations=("cpu", "triton"), peers=False)
    (case,) = run_operator_benchmark(settings)["cases"]
    assert case["systems"]["triton"] == {"status": "refuses", "reason": "device: got cpu"}
    assert set(case["systems"]) == {"cpu", "triton"}


@pytest.mark.parametrize(("what", "change"), [("read 0", {"eps": 1e-2}), ("read 0", {"gain": 1.01})])
def test_our_wrong_read_is_not_measured(monkeypatch, what, change):
    right = cpu.phase
    monkeypatch.setattr(cpu, "phase", lambda inputs, **options: right(inputs, **{**options, **change}))
    with pytest.raises(CheckFailed, match=f"cpu: full plain S=2 float32: {what} differs by .*; nothing was measured"):
        run_operator_benchmark(replace(SMALL, schedules=("full",), peers=False))


def test_a_wrong_gradient_is_seen():
    case = case_of()
    inputs = make_inputs(case, 0)
    truth = in_float64(case, inputs)
    found = with_gradients(by_equations(case, inputs), inputs)
    assert largest_difference(found, truth, case)[1] is None
    found["gradient of value 1"] = found["gradient of value 1"] * (1 + 1e-4)
    assert largest_difference(found, truth, case)[1].startswith("gradient of value 1 differs by")
    found["gradient of value 1"] = found["gradient of value 1"] * float("nan")
    assert "differs by nan" in largest_difference(found, truth, case)[1]


# --- other libraries


def right_read(query, sources, norm, eps):
    stack = torch.stack(tuple(sources)).float()
    normed = stack / torch.sqrt(stack.square().mean(-1, keepdim=True) + eps) * norm
    return (torch.softmax((normed * query).sum(-1, keepdim=True), 0) * stack).sum(0).to(sources[0].dtype)


def fake_phase_1(stack, queries, eps):
    logits = (stack / torch.sqrt(stack.square().mean(-1, keepdim=True) + eps))[None] * queries[:, None, None, None]
    logits = logits.sum(-1)
    mixes = (torch.softmax(logits, 1).unsqueeze(-1) * stack).sum(1)
    return mixes, torch.logsumexp(logits, 1)


def fake_phase_2(partial, query, mix, lse, eps):
    logit = (partial / torch.sqrt(partial.square().mean(-1, keepdim=True) + eps) * query).sum(-1)
    share = torch.sigmoid(logit - lse).unsqueeze(-1)
    return (1 - share) * mix + share * partial


FAKES = {
    "fla naive": ("naive_attnres", lambda q, sources, w, *, rms_eps: right_read(q, sources, w, rms_eps)),
    "fla fused": ("fused_attnres", lambda q, sources, w, *, rms_eps: right_read(q, sources, w, rms_eps)),
    "fast-attnres": ("attnres", lambda sources, q, *, eps: right_read(q, sources, 1.0, eps)),
    "liger": ("liger_attn_res", lambda stack, q, w, eps: right_read(q, stack.unbind(0), w, eps)),
    "flash-attn-res": ("phase_1_batched_attention_triton_op", fake_phase_1),
}


def install(monkeypatch, name, function):
    """A module of the peer's name with a function of the peer's signature."""
    peer = BY_NAME[name]
    parts = peer.module.split(".")
    for index in range(len(parts)):
        module = ModuleType(".".join(parts[: index + 1]))
        module.__spec__ = importlib.util.spec_from_loader(module.__name__, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(module, FAKES[name][0], function)
    module.phase_2_online_softmax_merge_triton_op = fake_phase_2
    monkeypatch.setattr(type(peer), "refusal", lambda self, case: None if self is peer else "another")
    return module


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_adapters_call_what_the_libraries_document(monkeypatch, name, schedule):
    install(monkeypatch, name, FAKES[name][1])
    settings = replace(SMALL, schedules=(schedule,), forms=("plain",), implementations=("reference",))
    (case,) = run_operator_benchmark(settings)["cases"]
    assert case["systems"][name]["status"] == "measured", case["systems"][name]
    assert case["systems"][name]["step"]["ms"]["median"] > 0


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        (lambda q, sources, w, *, rms_eps: right_read(q, sources[:-1], w, rms_eps), "differs", "read 0 differs by"),
        (lambda q, sources, w, *, rms_eps: right_read(q, sources, w, rms_eps).detach() + q.sum() * 0, "differs", "gradient of value 0 differs by 1 from float64"),
        (lambda q, sources, w, **other: 1 / 0, "refuses", "ZeroDivisionError: division by zero"),
    ],
    ids=["drops a source", "loses gradients", "raises"],
)  # fmt: skip
def test_a_wrong_peer_is_never_timed(monkeypatch, function, status, reason):
    calls = []

    def counted(*args, **options):
        calls.append(1)
        return function(*args, **options)

    install(monkeypatch, "fla naive", counted)
    settings = replace(SMALL, schedules=("full",), forms=("plain",), implementations=("reference",))
    (case,) = run_operator_benchmark(settings)["cases"]
    found = case["systems"]["fla naive"]
    assert set(found) == {"status", "reason"}
    assert found["status"] == status and found["reason"].startswith(reason), found
    assert len(calls) == 1  # for parity, and never again


def test_a_library_that_cannot_be_imported_is_listed(monkeypatch):
    module = install(monkeypatch, "liger", None)
    monkeypatch.delitem(sys.modules, module.__name__)
    reason = BY_NAME["liger"].read(case_of())
    assert reason.startswith(
        "it cannot be imported: ModuleNotFoundError: No module named 'liger_kernel.transformers.fun"
    )


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("fla naive", case_of(form="added"), "it has no base"),
        ("fla naive", case_of(form="anchored"), "it has no anchored weights"),
        ("fla naive", case_of(dtype="float64"), "it computes in float32"),
        ("fla naive", case_of(), None),
        ("fla fused", case_of(), "it needs a GPU, got cpu"),
        ("fla fused", case_of(device="cuda"), None),
        ("fast-attnres", case_of(device="cuda"), "it takes bfloat16, got float32"),
        ("fast-attnres", case_of("block", sources=129, queries=2, dtype="bfloat16", device="cuda"), "it takes at most 129 sources and width 8192, got 130 and 16"),
        ("fast-attnres", case_of(dtype="bfloat16", device="cuda"), None),
        ("flash-attn-res", case_of(dtype="float16", device="cuda"), "its results are bfloat16, got float16"),
        ("flash-attn-res", case_of(width=48, dtype="bfloat16", device="cuda"), "it takes widths that are powers of two, got 48"),
        ("flash-attn-res", case_of(dtype="bfloat16", device="cuda:1"), None),
        ("liger", case_of(dtype="bfloat16"), "it needs a GPU, got cpu"),
        ("liger", case_of(dtype="float64", device="cuda"), "its statistics are float32, got float64"),
        ("liger", case_of(sources=57, device="cuda"), None),
    ],
)  # fmt: skip
def test_what_a_library_cannot_do_is_said(name, case, reason):
    assert BY_NAME[name].refusal(case) == reason


def is_missing(name):
    return importlib.util.find_spec(BY_NAME[name].module.partition(".")[0]) is None


@pytest.mark.parametrize("name", BY_NAME)
def test_real_libraries(name):
    """Where a library is installed, its adapter runs it or says why not; where it is not, that is what is said."""
    found = BY_NAME[name].read(case_of("block", "plain", 3, 2))
    if is_missing(name):
        assert found == "not installed" and BY_NAME[name].version is None
        return
    assert BY_NAME[name].version is not None
    if name == "fla naive" and not isinstance(found, str):
        case = case_of("block", "plain", 3, 2)
        inputs = make_inputs(case, 0)
        truth = in_float64(case, inputs)
        assert largest_difference(with_gradients(found(inputs), inputs), truth, case)[1] is None
    else:
        assert callable(found) or "it " in found


# --- settings and the command


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"sources": ()}, "sources: got none"),
        ({"sources": (4, 0)}, "sources: got 0, allowed: a number ≥ 1"),
        ({"schedules": ("halves",)}, "schedules: got 'halves', allowed: full, block"),
        ({"forms": ("gated",)}, "forms: got 'gated', allowed: plain, added, anchored"),
        ({"implementations": ("fast",)}, "implementations: got 'fast', allowed: reference, cpu, triton"),
        ({"dtype": "int8"}, "dtype: got 'int8', allowed: float32"),
        ({"device": "gpu"}, "device: got 'gpu', allowed: cpu, cuda or cuda:N"),
        ({"repeats": 0}, "repeats: got 0, allowed: a number ≥ 1"),
    ],
)
def test_settings_that_cannot_be_meant(values, line):
    with pytest.raises(Refused, match=line):
        replace(SMALL, **values)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Refused, match="device: got 'cuda', allowed: 'cpu' here, as torch .* finds no GPU"):
        replace(SMALL, device="cuda")


def test_the_command_repeats_the_settings(tmp_path):
    from depthroute.cli import app

    settings = replace(SMALL, schedules=("full",), forms=("plain",), peers=False, repeats=1)
    command = settings.command()
    assert command.startswith("depthroute bench operator --sources 2 --schedules full") and "--no-peers" in command
    file, plot = tmp_path / "result.json", tmp_path / "plot.png"
    outcome = CliRunner().invoke(app, [*command.split()[1:], "--json", str(file), "--plot", str(plot)])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(file.read_text())["command"] == command and plot.is_file()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--layers", "3", "operator"], "--layers: stands before 'operator', allowed: options behind it"),
        (["operator", "--sources", "4,many"], "sources: got 'many', allowed: whole numbers by commas"),
    ],
)
def test_a_command_line_that_cannot_be_meant(arguments, line):
    from depthroute.cli import app

    outcome = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(outcome.exception, Refused) and str(outcome.exception) == line
