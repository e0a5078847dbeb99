# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute bench`: what it counts is right, what is wrong is not measured, and the promised limits hold."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import depthroute_kernels
from depthroute import PRESETS
from depthroute.errors import CheckFailed, Refused
from depthroute.modeling import residual_baselines, residual_depth_attention, residual_dual_stream
from depthroute.modeling.residual_base import ResidualState
from depthroute_kernels import cpu
from depthroute_kernels.benchmarks import BenchmarkSettings, backend_parity, run_benchmark
from depthroute_kernels.benchmarks.measure import interleaved_times, operations, peak_bytes, quartiles, saved_bytes
from depthroute_kernels.benchmarks.model import STOCK, build_cases, check_parity
from depthroute_kernels.benchmarks.report import check_plot_file, draw, markdown_table, result_tables


SMALL = BenchmarkSettings(
    layers=3, width=16, heads=2, kv_heads=1, head_dim=8, intermediate=24, vocab=50, tokens=5, repeats=2, warmup=0
)
README = Path(__file__).parents[2] / "kernels" / "README.md"
RESULT_FOLDER = Path(depthroute_kernels.__file__).parent / "benchmarks" / "results"


OPERATIONS = {
    "attnres": 1.29,
    "attnres-states": 1.29,
    "attnres-block": 1.31,
    "delta": 1.30,
    "delta-block": 1.17,
    "rd-attnres": 1.40,
    "wav": 1.91,
    "dar": 1.48,
    "dar-full": 1.48,
    "mhc": 4.9,
    "rezero": 1.06,
    "layerscale": 1.06,
}
"""Of one decoded token, as multiples of stock's: as counted, and three points for other versions of transformers."""


@pytest.fixture(scope="module")
def reference_cases():
    return build_cases(BenchmarkSettings())


@pytest.mark.parametrize("preset", PRESETS)
def test_bytes_saved_for_backward_at_the_reference_configuration(reference_cases, preset):
    """The limit is 1.6; stacked sources keep more than four times what stock does. mHC's four streams are no sources."""
    stock, case = reference_cases[STOCK], reference_cases[preset]
    ratio = saved_bytes(case.model, case.forward) / saved_bytes(stock.model, stock.forward)
    assert ratio == 1 if preset == "standard" else 1 < ratio <= (2.1 if preset == "mhc" else 1.6)


@pytest.mark.parametrize("preset", ["attnres", "delta-block"])
def test_bytes_saved_for_backward_in_bfloat16(preset):
    cases = build_cases(replace(SMALL, presets=(preset,), layers=8, width=64, tokens=64, dtype="bfloat16"))
    counted = {name: saved_bytes(case.model, case.forward) for name, case in cases.items()}
    assert counted[preset] <= 1.6 * counted[STOCK]  # one float32 copy of the sources would more than double it


def test_saved_bytes_counts_each_storage_once_and_no_parameter():
    linear = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)

    def forward():
        y = linear(x)  # keeps x and the weight
        return (y.exp() * y).sum()  # keeps y and exp(y), twice

    assert saved_bytes(linear, forward) == 3 * 4 * 8 * 4


def test_peak_bytes_is_the_largest_sum_alive():
    def work():
        one = torch.ones(1000)
        two = one.add(torch.ones(1000))
        del one
        return torch.cat([two, two])

    # 12000 where `one`, its summand and `two` live; then `two` and the pair of it: 12000 again
    assert 12000 <= peak_bytes(work) < 12100


def test_operations_are_counted():
    tensor = torch.ones(2, 3)
    assert operations(lambda: tensor.T + 1) == 2 and operations(lambda: None) == 0


@pytest.mark.parametrize("preset", PRESETS)
def test_operations_of_a_decoded_token(reference_cases, preset):
    """What decoding costs beside stock is their number: a count, the same on every machine."""
    stock, case = reference_cases[STOCK], reference_cases[preset]
    counts = []
    for one in (stock, case):
        one.fill_cache()
        counts.append(operations(one.step))
    assert counts[1] == counts[0] if preset == "standard" else counts[0] < counts[1] <= OPERATIONS[preset] * counts[0]


def test_rounds_are_interleaved_and_rotate():
    order = []
    systems = {name: (lambda name=name: order.append(name)) for name in "abc"}
    rounds = list(interleaved_times(systems, repeats=3, warmup=1))
    assert "".join(order) == "abcbcacababc"
    assert len(rounds) == 3 and all(set(times) == set("abc") for times in rounds)


