# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The lower half of a study's page: routing measures, limits, what the run was and cost, its commands."""

from collections.abc import Mapping, Sequence
from typing import Any

from depthroute_conversion.card import table

from .page_tables import group_heading, mean_and_spread
from .paired import WINDOWS, Comparison, measures_of, ordered_groups, values_of
from .wording import listed, number, plural


_DIGITS = 3
_MAX, _UNIFORM = "max weight", "uniform weight"


def routing(results: Mapping[str, Any]) -> str:
    """What was measured of the trained models, mean ± standard deviation over seeds, a table per group; empty where no arm has
    measures."""
    tables = []
    for group, entry in ordered_groups(results).items():
        arms = {name: arm["runs"] for name, arm in entry["arms"].items() if any(run["measures"] for run in arm["runs"])}
        names = list(dict.fromkeys(name for runs in arms.values() for run in runs for name in measures_of(run)))
        # where routing collapses is what papers speak of: the deepest third first
        names = sorted(
            (name for name in names if not name.startswith(_UNIFORM)), key=lambda name: "deepest" not in name
        )
        if names:
            rows = [("", *(f"`{name}`" for name in arms))]
            rows += [(name, *(_measure_cell(runs, name) for runs in arms.values())) for name in names]
            tables.append(group_heading(results, group) + table(rows).strip())
    if not tables:
        return ""
    told = (
        "Of the trained models on validation text, mean ± standard deviation over seeds. “Deepest third”: over that third of the "
        "reads; in brackets what routing that chooses nothing would give, the mean of 1/S for S sources. Sharpness: (max weight − 1/S) / "
        "(1 − 1/S), from 0 for uniform weights to 1 for one source alone, over the reads of that third of the layers without the "
        "final read; by it arms with other numbers of sources can be compared."
    )
    return "\n\n".join([told, *tables])


def _measure_cell(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    values = values_of(runs, name)
    if not values:
        return "–"
    uniform = values_of(runs, name.replace(_MAX, _UNIFORM)) if name.startswith(_MAX) else []
    return mean_and_spread(values, _DIGITS) + (f" ({number(sum(uniform) / len(uniform), _DIGITS)})" if uniform else "")


def caveats(results: Mapping[str, Any], compared: Sequence[Comparison]) -> str:
    """What these results cannot say: the definition's notes, and what follows from the numbers of seeds."""
    told = list(results["definition"].get("notes") or [])
    seeds = sorted({run["seed"] for *_, arm in _arms(results) for run in arm["runs"]})
    missing = [seed for seed in results["planned"]["seeds"] if seed not in seeds]
    if missing:
        told.append(f"Planned and not run: seeds {_numbers(missing)}.")
    if results["planned"]["note"]:
        told.append(results["planned"]["note"])
    if any(row.difference is not None and row.difference.over == WINDOWS for row in compared):
        told.append("Differences over the windows of one seed are those of single runs.")
    fewer = [
        f"`{name}`{f' at {group}' if len(results['groups']) > 1 else ''} ({plural(len(arm['runs']), 'seed')})"
        for group, name, arm in _arms(results)
        if len(arm["runs"]) < len(seeds)
    ]
    if fewer:
        told.append(
            f"Fewer seeds than the others have: {listed(fewer)}. Each is compared over the seeds it has in common."
        )
    return "\n".join(f"- {note.strip()}" for note in told) or "None are noted."


def run_facts(results: Mapping[str, Any]) -> str:
    """Where, when, on what, how long."""
    machine, seconds, text = results["machine"], results["seconds"], results["text"]
    seeds = sorted({run["seed"] for *_, arm in _arms(results) for run in arm["runs"]})
    count = sum(len(arm["runs"]) for *_, arm in _arms(results))
    commit = f"`{results['commit']}`" if results["commit"] else "not known (no repository)"
    rows = [
        ("", ""),
        ("command", f"`{results['command']}`"),
        ("commit, date", f"{commit}, {results['date']}"),
        (
            "machine",
            f"{machine['processor']}, {plural(machine['cores'], 'core')}, {machine['device']}; {plural(machine['workers'], 'run')} "
            f"at a time, {plural(machine['threads_per_run'], 'thread')} each; Python {machine['python']}, torch {machine['torch']}, "
            f"transformers {machine['transformers']}",
        ),
        (
            "time",
            f"forecast {_minutes(seconds['forecast'])}, taken {_minutes(seconds['elapsed'])} (sum over runs "
            f"{_minutes(seconds['runs'])})",
        ),
        ("runs", f"{count}, seeds {_numbers(seeds)}"),
        ("tokens per run", _per_arm(results, "tokens", ",")),
        ("steps", _per_arm(results, "steps", ",")),
        ("learning rate; of the routing", f"{_per_arm(results, 'learning_rate', 'g')}; "
         f"{_per_arm(results, 'routing_learning_rate', 'g')}"),
        ("text", _text(text)),
        *([("checkpoint", text["base"])] if text.get("base") else []),
    ]  # fmt: skip
    return table(rows).strip()


def _text(text: Mapping[str, Any]) -> str:
    told = text["name"]
    counts = [
        f"{text[key]:,} documents {what}"
        for key, what in (("train_documents", "for training"), ("validation_documents", "for validation"))
        if text.get(key) is not None
    ]
    told += f": {listed(counts)}" if counts else ""
    return told + (f" (digest `{text['digest']}`)" if text.get("digest") else "")


def commands(results: Mapping[str, Any]) -> str:
    """One `depthroute train` per arm, folded away."""
    several = len(results["groups"]) > 1
    lines = [
        f"# {f'{group}, ' if several else ''}{name}: seed {arm['runs'][0]['seed']}\n{arm['command']}"
        for group, name, arm in _arms(results)
        if arm["runs"]
    ]
    return (
        "<details>\n<summary>The runs one by one: the first seed's command of every arm</summary>\n\n```bash\n"
        + "\n".join(lines)
        + "\n```\n\n</details>"
    )


def _arms(results: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [
        (group, name, arm) for group, entry in ordered_groups(results).items() for name, arm in entry["arms"].items()
    ]


def _per_arm(results: Mapping[str, Any], field: str, form: str) -> str:
    """One value where all arms have the same, else all that occur, with whose they are."""
    by_value: dict[Any, list[str]] = {}
    several = len(results["groups"]) > 1
    for group, name, arm in _arms(results):
        if arm[field] is not None:
            by_value.setdefault(arm[field], []).append(f"{name} at {group}" if several else name)
    if not by_value:
        return "none"
    if len(by_value) == 1:
        return format(next(iter(by_value)), form)
    common = max(by_value, key=lambda value: len(by_value[value]))
    told = [f"{value:{form}} ({', '.join(names)})" for value, names in by_value.items() if value != common]
    return f"{common:{form}}, but {listed(told)}"


def _numbers(values: Sequence[int]) -> str:
    """`1–5`, or `1, 2, 4`."""
    if len(values) > 2 and list(values) == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}–{values[-1]}"
    return ", ".join(map(str, values))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
