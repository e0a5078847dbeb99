# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A study's page, `model_cards/evidence/NAME.md`, from its results alone: the answer first, then what it rests on."""

from collections.abc import Mapping, Sequence
from typing import Any

from .page_details import caveats, commands, routing, run_facts
from .page_tables import arms_tables, claims_table, noise_facts
from .paired import WINDOWS, Comparison, comparisons
from .plots import figures_of
from .verdicts import AGREES, DIFFERS, OPEN, Verdict, counted, verdicts
from .wording import listed, plural, signed, stem


_NAMED_AT_ONCE = 4
"""So many arms are named in the one sentence on what came out; the table has all."""
_LISTS = {
    AGREES: ("Claims that agree with what was measured", "agrees", "agree"),
    DIFFERS: ("Claims that do not agree", "does not", "do not"),
    OPEN: ("Too small to tell", "is too small to tell", "are too small to tell"),
}


def page(results: Mapping[str, Any]) -> str:
    """The page, in Markdown: a pure function of the results, so that a page can be compared with them later.

    Raises:
        Refused: scipy is not installed.
    """
    compared, judged = comparisons(results), verdicts(results)
    figures = list(figures_of(results))
    parts = [
        f"# {results['title']}",
        f"{results['question']}\n\nPaper: {results['paper']}. Made by `{results['command']}`; every number here is from "
        f"[{_data_file(results)}](results/{_data_file(results)}).",
        f"**What came out.** {found(results, compared, judged)}",
        _verdict_lists(results, judged),
        f"![validation loss of each arm minus that of {results['baseline']}]({figures[0]})",
        f"## Arms\n\n{arms_tables(results, compared)}",
        f"## Noise\n\n{noise_facts(results)}",
    ]
    if judged:
        parts.append(f"## Claims\n\n{claims_table(results, judged)}")
    if routed := routing(results):
        parts.append(f"## Routing\n\n{routed}")
    parts.append(
        "## By step and depth\n\n" + "\n\n".join(f"![{_title(name, results)}]({name})" for name in figures[1:])
    )
    parts.append(f"## Limits\n\n{caveats(results, compared)}")
    parts.append(f"## The run\n\n{run_facts(results)}\n\n{commands(results)}")
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _data_file(results: Mapping[str, Any]) -> str:
    return f"{results['study']}-{results['size']}.json"


def _title(figure: str, results: Mapping[str, Any]) -> str:
    return {"-depth.png": "routing by depth", "-curves.png": "loss by step"}[figure.removeprefix(stem(results))]


def found(results: Mapping[str, Any], compared: Sequence[Comparison], judged: Sequence[Verdict]) -> str:
    """What came out, in a sentence or two: how many claims hold, and the differences that are clear of zero."""
    told = []
    if judged:
        counts = {verdict: count for verdict, count in counted(judged).items() if count}
        parts = [f"{count} {_LISTS[verdict][1 if count == 1 else 2]}" for verdict, count in counts.items()]
        claims = plural(len({one.number for one in judged}), "claim")
        of = claims if len(results["groups"]) == 1 else f"{plural(len(judged), 'verdict')} on {claims}"
        told.append(f"Of {of}, {listed(parts)}.")
    several = len(results["groups"]) > 1
    rows = [row for row in compared if row.arm != results["noise_arm"] and row.difference is not None]
    clear = [(row, row.difference.mean) for row in rows if row.difference is not None and row.clear]
    for way, chosen in (
        ("lower", sorted((entry for entry in clear if entry[1] < 0), key=lambda entry: entry[1])),
        ("higher", sorted((entry for entry in clear if entry[1] > 0), key=lambda entry: -entry[1])),
    ):
        if chosen:
            names = [
                f"`{row.arm}`{f' at {row.group}' if several else ''} ({signed(mean)})"
                for row, mean in chosen[:_NAMED_AT_ONCE]
            ]
            rest = [f"{len(chosen) - _NAMED_AT_ONCE} more"] if len(chosen) > _NAMED_AT_ONCE else []
            told.append(
                f"Validation loss is {way} than with `{results['baseline']}`, in nats: {listed([*names, *rest])}."
            )
    if rows:
        open_rows = len(rows) - len(clear)
        if not clear:
            told.append(f"No arm's validation loss is told apart from that of `{results['baseline']}`.")
        elif open_rows:
            told.append(f"{plural(open_rows, 'other comparison')} of {len(rows)} cannot be told from zero.")
    else:
        told.append(f"There is nothing to compare with `{results['baseline']}`.")
    if any(row.difference is not None and row.difference.over == WINDOWS for row in rows):
        told.append("Where this rests on one seed, another may give something else.")
    return " ".join(told)


def _verdict_lists(results: Mapping[str, Any], judged: Sequence[Verdict]) -> str:
    if not judged:
        return "No claims were set down for this study."
    several = len(results["groups"]) > 1
    lines = []
    for verdict, (title, *_) in _LISTS.items():
        groups: dict[int, list[str]] = {}
        for one in judged:
            if one.verdict == verdict:
                groups.setdefault(one.number, []).append(one.group)
        says = {one.number: one.claim["says"] for one in judged}
        entries = [f"- {says[at]}{f' ({listed(where)})' if several else ''} [{at}]" for at, where in groups.items()]
        lines.append(f"**{title}**\n\n" + ("\n".join(entries) or "- none"))
    return "\n\n".join(lines)
