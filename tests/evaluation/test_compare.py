# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Paired differences between two models: their arithmetic, their pools, and `depthroute eval --compare`."""

import json
import math

import pytest
import torch
from conftest import randomize_routing
from scipy import stats
from text_model_helpers import run_command, save_folder

from depthroute.errors import Refused
from depthroute.evaluation import compare
from depthroute.evaluation.compare import over_documents


def result(values: dict[str, dict[str, list]], aggregation: str = "mean", groups=None, **changes) -> dict:
    """As lm-eval gives it: values of documents by task and metric."""
    samples = {
        task: [
            {"doc_id": i, "doc_hash": f"{task}{i}", "filter": "none", "metrics": list(metrics),
             **{name: column[i] for name, column in metrics.items()}}
            for i in range(len(next(iter(metrics.values()))))
        ]
        for task, metrics in values.items()
    }  # fmt: skip
    configs = {
        task: {"metric_list": [{"metric": name, "aggregation": aggregation} for name in metrics]}
        for task, metrics in values.items()
    }
    better = {task: dict.fromkeys(metrics, aggregation == "mean") for task, metrics in values.items()}
    return {"samples": samples, "configs": configs, "group_subtasks": groups, "higher_is_better": better, **changes}


A = [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
B = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def test_accuracies_are_the_paired_t_test():
    [row] = compare(result({"t": {"acc": A}}), result({"t": {"acc": B}}))["tasks"]
    expected = stats.ttest_rel(B, A)
    interval = expected.confidence_interval(0.95)
    assert (row["a"], row["b"], row["count"], row["over"]) == (0.5, pytest.approx(2 / 3), 6, "documents")
    assert row["difference"] == pytest.approx(1 / 6)
    assert row["difference"] / row["stderr"] == pytest.approx(expected.statistic)
    assert (row["low"], row["high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert row["higher_is_better"] is True
    [same] = compare(result({"t": {"acc": A}}), result({"t": {"acc": A}}))["tasks"]
    assert same["difference"] == same["stderr"] == same["low"] == same["high"] == 0


def test_perplexities_are_compared_by_their_logarithms():
    weights = [3, 5, 4]
    a, b = ([(-value * weight, weight) for value, weight in zip(row, weights)] for row in ([2, 1, 3], [1.5, 1.2, 2.0]))
    [row] = compare(
        result({"t": {"word_perplexity": a}}, "weighted_perplexity"),
        result({"t": {"word_perplexity": b}}, "weighted_perplexity"),
    )["tasks"]
    perplexity_a, perplexity_b = (math.exp(-sum(v for v, _ in rows) / 12) for rows in (a, b))
    assert row["metric"] == "log word_perplexity" and row["higher_is_better"] is False
    assert row["difference"] == pytest.approx(math.log(perplexity_b / perplexity_a))
    bits = [
        compare(
            result({"t": {"bits_per_byte": a}}, "bits_per_byte"), result({"t": {"bits_per_byte": b}}, "bits_per_byte")
        )
    ][0]["tasks"][0]
    assert bits["difference"] == pytest.approx(row["difference"] / math.log(2)) and bits["metric"] == "bits_per_byte"


def test_the_error_of_a_weighted_mean_is_that_of_resampled_documents():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(5, 40, (300,), generator=generator).double()
    difference = weights * (0.1 + 0.5 * torch.randn(300, generator=generator).double())
    row = over_documents("t", "m", [(0.0, d, w) for d, w in zip(difference.tolist(), weights.tolist())], None)
    draws = torch.randint(300, (4000, 300), generator=generator)
    means = difference[draws].sum(1) / weights[draws].sum(1)
    # 4000 resamples know a standard deviation to about 1%, and the formula is the first order of it
    assert row.stderr == pytest.approx(means.std().item(), rel=0.06)
    assert row.difference == pytest.approx((difference.sum() / weights.sum()).item())


def test_pools_are_over_documents_and_over_tasks():
    groups = {"suite": ["one", "inner"], "inner": ["two", "three"]}
    a = result({"one": {"acc": A}, "two": {"acc": A[:4]}, "three": {"acc": A[:2]}}, groups=groups)
    b = result({"one": {"acc": B}, "two": {"acc": B[:4]}, "three": {"acc": B[:2]}}, groups=groups)
    found = compare(a, b)
    pooled = {(row["task"], row["over"]): row for row in found["pooled"]}
    assert pooled.keys() == {("suite", "documents"), ("suite", "tasks"), ("inner", "documents"), ("inner", "tasks")}
    assert pooled["suite", "documents"]["count"] == 12
    everything = stats.ttest_rel(B + B[:4] + B[:2], A + A[:4] + A[:2])
    assert pooled["suite", "documents"]["stderr"] == pytest.approx(
        pooled["suite", "documents"]["difference"] / everything.statistic
    )
    # a group inside counts as one task, as mmlu does among the paper's eight
    inner = pooled["inner", "documents"]
    one = next(row for row in found["tasks"] if row["task"] == "one")
    mean = pooled["suite", "tasks"]
    assert mean["count"] == 2 and mean["difference"] == pytest.approx((one["difference"] + inner["difference"]) / 2)
    assert mean["stderr"] == pytest.approx(math.hypot(one["stderr"], inner["stderr"]) / 2)
    assert mean["high"] - mean["low"] == pytest.approx(2 * 1.959964 * mean["stderr"])
    # without a group, of all tasks
    alone = compare({**a, "group_subtasks": {}}, {**b, "group_subtasks": {}})["pooled"]
    assert {(row["task"], row["count"]) for row in alone} == {("all tasks", 12), ("all tasks", 3)}


def test_one_document_has_no_interval_and_other_metrics_are_named():
    [row] = compare(result({"t": {"acc": [1.0]}}), result({"t": {"acc": [0.0]}}))["tasks"]
    assert row["difference"] == -1 and row["stderr"] is row["low"] is row["high"] is None
    f1 = result({"t": {"f1": [(1, 1), (0, 1)]}}, "f1")
    assert compare(f1, f1) == {"tasks": [], "pooled": [], "left_out": ["t: f1"]}


def test_other_documents_are_refused():
    other = result({"t": {"acc": B}})
    other["samples"]["t"][2]["doc_hash"] = "x"
    with pytest.raises(Refused, match="t: the two results are of other documents"):
        compare(result({"t": {"acc": A}}), other)
    with pytest.raises(Refused, match="the two results are of other tasks"):
        compare(result({"t": {"acc": A}}), result({"u": {"acc": A}}))


def test_command_compares_two_models(stock, graft, tmp_path, monkeypatch, capsys):
    save_folder(stock, tmp_path / "base")
    model = graft("delta-block", depth_anchored=True)
    save_folder(model, tmp_path / "same")
    randomize_routing(model)
    save_folder(model, tmp_path / "other")
    options = [
        "--tasks",
        "depthroute_local",
        "--limit",
        4,
        "--batch-size",
        4,
        "--device",
        "cpu",
        "--json",
        tmp_path / "c.json",
    ]
    found = {}
    for name in ("same", "other"):
        code, out, err = run_command(
            monkeypatch, capsys, "eval", "--compare", tmp_path / "base", tmp_path / name, *options
        )
        assert code == 0, err
        found[name] = json.loads((tmp_path / "c.json").read_text())
        assert "b − a" in out and "log word_perplexity" in out and "4 documents" in out
    assert found["same"]["a"] == str(tmp_path / "base") and found["same"]["b"] == str(tmp_path / "same")
    # an anchored conversion at its start is its base, bit for bit
    assert all(row["difference"] == row["stderr"] == 0 for row in found["same"]["tasks"])
    row = next(row for row in found["other"]["tasks"] if row["metric"] == "bits_per_byte")
    scores = {name: found["other"]["results"][name]["results"]["depthroute_perplexity"] for name in "ab"}
    assert row["difference"] == pytest.approx(scores["b"]["bits_per_byte,none"] - scores["a"]["bits_per_byte,none"])
    assert row["low"] < row["difference"] < row["high"] and row["count"] == 4
    assert "samples" not in found["other"]["results"]["a"]
    code, _, err = run_command(monkeypatch, capsys, "eval", tmp_path / "same", "--compare", "nope", *options)
    assert code == 2 and "model: got 'nope'" in err
