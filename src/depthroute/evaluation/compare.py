# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Two models on the same documents: paired differences with confidence intervals, by task and pooled.

Of each document both models' values v_i (and a weight w_i: 1, or words or bytes where a metric is per word or byte) give

    D = Σ (v_i^b − v_i^a) / Σ w_i         SE = sqrt(n / (n−1) · Σ (v_i^b − v_i^a − D w_i)²) / Σ w_i        D ± t_{n−1} · SE

For w = 1 that is the mean paired difference and its standard error. Perplexities are compared by their logarithms, in which
they are means.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

from rich.table import Table

from ..errors import Refused


CONFIDENCE = 0.95

# what lm-eval's means are made of: (sign and scale of a document's value, what the compared number is)
_SCALES = {
    "mean": (1.0, ""),
    "perplexity": (-1.0, "log "),
    "weighted_perplexity": (-1.0, "log "),
    "bits_per_byte": (-1.0 / math.log(2), ""),
}

Key = tuple[str, str]
"""Metric, as it is shown, and filter."""

Pairs = dict[int, tuple[float, float, float]]
"""Document → value of a, value of b, weight."""


@dataclass(frozen=True)
class Difference:
    """b − a on one task, or pooled over several.

    Attributes:
        task: a task or group; for a pool of all: "all tasks".
        metric: lm-eval's name; "log …" is a logarithm, in nats.
        over: what the mean is over: "documents", or "tasks".
        count: how many of them.
        a, b: both models' means.
        difference: b − a.
        stderr, low, high: standard error and 95% interval; None for one document.
        higher_is_better: as lm-eval says; None where it does not.
    """

    task: str
    metric: str
    over: str
    count: int
    a: float
    b: float
    difference: float
    stderr: float | None
    low: float | None
    high: float | None
    higher_is_better: bool | None


def paired_values(
    result_a: Mapping[str, Any], result_b: Mapping[str, Any], task: str
) -> tuple[dict[Key, Pairs], set[str]]:
    """The values of both models on each document of a task, by metric and filter; and the metrics that are no means over
    documents, which cannot be paired.

    Args:
        result_a, result_b: what `evaluate` returned, with samples.

    Raises:
        Refused: the two saw other documents.
    """
    listed = result_a["configs"][task].get("metric_list") or []
    aggregations = {entry["metric"]: entry.get("aggregation", "mean") for entry in listed}
    by_document = [
        {(sample["doc_id"], sample["filter"]): sample for sample in result["samples"][task]}
        for result in (result_a, result_b)
    ]
    hashes = [{key: sample["doc_hash"] for key, sample in samples.items()} for samples in by_document]
    if hashes[0] != hashes[1]:
        raise Refused(f"{task}: the two results are of other documents, allowed: the same task, limit and seed")
    pairs: dict[Key, Pairs] = {}
    left_out: set[str] = set()
    for (document, filter_name), sample in by_document[0].items():
        other = by_document[1][document, filter_name]
        for metric in sample["metrics"]:
            aggregation = aggregations.get(metric, "mean")
            if aggregation not in _SCALES or not _is_number(sample[metric]):
                left_out.add(f"{task}: {metric}")
                continue
            scale, prefix = _SCALES[aggregation]
            (a, weight), (b, _) = _weighted(sample[metric]), _weighted(other[metric])
            pairs.setdefault((prefix + metric, filter_name), {})[document] = (scale * a, scale * b, weight)
    return pairs, left_out


def _is_number(value: Any) -> bool:
    entries = value if isinstance(value, (tuple, list)) else [value]
    return len(entries) <= 2 and all(isinstance(entry, (int, float)) for entry in entries)


def _weighted(value: Any) -> tuple[float, float]:
    return (float(value[0]), float(value[1])) if isinstance(value, (tuple, list)) else (float(value), 1.0)


def over_documents(
    task: str, metric: str, pairs: Iterable[tuple[float, float, float]], better: bool | None
) -> Difference:
    """The paired difference over documents, each given as value of a, value of b, weight."""
    from scipy.stats import t as student

    rows = list(pairs)
    n, total = len(rows), sum(weight for _, _, weight in rows)
    a, b = sum(row[0] for row in rows) / total, sum(row[1] for row in rows) / total
    difference = sum(row[1] - row[0] for row in rows) / total
    stderr = low = high = None
    if n > 1:
        squares = sum((b_i - a_i - difference * weight) ** 2 for a_i, b_i, weight in rows)
        stderr = math.sqrt(n / (n - 1) * squares) / total
        reach = float(student.ppf((1 + CONFIDENCE) / 2, n - 1)) * stderr
        low, high = difference - reach, difference + reach
    return Difference(task, metric, "documents", n, a, b, difference, stderr, low, high, better)