def test_quartiles():
    assert quartiles([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0}
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}


@pytest.mark.parametrize(
    ("dtype", "anchored", "depth_heads"),
    [("float32", True, 4), ("bfloat16", False, 1), ("float16", False, 4), ("float64", True, 1)],
)
def test_parity_holds(dtype, anchored, depth_heads):
    """Three layers in blocks of two: a last, shorter block."""
    settings = replace(SMALL, dtype=dtype, anchored=anchored, depth_heads=depth_heads, block_size=2)
    differences = check_parity(build_cases(settings), settings)
    assert set(differences) == set(PRESETS) - {"standard"}
    assert {name for name, found in differences.items() if not found["largest_backend_difference"]} == {
        "mhc",
        "rezero",
        "layerscale",
    }


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"eps": 1e-2}, "from float64"),
        ({"gain": 1.01}, "from float64"),
        ({"anchored": False}, "anchored logits differ from stock"),
    ],
)
def test_a_wrong_read_is_not_measured(monkeypatch, change, line):
    right = residual_depth_attention.depth_read
    monkeypatch.setattr(residual_depth_attention, "depth_read", lambda *a, **k: right(*a, **{**k, **change}))
    with pytest.raises(CheckFailed, match=line):
        run_benchmark(replace(SMALL, presets=("attnres",), backend=("reference",)))


@pytest.mark.parametrize(
    ("phase", "change", "line"),
    [
        ("phase", {"eps": 1e-2}, "attnres: a read differs by .* from float64"),
        ("phase", {"anchored": False}, "attnres: anchored logits differ from stock"),
        (
            "merge",
            {"gain": 1.01},
            "attnres: anchored logits differ from stock|attnres: in float64 .* from the reference",
        ),
    ],
)
def test_a_wrong_backend_is_not_measured(monkeypatch, phase, change, line):
    """A wrong phase is seen in single reads; a wrong merge only in the whole model, whose loop alone prepares reads together."""
    right = getattr(cpu, phase)
    monkeypatch.setattr(cpu, phase, lambda inputs, **options: right(inputs, **{**options, **change}))
    with pytest.raises(CheckFailed, match=line):
        run_benchmark(replace(SMALL, presets=("attnres",)))


@pytest.mark.parametrize("what", ["logits", "decoded logits", "gradient of model.layers.1.mlp_read.query"])
def test_a_backend_that_differs_in_one_thing_is_not_measured(monkeypatch, what):
    right, calls = backend_parity.evaluate, []

    def evaluate(model, token_ids):
        found = right(model, token_ids)
        calls.append(model.config.depth_backend)
        if calls[-1] != "reference":
            found[what] = found[what] + 1e-3 * found[what].abs().max()
        return found

    monkeypatch.setattr(backend_parity, "evaluate", evaluate)
    with pytest.raises(CheckFailed, match=f"delta: in float64 {what} differ by .* from the reference, allowed: 1e-06"):
        run_benchmark(replace(SMALL, presets=("delta",)))
    assert calls == ["reference", "auto"]


def test_every_backend_is_a_system():
    result = run_benchmark(replace(SMALL, presets=("delta", "mhc"), backend=("auto", "reference", "cpu"), repeats=1))
    found = {name: (system["preset"], system["implementation"]) for name, system in result["systems"].items()}
    assert found == {
        STOCK: ("", ""),
        "delta": ("delta", "cpu"),
        "delta (reference)": ("delta", "reference"),
        "delta (cpu)": ("delta", "cpu"),
        "mhc": ("mhc", ""),
    }
    systems = result["systems"]
    assert 0 < systems["delta"]["largest_backend_difference"] < 1e-6
    assert systems["delta (reference)"]["largest_backend_difference"] == 0
    # the same weights and the same routing
    cases = build_cases(replace(SMALL, presets=("delta",), backend=("auto", "reference")))
    with torch.no_grad():
        losses = [cases[name].forward().item() for name in ("delta", "delta (reference)")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] != cases[STOCK].forward().item()


