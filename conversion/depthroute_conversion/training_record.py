# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a training run noted in `depthroute_run.json`, as rows of a card."""

import re
import shlex
from typing import Any

from .evaluations import number


def training_rows(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and value of what `depthroute_run.json` says, with names in place of paths."""
    data, parameters = run.get("data", {}), run.get("parameters", {})
    trained, validation = run.get("train") or {}, run.get("validation") or {}
    steps = [entry["step"] for entry in run.get("log", []) if "step" in entry]
    rows = {
        "started from": _name(str(run.get("model", ""))),
        "training data": _data(data, "train"),
        "validation data": _data(data, "validation"),
        "examples": _examples(data),
        "parameters trained": f"{parameters['trainable']:,} of {parameters['total']:,}" if parameters else None,
        "learning rate": _rate(run.get("learning_rate")),
        "learning rate of the routing": _rate(run.get("routing_learning_rate")),
        "steps": str(steps[-1]) if steps else None,
        "training loss": _figure(trained.get("train_loss")),
        "validation loss": _figure(validation.get("eval_loss")),
        "validation perplexity": _figure(validation.get("eval_perplexity")),
        "seed": str(run["seed"]) if "seed" in run else None,
        "versions": ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items()) or None,
        "command": without_paths(run["command"]) if run.get("command") else None,
    }
    return [(label, value) for label, value in rows.items() if value]


def _data(data: dict[str, Any], part: str) -> str | None:
    if files := data.get(f"{part}_files"):
        return ", ".join(files)
    if (split := data.get(f"{part}_split")) and data.get("dataset"):
        named = [data["dataset"], *([data["dataset_config"]] if data.get("dataset_config") else [])]
        return f"{' / '.join(named)}, split {split}"
    if part == "validation" and data.get("validation_fraction"):
        return f"{data['validation_fraction']} of the training documents, set aside"
    return None


def _examples(data: dict[str, Any]) -> str | None:
    if "train_blocks" not in data:
        return None
    held_out = f", {data['validation_blocks']:,} for validation" if data.get("validation_blocks") else ""
    return f"{data['train_blocks']:,} of {data['block_size']:,} tokens{held_out}"


def _rate(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _figure(value: float | None) -> str | None:
    return None if value is None else number(value)


def _name(path: str) -> str:
    """A path's last part; a hub id stays as it is."""
    absolute = path.startswith(("/", "~", ".")) or re.match(r"[A-Za-z]:[\\/]", path)
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] if absolute or path.count("/") > 1 else path


def without_paths(command: str) -> str:
    """A command with the last part of every path in its place."""
    parts = []
    for word in shlex.split(command):
        option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        parts.append(f"{option}{equals}{_name(value)}" if value else word)
    return shlex.join(parts)
