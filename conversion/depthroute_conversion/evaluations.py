# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The figures of lm-eval's results, as rows: for a card's table, and for the hub's model index."""

import math
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from depthroute.errors import Refused, one_line

from .record import read_mapping


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LOCAL_DATA = ("json", "csv", "parquet", "text", "arrow", "pandas")
"""What lm-eval calls the data set of a task that reads files: no data set of the hub."""


def read_evaluations(file: Path, folder: Path, base_model: str | None = None) -> list[dict[str, Any]]:
    """One row for each task and metric of a file that `depthroute eval --json` or lm_eval wrote.

    A row has model, own (it is about the model in `folder`, and not about `base_model` or any other), task, metric, filter, value
    (None where it is not finite), stderr, higher_is_better, documents, limited (not all documents were used), shots, chat_template,
    dataset, dataset_config, split, dtype, lm_eval, date.

    Raises:
        Refused: it is no such file, or has no figure.
    """
    result = read_mapping(file)
    if not file.is_file() or not all(isinstance(result.get(key), dict) for key in ("results", "config", "configs")):
        raise Refused(f"{file}: got no evaluation, allowed: a file that `depthroute eval --json` wrote")
    named = _model(result)
    about = {"model": named if _HUB_ID.fullmatch(named) else _last_part(named), "own": _is(named, folder, base_model)}
    try:
        rows = [{**about, **row} for task in result["results"] for row in _task_rows(result, task)]
        table_rows(rows)
        model_index(rows, "text-generation")
    except (AttributeError, TypeError, LookupError, ValueError, OverflowError) as error:
        raise Refused(
            f"{file}: {type(error).__name__}: {one_line(error)}; allowed: a file that `depthroute eval --json` wrote"
        ) from error
    if not rows:
        raise Refused(f"{file}: got no figure, allowed: results with at least one")
    return rows


def _task_rows(result: dict[str, Any], task: str) -> list[dict[str, Any]]:
    values, settings = result["results"][task], result["config"]
    about = result["configs"].get(task, {})
    date = result.get("date")
    common = {
        "task": task,
        "documents": result.get("n-samples", {}).get(task, {}).get("effective"),
        "limited": settings.get("limit") is not None,
        "shots": result.get("n-shot", {}).get(task),
        "chat_template": bool(result.get("chat_template") or settings.get("apply_chat_template")),
        "dataset": about.get("dataset_path"),
        "dataset_config": about.get("dataset_name"),
        "split": about.get("test_split") or about.get("validation_split"),
        "dtype": str(settings.get("model_dtype", "")).removeprefix("torch."),
        "lm_eval": result.get("lm_eval_version"),
        "date": datetime.fromtimestamp(date, timezone.utc).date().isoformat() if date else None,
    }
    rows = []
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr") or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        stderr = values.get(f"{metric}_stderr,{filtered}")
        better = result.get("higher_is_better", {}).get(task, {}).get(metric)
        figures = {"metric": metric, "filter": filtered, "value": _finite(value), "higher_is_better": better}
        rows.append({**common, **figures, "stderr": _finite(stderr) if isinstance(stderr, (int, float)) else None})
    return rows


def _finite(value: float) -> float | None:
    """None for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _model(result: dict[str, Any]) -> str:
    """What was evaluated: a hub id or a path."""
    named, arguments = result["config"].get("model"), result["config"].get("model_args")
    if isinstance(arguments, dict):
        named = arguments.get("pretrained", named)
    elif isinstance(arguments, str) and (match := re.search(r"pretrained=([^,]+)", arguments)):
        named = match[1]
    return str(named or "unnamed")


def _last_part(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _is(named: str, folder: Path, base_model: str | None) -> bool:
    if Path(named).is_dir():
        return Path(named).samefile(folder)
    return named != base_model and _last_part(named) == folder.resolve().name


def merged(rows: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both, a new row in place of an older one of the same model, task, metric and setting."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in ("model", "task", "metric", "filter", "shots", "chat_template"))

    return list({place(row): row for row in [*rows, *new]}.values())


def table_rows(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The heading, and a line for each row."""
    lines: list[tuple[str, ...]] = [("model", "task", "metric", "value", "± stderr", "documents", "shots")]
    for row in rows:
        arrow = {True: " ↑", False: " ↓"}.get(row["higher_is_better"], "")
        filtered = "" if row["filter"] == "none" else f" ({row['filter']})"
        documents = "–" if row["documents"] is None else f"{'first ' if row['limited'] else ''}{row['documents']}"
        value = "not finite" if row["value"] is None else number(row["value"])
        stderr = "–" if row["stderr"] is None else number(row["stderr"])
        shots = "–" if row["shots"] is None else str(row["shots"])
        name = f"{row['metric']}{filtered}{arrow}"
        lines.append((row["model"], row["task"], name, value, stderr, documents, shots))
    return lines


def number(value: float) -> str:
    """Four decimals, or four digits where that would hide a value's size."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.4g}"


def model_index(rows: list[dict[str, Any]], task_type: str) -> list[EvalResult]:
    """For the hub: this model's figures that are of all documents of their task."""
    results = []
    for row in rows:
        if row["limited"] or not row["own"] or row["value"] is None:
            continue
        of_hub = row["dataset"] and row["dataset"] not in _LOCAL_DATA and not Path(row["dataset"]).is_absolute()
        filtered = "" if row["filter"] == "none" else f", {row['filter']}"
        results.append(
            EvalResult(
                task_type=task_type,
                dataset_type=row["dataset"] if of_hub else row["task"],
                dataset_name=row["task"],
                dataset_config=row["dataset_config"] if of_hub else None,
                dataset_split=row["split"],
                metric_type=row["metric"],
                metric_name=f"{row['metric']}{filtered} ({row['shots']}-shot)"
                if row["shots"] is not None
                else row["metric"],
                metric_value=row["value"],
                metric_args=None if row["shots"] is None else {"num_few_shot": row["shots"]},
            )
        )
    return results
