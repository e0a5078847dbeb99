# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute eval`, and what it refuses."""

import json
import sys

import pytest
from conftest import randomize_routing
from text_model_helpers import character_tokenizer, run_command, save_folder

from depthroute.errors import Refused
from depthroute.evaluation import TASK_FOLDER, evaluate


@pytest.fixture(scope="module")
def routed(graft):
    model = graft("delta-block", depth_anchored=True)
    randomize_routing(model)
    return model


@pytest.fixture(scope="module")
def folder(routed, tmp_path_factory):
    return save_folder(routed, tmp_path_factory.mktemp("evaluate") / "model")


def test_command_writes_the_numbers_of_the_function(routed, folder, tmp_path, monkeypatch, capsys):
    file = tmp_path / "scores.json"
    options = ["--tasks", "depthroute_choice", "--limit", 3, "--batch-size", 2, "--device", "cpu", "--dtype", "float32"]
    code, out, err = run_command(monkeypatch, capsys, "eval", folder, *options, "--json", file)
    assert code == 0, err
    written = json.loads(file.read_text())
    expected = evaluate(routed, "depthroute_choice", 2, 3, tokenizer=character_tokenizer())
    assert written["results"]["depthroute_choice"] == expected["results"]["depthroute_choice"]
    assert "depthroute_choice" in out and "acc_norm ↑" in out and "± stderr" in out
    assert "samples" not in written
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


def test_task_path_is_printed_without_a_model(monkeypatch, capsys):
    code, out, _ = run_command(monkeypatch, capsys, "eval", "--print-task-path")
    assert (code, out.strip()) == (0, str(TASK_FOLDER))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "depthroute_choice", "--batch-size", "0"], "batch_size: got '0', allowed: a number ≥ 1, auto"),
        (["--tasks", "depthroute_choice", "--batch-size", "many"], "batch_size: got 'many'"),
        (["--tasks", "depthroute_choice", "--num-fewshot", "-1"], "num_fewshot: got -1, allowed: a number ≥ 0"),
        (["--tasks", "depthroute_choice", "--max-length", "257"], "max_length: got 257, allowed: at most 256"),
        (["--tasks", "depthroute_choice", "--limit", "0"], "limit: got 0.0, allowed"),
        (["--tasks", "depthroute_choice", "--limit", "2.5"], "limit: got 2.5, allowed"),
        (["--tasks", "depthroute_choice", "--device", "toaster"], "device: got 'toaster', allowed"),
        (["--tasks", "depthroute_choice", "--dtype", "float33"], "dtype: got 'float33', allowed"),
        (["--tasks", ","], "tasks: got none, allowed: depthroute_choice"),
        (["--tasks", "depthroute_choice", "--json", "nowhere/scores.json"], "its folder does not exist"),
    ],
    ids=lambda value: "-".join(value[-2:]) if isinstance(value, list) else "",
)
def test_bad_options_are_refused_in_one_line(folder, monkeypatch, capsys, options, message):
    code, out, err = run_command(monkeypatch, capsys, "eval", folder, *options)
    assert code == 2
    assert message in err.splitlines()[-1] and err.splitlines()[-1].startswith("depthroute: refused: ")
    assert "Traceback" not in err and not out


def test_a_name_that_is_no_model_is_refused_by_that_name(monkeypatch, capsys):
    code, _, err = run_command(monkeypatch, capsys, "eval", "nope", "--tasks", "depthroute_choice")
    assert code == 2 and len(err.splitlines()) == 1
    assert "model: got 'nope', no local folder" in err and "allowed: a model folder or the id of a reachable" in err


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_a_folder_without_a_model_is_refused(tmp_path, monkeypatch, capsys, kind):
    path = tmp_path / "model"
    if kind == "empty":
        path.mkdir()
    code, _, err = run_command(monkeypatch, capsys, "eval", path, "--tasks", "depthroute_choice")
    assert code == 2
    assert len(err.splitlines()) == 1 and str(path) in err and "allowed: a model folder" in err


def test_a_model_in_memory_needs_its_tokenizer(routed):
    with pytest.raises(Refused, match="^tokenizer: got None"):
        evaluate(routed, "depthroute_choice")


def test_without_lm_eval_the_extra_is_named(folder, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent("lm_eval"), *sys.meta_path])
    code, _, err = run_command(monkeypatch, capsys, "eval", folder, "--tasks", "depthroute_choice")
    assert code == 2
    assert err == "depthroute: refused: lm_eval: not installed, needed here: pip install 'depthroute[eval]'\n"


class Absent:
    """An import hook that finds nothing under a name."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] == self.name:
            raise ModuleNotFoundError(f"No module named {self.name!r}", name=self.name)