def over_tasks(label: str, members: Sequence[Difference]) -> Difference:
    """The mean of tasks' differences, each task weighing the same; tasks are independent, the interval is the normal one."""
    count = len(members)
    errors = [member.stderr for member in members if member.stderr is not None]
    difference = sum(member.difference for member in members) / count
    stderr = low = high = None
    if len(errors) == count:
        stderr = math.sqrt(sum(error**2 for error in errors)) / count
        reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * stderr
        low, high = difference - reach, difference + reach
    a, b = sum(member.a for member in members) / count, sum(member.b for member in members) / count
    better = members[0].higher_is_better
    return Difference(label, members[0].metric, "tasks", count, a, b, difference, stderr, low, high, better)


def compare(result_a: Mapping[str, Any], result_b: Mapping[str, Any]) -> dict[str, Any]:
    """b − a, paired over documents.

    Args:
        result_a, result_b: what `evaluate` returned for the same tasks and limit, with samples (`log_samples`).

    Returns:
        `tasks`: one entry per task, metric and filter, with the attributes of `Difference`; `pooled`: the same over the documents
        of each group (of all tasks, where they are in no group), and over its tasks with one weight each, for each metric that
        two or more of them have; `left_out`: metrics that are no means over documents.

    Raises:
        Refused: other tasks, or other documents.
    """
    names = list(result_a["samples"])
    if set(names) != set(result_b["samples"]):
        raise Refused("compare: the two results are of other tasks, allowed: the same")
    values: dict[str, dict[Key, Pairs]] = {}
    left_out: set[str] = set()
    for task in names:
        values[task], odd = paired_values(result_a, result_b, task)
        left_out |= odd

    def better(task: str, metric: str) -> bool | None:
        return result_a.get("higher_is_better", {}).get(task, {}).get(metric.removeprefix("log "))

    def pooled(label: str, leaves: Sequence[str], key: Key) -> Difference | None:
        having = [task for task in leaves if key in values[task]]
        rows = [pair for task in having for pair in values[task][key].values()]
        return over_documents(label, _shown(key), rows, better(having[0], key[0])) if rows else None

    rows = [over_documents(task, _shown(key), pairs.values(), better(task, key[0]))
            for task in names for key, pairs in values[task].items()]  # fmt: skip
    groups = {name: list(members) for name, members in (result_a.get("group_subtasks") or {}).items() if members}
    inside = {member for members in groups.values() for member in members}
    outermost = [name for name in [*groups, *names] if name not in inside]
    tree = groups if len(outermost) == 1 else {**groups, "all tasks": outermost}
    summaries: list[Difference] = []
    for label, members in tree.items():
        leaves = {member: _leaves(member, groups) for member in members}
        everything = [leaf for group in leaves.values() for leaf in group if leaf in values]
        for key in dict.fromkeys(key for leaf in everything for key in values[leaf]):
            parts = [pooled(member, [leaf for leaf in leaves[member] if leaf in values], key) for member in members]
            found = [part for part in parts if part is not None]
            if len(found) > 1:
                whole = pooled(label, everything, key)
                summaries += [part for part in (whole, over_tasks(label, found)) if part is not None]
    return {
        "tasks": [asdict(row) for row in rows],
        "pooled": [asdict(row) for row in summaries],
        "left_out": sorted(left_out),
    }


def _shown(key: Key) -> str:
    metric, filter_name = key
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


def _leaves(name: str, groups: Mapping[str, Sequence[str]]) -> list[str]:
    if name not in groups:
        return [name]
    return [leaf for member in groups[name] for leaf in _leaves(member, groups)]


def comparison_table(comparison: Mapping[str, Any], name_a: str, name_b: str) -> Table:
    """What `compare` returned as a table: b − a with its 95% interval; an interval without zero is marked with *."""
    table = Table(caption=f"a: {name_a}\nb: {name_b}\nb − a, paired over documents, 95% intervals; *: without zero")
    for name in ("task", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("a", "b", "b − a", "± stderr", "95%", "over"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in [*comparison["tasks"], *comparison["pooled"]]:
        arrow = {True: " ↑", False: " ↓"}.get(row["higher_is_better"], "")
        interval, stderr = "–", "–"
        if row["stderr"] is not None:
            mark = "" if row["low"] <= 0 <= row["high"] else " *"
            interval, stderr = f"{row['low']:+.4f} … {row['high']:+.4f}{mark}", f"{row['stderr']:.4f}"
        numbers = (f"{row['a']:.4f}", f"{row['b']:.4f}", f"{row['difference']:+.4f}", stderr, interval)
        table.add_row(row["task"], row["metric"] + arrow, *numbers, f"{row['count']} {row['over']}")
    return table
