# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A study's page, `model_cards/evidence/NAME.md`, from its results alone: the answer first, then what it rests on."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..evaluation.compare import CONFIDENCE
from .evidence import rows_of, scale_sentence
from .page_details import caveats, commands, routing, run_facts
from .page_tables import arms_tables, claims_table, noise_facts
from .paired import SEEDS, Comparison, comparisons
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
        f"**Scale.** {scale_sentence(rows_of(results))}{_direction_only(judged)}",
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
    """What came out, in a few sentences: how many claims hold, and the differences that are clear of zero."""
    told = []
    if judged:
        counts = {verdict: count for verdict, count in counted(judged).items() if count}
        parts = [f"{count} {_LISTS[verdict][1 if count == 1 else 2]}" for verdict, count in counts.items()]
        claims = plural(len({one.number for one in judged}), "claim")
        of = claims if len(results["groups"]) == 1 else f"{plural(len(judged), 'verdict')} on {claims}"
        told.append(f"Of {of}, {listed(parts)}.")
    every = [
        (row, row.difference) for row in compared if row.difference is not None and row.arm != results["noise_arm"]
    ]
    rows = [(row, difference) for row, difference in every if difference.over == SEEDS]
    if not every:
        return " ".join([*told, f"There is nothing to compare with `{results['baseline']}`."])
    clear = sorted((difference.mean, row.arm, row.group) for row, difference in rows if row.clear)
    lower = [entry for entry in clear if entry[0] < 0]
    higher = [entry for entry in reversed(clear) if entry[0] > 0]
    for way, chosen in (("lower", lower), ("higher", higher)):
        if chosen:
            names = _named(chosen, len(results["groups"]) > 1)
            told.append(f"Validation loss is {way} than with `{results['baseline']}`, in nats: {names}.")
    if rows and len(clear) < len(rows):
        unclear = f"{len(rows) - len(clear)} of {len(rows)}" if clear else f"0 of {len(rows)}"
        told.append(
            f"{unclear} comparisons with `{results['baseline']}` {'cannot' if clear else 'can'} be told from zero{_uncorrected(compared)}."
        )
    if single := len(every) - len(rows):
        told.append(
            f"{plural(single, 'arm')} ran with one seed: another may give something else, and nothing is concluded from them."
        )
    return " ".join(told)


def _named(chosen: Sequence[tuple[float, str, str]], several: bool) -> str:
    names = [f"`{arm}`{f' at {group}' if several else ''} ({signed(mean)})" for mean, arm, group in chosen]
    rest = len(names) - _NAMED_AT_ONCE
    return listed([*names[:_NAMED_AT_ONCE], f"{rest} more"] if rest > 0 else names)


def _uncorrected(compared: Sequence[Comparison]) -> str:
    """How many intervals would be clear of zero, were each the only one."""
    level = 1 - CONFIDENCE
    p_values = [(row.difference.p_value, row.adjusted_p) for row in compared if row.difference is not None]
    alone = sum(p is not None and adjusted is not None and p < level <= adjusted for p, adjusted in p_values)
    return f" ({alone} could, had each been the only one)" if alone else ""


def _direction_only(judged: Sequence[Verdict]) -> str:
    return " A verdict is on the direction that a claim states, not on the size of a paper's figure." if judged else ""


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