def test_a_backend_that_cannot_run_is_refused(monkeypatch):
    from depthroute_kernels import dispatch

    monkeypatch.setattr(dispatch.BACKENDS["triton"], "unavailable", lambda *a: "triton: not here")
    dispatch._choose_once.cache_clear()
    try:
        with pytest.raises(
            Refused, match="depth_backend: got 'triton', allowed: 'auto' or 'reference' here; triton: not here"
        ):
            run_benchmark(replace(SMALL, presets=("delta",), backend=("triton",)))
    finally:
        dispatch._choose_once.cache_clear()


def test_checkpointing_is_measured_beside(tmp_path):
    settings = replace(SMALL, presets=("delta-block",), layers=6, width=32, tokens=32, checkpointing=True, repeats=1)
    result = run_benchmark(settings)
    for name, system in result["systems"].items():
        assert system["train_step_checkpointed"]["ms"]["median"] > 0
        for key in ("saved_bytes", "peak_bytes"):
            assert 0 < system[f"{key}_checkpointed"]["bytes"] < system[key]["bytes"], (name, key)
        saved = system["saved_bytes_checkpointed"]
        assert saved["ratio"] == saved["bytes"] / result["systems"][STOCK]["saved_bytes_checkpointed"]["bytes"]
    assert settings.command().count("--checkpointing") == 1
    console = Console(width=200, record=True)
    for table in result_tables(result):
        console.print(table)
    assert "with gradient checkpointing" in console.export_text()
    draw(result, tmp_path / "ratios.svg")
    without = {**result, "settings": {**result["settings"], "checkpointing": False}}
    draw(without, tmp_path / "without.svg")
    drawn = [(tmp_path / name).read_text().count('id="patch_') for name in ("ratios.svg", "without.svg")]
    assert drawn[0] - drawn[1] == 6  # three bars more, and their places in the legend


@pytest.mark.parametrize("checkpointed", [False, True])
def test_checkpointing_is_on_only_where_it_is_measured(checkpointed):
    """Recomputed layers run twice: once in the forward pass, once in the backward pass."""
    from depthroute_kernels.benchmarks.model import checkpointing

    cases = build_cases(replace(SMALL, presets=("delta",)))
    calls = []
    for case in cases.values():
        case.model.model.layers[0].mlp.register_forward_pre_hook(lambda *a: calls.append(1))
    if checkpointed:
        with checkpointing(cases):
            [case.train_step() for case in cases.values()]
    [case.train_step() for case in cases.values()]
    assert len(calls) == len(cases) * (3 if checkpointed else 1)


@pytest.mark.parametrize(
    ("preset", "change"),
    [
        ("dar", lambda patch: patch.setitem(residual_dual_stream.ROUTES, "cross_key", ((0, 0), (1, 1)))),
        (
            "wav",
            lambda patch: patch.setattr(residual_depth_attention, "match_rms", lambda summary, details, *rest: details),
        ),
        ("mhc", lambda patch: patch.setattr(residual_baselines, "SINKHORN_ITERATIONS", 2)),
        ("layerscale", lambda patch: patch.setattr(residual_baselines.ScaledResidual, "write", plain_write)),
    ],
)
def test_another_equation_is_not_measured(monkeypatch, preset, change):
    change(monkeypatch)
    with pytest.raises(CheckFailed, match=f"{preset}: a read differs by .* from float64"):
        run_benchmark(replace(SMALL, presets=(preset,), layers=4))


def plain_write(self, state, s, update, reading):
    return ResidualState((state.stream + update,))


@pytest.fixture(scope="module")
def result():
    return run_benchmark(SMALL)


def test_result(result):
    assert set(result["systems"]) == {STOCK, *PRESETS}
    assert json.loads(json.dumps(result)) == result
    for name, system in result["systems"].items():
        for work in ("train_step", "forward", "decode_token"):
            ms = system[work]["ms"]
            assert 0 < ms["q1"] <= ms["median"] <= ms["q3"]
        of_token = system["decode_operations"]
        assert of_token["ratio"] == of_token["count"] / result["systems"][STOCK]["decode_operations"]["count"] >= 1
        for key in ("saved_bytes", "peak_bytes"):
            stock = result["systems"][STOCK][key]["bytes"]
            assert system[key]["ratio"] == system[key]["bytes"] / stock > 0
        assert system["peak_bytes"]["bytes"] > system["saved_bytes"]["bytes"]
        assert (system["routing_parameters"] > 0) == (name not in (STOCK, "standard"))
    assert all(ratio == 1 for ratio in result["systems"][STOCK]["train_step"]["ratio"].values())
    assert result["systems"]["standard"]["saved_bytes"]["ratio"] == 1
    assert str(Path.home()) not in json.dumps(result)


