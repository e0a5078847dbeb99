# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute inspect` from a saved folder to figures and numbers, and what it refuses."""

import json
import sys

import numpy as np
import pytest
from conftest import randomize_routing
from text_model_helpers import character_tokenizer, run_command, save_folder
from transformers import AutoTokenizer

import depthroute


TEXT = "The depth of a model is a place like any other.\n" * 12


@pytest.fixture(scope="module")
def routed(graft):
    model = graft("attnres-block", depth_anchored=True, depth_num_heads=2)
    randomize_routing(model)
    return model


@pytest.fixture(scope="module")
def folder(routed, tmp_path_factory):
    return save_folder(routed, tmp_path_factory.mktemp("inspect") / "model")


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def test_numbers_are_those_of_out_routing(routed, folder, text, tmp_path, monkeypatch, capsys):
    out, file = tmp_path / "out", tmp_path / "copy.json"
    code, printed, err = run_command(
        monkeypatch, capsys, "inspect", folder, "--text", text, "--out", out, "--max-tokens", 100, "--json", file
    )
    assert code == 0, err
    figures = ["norm_growth", "routing_depth", "routing_heatmap", "source_similarity", "source_usage"]
    files = [*(f"{name}.png" for name in figures), "report.html", "routing.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(files)
    report = json.loads((out / "routing.json").read_text())
    assert json.loads(file.read_text()) == report
    assert (report["tokens"], report["preset"]) == (100, "attnres-block")
    assert report["fields"]["depth_block_size"] == 2 and report["fields"]["depth_num_heads"] == 2

    ids = character_tokenizer()(TEXT, return_tensors="pt")["input_ids"][:, :100]
    routing = routed(ids, output_routing=True).routing
    assert [read["name"] for read in report["reads"]] == list(routing)
    for read in report["reads"]:
        sources, weights, _ = routing[read["name"]]
        weights = weights.detach().double().numpy()  # [S, 1, 100, 2]
        assert (read["sources"], read["route"]) == (sources, "main")
        # both sides are float64 means of the same float32 weights
        np.testing.assert_allclose(read["mean_weights"], weights.mean((1, 2, 3)), atol=1e-6)
        assert read["max_weight"] == pytest.approx(weights.max(0).mean(), abs=1e-6)
        entropy = -(weights * np.log(weights)).sum(0).mean()
        assert read["entropy"] == pytest.approx(entropy, abs=1e-6)
        assert read["entropy_normalized"] == pytest.approx(entropy / np.log(len(sources)), abs=1e-6)
        assert read["name"].removeprefix("model.") in printed


def test_short_text_is_read_whole_in_windows(folder, text, tmp_path, monkeypatch):
    monkeypatch.setattr("depthroute.diagnostics.plots.draw", lambda *arguments: {})
    monkeypatch.setattr("depthroute.diagnostics.report.SECTIONS", ())
    report = depthroute.inspect(folder, text, tmp_path / "out", max_length=100, batch_size=4)
    assert report["tokens"] == len(TEXT) == len(AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])


def test_files_are_replaced_only_when_asked(folder, text, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("depthroute.diagnostics.plots.draw", lambda *arguments: {})
    monkeypatch.setattr("depthroute.diagnostics.report.SECTIONS", ())
    out = tmp_path / "out"
    out.mkdir()
    (out / "routing.json").write_text("old")
    (out / "notes.txt").write_text("mine")
    command = ["inspect", folder, "--text", text, "--out", out, "--max-tokens", 32]
    code, _, err = run_command(monkeypatch, capsys, *command)
    assert code == 2 and "--overwrite" in err and (out / "routing.json").read_text() == "old"
    assert run_command(monkeypatch, capsys, *command, "--overwrite")[0] == 0
    assert json.loads((out / "routing.json").read_text())["tokens"] == 32
    assert (out / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("qwen3", "model_type: got 'qwen3', allowed: depthroute"),
        ("nope", "model: got 'nope', no local folder"),
        ("no text", "missing.txt: No such file or directory, allowed: a readable UTF-8 text file"),
        ("empty text", "text.txt: no tokens, allowed"),
        ("binary text", "text.txt: not UTF-8, allowed"),
        ("no tokens", "max_tokens: got 0, allowed: a number ≥ 1"),
        ("long windows", "max_length: got 257, allowed: at most max_position_embeddings = 256"),
        ("a device", "device: got 'foo', allowed: a device of this machine"),
        ("json nowhere", "its folder does not exist"),
        ("no matplotlib", "matplotlib: not installed, needed here: pip install 'depthroute[plot]'"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(change, message, stock, folder, text, tmp_path, monkeypatch, capsys):
    model, extra = folder, []
    if change == "qwen3":
        model = save_folder(stock, tmp_path / "model")
    elif change == "nope":
        model = "nope"
    elif change == "no text":
        text = tmp_path / "missing.txt"
    elif change == "empty text":
        text.write_text("")
    elif change == "binary text":
        text.write_bytes(b"\xff\xfe\x00")
    elif change == "no tokens":
        extra = ["--max-tokens", 0]
    elif change == "long windows":
        extra = ["--max-length", 257]
    elif change == "a device":
        extra = ["--device", "foo"]
    elif change == "json nowhere":
        extra = ["--json", tmp_path / "nowhere" / "x.json"]
    elif change == "no matplotlib":
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    before = sorted(tmp_path.iterdir())
    code, out, err = run_command(
        monkeypatch, capsys, "inspect", model, "--text", text, "--out", tmp_path / "out", *extra
    )
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith("depthroute: refused: ") and message in last
    assert "Traceback" not in err and not out
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_left_when_drawing_fails(folder, text, tmp_path, monkeypatch):
    def fail(*args):
        raise RuntimeError("no ink")

    monkeypatch.setattr("depthroute.diagnostics.plots.routing_by_depth", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        depthroute.inspect(folder, text, tmp_path / "out", max_tokens=32)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
