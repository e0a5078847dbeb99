# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The tasks that come with the package: their data, what they ask, and how they score."""

import json
import platform
from pathlib import Path

import lm_eval.tasks
import pytest
from lm_eval.tasks import TaskManager
from text_model_helpers import character_tokenizer

from depthroute.errors import Refused
from depthroute.evaluation import DELTA_PAPER_TASKS, HELD_OUT_MODULES, LOCAL_TASKS, TASK_FOLDER, evaluate
from depthroute.evaluation.evaluate import results_table, task_manager
from depthroute.evaluation.make_tasks import write_tasks


FOLDERS = ["hellaswag", "arc", "piqa", "winogrande", "super_glue", "mmlu/default", "lambada"]


@pytest.fixture(scope="module")
def tasks():
    return TaskManager(include_path=str(TASK_FOLDER), include_defaults=False).load(list(LOCAL_TASKS))["tasks"]


@pytest.fixture(scope="module")
def registry():
    """lm-eval's own tasks in the folders that the paper's are in, and ours. (All its folders take 15 seconds.)"""
    folders = [Path(lm_eval.tasks.__file__).parent / name for name in FOLDERS]
    return TaskManager(include_path=[*folders, TASK_FOLDER], include_defaults=False)


def documents(name: str) -> list[dict]:
    return [json.loads(line) for line in (TASK_FOLDER / f"{name}.jsonl").read_text().splitlines()]


def test_data_are_made_by_the_script(tmp_path):
    write_tasks(tmp_path)
    names = ["generation"]  # from a seed alone: the same everywhere
    if platform.python_version_tuple()[:2] == ("3", "11"):
        names += ["choice", "perplexity"]  # from this Python's own library: patch releases edit few lines of it
    for name in names:
        made = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        kept = (TASK_FOLDER / f"{name}.jsonl").read_text().splitlines()
        assert len(made) == len(kept)
        if platform.python_version() == "3.11.7" or name == "generation":
            assert made == kept


def test_choice_documents_are_sound():
    items = documents("choice")
    assert len(items) == 100
    for item in items:
        assert item["signature"].startswith("def ")
        assert len(set(item["choices"])) == 4
        assert item["label"] in range(4)
    # no place of the right answer is worth guessing
    assert max(sum(item["label"] == place for item in items) for place in range(4)) < 40


def test_perplexity_documents_cover_the_held_out_modules():
    items = documents("perplexity")
    assert [item["module"] for item in items] == list(HELD_OUT_MODULES)
    assert all(500 < len(item["text"]) <= 1200 and item["text"].isascii() for item in items)


def test_generation_is_scored_by_exact_match(tasks):
    task = tasks["depthroute_generation"]
    document = task.eval_docs[0]
    answer = task.doc_to_target(document)
    assert task.process_results(document, [answer]) == {"exact_match": 1.0}
    assert task.process_results(document, [answer + " and more"]) == {"exact_match": 0.0}


def test_choice_prompt_ends_where_the_docstring_begins(tasks):
    task = tasks["depthroute_choice"]
    document = task.eval_docs[0]
    assert task.doc_to_text(document) == document["signature"] + '\n    """'
    assert task.doc_to_choice(document)[task.doc_to_target(document)] == document["choices"][document["label"]]


def test_local_group_runs(stock):
    result = evaluate(
        stock, "depthroute_local", batch_size=4, limit=2, tokenizer=character_tokenizer(), bootstrap_iters=0
    )
    scores = result["results"]
    assert 0 <= scores["depthroute_choice"]["acc,none"] <= 1
    assert (
        scores["depthroute_perplexity"]["word_perplexity,none"]
        > scores["depthroute_perplexity"]["byte_perplexity,none"]
    )
    assert scores["depthroute_perplexity"]["bits_per_byte,none"] > 1  # random weights know nothing
    assert scores["depthroute_generation"]["exact_match,strip"] == 0.0
    answers = result["samples"]["depthroute_generation"]
    assert all(len(sample["resps"][0][0]) <= 12 for sample in answers)  # one character per token, at most 12 tokens
    table = results_table(result)
    assert table.row_count == 6
    assert {"depthroute_choice", "depthroute_perplexity", "depthroute_generation"} == set(table.columns[0].cells)


def test_stderr_is_shown():
    result = {
        "results": {
            "t": {"alias": "t", "acc,none": 0.25, "acc_stderr,none": 0.125, "p,none": 12345.6, "p_stderr,none": "N/A"}
        },
        "higher_is_better": {"t": {"acc": True, "p": False}},
        "n-samples": {"t": {"original": 100, "effective": 8}},
    }
    cells = [list(column.cells) for column in results_table(result).columns]
    assert cells == [["t", "t"], ["acc ↑", "p ↓"], ["0.2500", "1.235e+04"], ["0.1250", "–"], ["8", "8"]]


def test_delta_paper_names_are_lm_evals(registry):
    index = registry.task_index
    assert index["delta_paper"].cfg["task"] == list(DELTA_PAPER_TASKS)
    assert all(name in index for name in DELTA_PAPER_TASKS)
    assert set(LOCAL_TASKS) < set(index)


@pytest.fixture
def managers(registry, monkeypatch):
    """What each task manager was made with; every one is `registry`."""
    made: list[dict] = []
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: made.append(options) or registry)
    return made


def test_unknown_task_names_the_nearest(managers):
    with pytest.raises(Refused, match="^tasks: got 'helaswag', nearest: hellaswag"):
        task_manager(["helaswag"])
    with pytest.raises(Refused, match="'depthroute_choices', nearest: depthroute_choice"):
        task_manager(["depthroute_choice", "depthroute_choices"])
    with pytest.raises(Refused, match="'qqqqqq', nearest: .*depthroute_local, delta_paper"):
        task_manager(["qqqqqq"])


def test_lm_evals_own_tasks_are_indexed_only_where_they_are_asked_for(managers):
    for names in (["depthroute_local"], ["delta_paper"], ["depthroute_choice", "mmlu_*"]):
        task_manager(names)
    assert [options["include_defaults"] for options in managers] == [False, True, True]
    assert all(options["include_path"] == str(TASK_FOLDER) for options in managers)