def test_threads_are_put_back():
    before = torch.get_num_threads()
    run_benchmark(replace(SMALL, presets=("standard",), layers=1, threads=before + 1, repeats=1))
    assert torch.get_num_threads() == before


def test_table_and_figure(result, tmp_path):
    console = Console(width=200, record=True)
    for table in result_tables(result):
        console.print(table)
    text = console.export_text()
    assert all(name in text for name in (STOCK, *PRESETS)) and "1 thread(s), plain" in text
    draw(result, tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_repeats_the_settings(tmp_path):
    from depthroute.cli import app

    settings = replace(SMALL, presets=("attnres", "delta-block"), anchored=True, repeats=1, backend=("auto", "cpu"))
    command = settings.command()
    assert command.startswith("depthroute bench --presets attnres,delta-block --backend auto,cpu --layers 3")
    file = tmp_path / "result.json"
    outcome = CliRunner().invoke(app, [*command.split()[1:], "--json", str(file)])
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(file.read_text())
    assert written["command"] == command and written["settings"]["anchored"] is True


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"presets": ("delta-blok",)}, "preset: got 'delta-blok', nearest: delta-block"),
        ({"presets": ()}, "presets: got none"),
        ({"layers": 0}, "layers: got 0, allowed: a number ≥ 1"),
        ({"repeats": 0}, "repeats: got 0, allowed: a number ≥ 1"),
        ({"backend": ("fast",)}, "backend: got 'fast', allowed: auto, reference, cpu, triton"),
        ({"backend": ()}, "backend: got none"),
        ({"device": "tpu"}, "device: got 'tpu', allowed: cpu, cuda or cuda:N"),
        ({"dtype": "int8"}, "dtype: got 'int8', allowed: float32"),
        ({"kv_heads": 3}, "kv_heads: got 3, allowed: a divisor of heads = 2"),
    ],
)
def test_settings_that_cannot_be_meant(values, line):
    with pytest.raises(Refused, match=line):
        replace(SMALL, **values)


@pytest.mark.parametrize("values", [{"depth_heads": 3}, {"block_size": 3}])
def test_sizes_that_a_preset_refuses(values):
    with pytest.raises(Refused, match="delta-block: "):
        run_benchmark(replace(SMALL, presets=("delta-block",), **values))


def test_a_figure_that_could_not_be_written(tmp_path):
    with pytest.raises(Refused, match="its folder does not exist"):
        check_plot_file(tmp_path / "nowhere" / "a.png")
    with pytest.raises(Refused, match="got the suffix '.xyz'"):
        check_plot_file(tmp_path / "a.xyz")


TIMED = ("train_step", "forward", "decode_token", "decode_operations", "saved_bytes")
RESULTS = {
    "cpu-12-layers.json": TIMED,
    "cpu-12-layers-anchored.json": TIMED,
    "cpu-24-layers.json": TIMED,
    "cpu-checkpointing.json": ("train_step_checkpointed", "peak_bytes_checkpointed", "peak_bytes"),
}
"""Committed results, and what of each `kernels/README.md` shows."""
# a count, the same on every machine: saved for backward, of stock's
SAVED = {
    "attnres": 1.10,
    "delta": 1.10,
    "attnres-block": 1.10,
    "delta-block": 1.03,
    "rd-attnres": 1.22,
    "wav": 1.19,
    "dar": 1.34,
}


def committed(name):
    return json.loads((RESULT_FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", RESULTS)
def test_the_readme_s_numbers_are_the_committed_results(name):
    assert markdown_table(committed(name), RESULTS[name]) in README.read_text(encoding="utf-8")


def test_the_committed_result_is_of_the_reference_configuration():
    settings, defaults = committed("cpu-12-layers.json")["settings"], BenchmarkSettings()
    for name in ("layers", "width", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "block_size", "depth_heads",
                 "anchored", "batch", "tokens", "dtype", "threads", "repeats", "device"):  # fmt: skip
        assert settings[name] == getattr(defaults, name), name
    assert settings["backend"] == ["auto", "reference"]


@pytest.mark.parametrize("preset", SAVED)
def test_saved_bytes_keep_their_limit(preset):
    assert committed("cpu-12-layers.json")["systems"][preset]["saved_bytes"]["ratio"] <= SAVED[preset]
