# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The cards in `model_cards/`: one per preset, and the overview. Text is a function of the result files alone."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import Refused
from ..files import whole_output
from ..modeling.configuration_depthroute import PRESETS, get_preset
from .advice import own_advice
from .costs import Bench, cost_chapter, read_benches
from .evidence import CONTROL, Results, Row, all_rows, read_results, scale_sentence
from .overview import OVERVIEW, PLOT, overview
from .overview_plot import draw_overview, panels
from .preset_facts import fields_table, paper_link, parameters_sentence, starting_rules
from .verdicts import difference_told, verdicts
from .wording import NOT_FINITE, number


RESULTS_FOLDER = "evidence/results"
"""Of the studies, inside the cards' folder."""


def card(preset: str, studies: Sequence[Results], benches: Sequence[Bench]) -> str:
    """The card of a preset as Markdown.

    Args:
        preset: one of `depthroute.PRESETS`.
        studies: what `depthroute reproduce` wrote.
        benches: what `depthroute bench` wrote.

    Raises:
        ValueError: an unknown preset, with the nearest.
    """
    spec, advice = get_preset(preset), own_advice()[0][preset]
    return f"""# `{preset}`

    {spec.equation}

From: {paper_link(preset)}. All presets beside each other: [{OVERVIEW}]({OVERVIEW}). Written by `depthroute cards`.

- **Take it**: {_lower(advice.take)}
- **Leave it**: {_lower(advice.leave)}
- **Watch**: {_lower(advice.watch)}

## Evidence

{_evidence_chapter(preset, studies)}
## Cost

{cost_chapter(preset, benches)}
## Parameters added

{parameters_sentence(preset)}

## How it starts

{_bullets(starting_rules(preset))}
## Fields

`DepthRouteConfig.from_preset("{preset}")`; on the sizes of Qwen3-0.6B; bold: not the default.

{fields_table(preset)}"""


def _lower(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:]


def _bullets(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def _evidence_chapter(preset: str, studies: Sequence[Results]) -> str:
    rows = [row for row in all_rows(studies) if row.preset == preset]
    if not rows:
        return "None yet: no committed study has an arm with this preset.\n"
    lines = [
        "| study | arm | against | difference of validation loss | rounding alone | loss | model, tokens, seeds |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(row))} |" for row in rows),
    ]
    explained = (
        f"The arm minus what it is compared with, on the same seeds, nats per token; negative is better. Against `{CONTROL}` where the study has it, else "
        "against the study's baseline. Rounding alone: root mean square of the difference of two runs that differ in rounding only."
    )
    claims = _claims(preset, studies)
    return f"{explained}\n\n" + "\n".join(lines) + f"\n\n{scale_sentence(rows)}\n{claims}"


def _cells(row: Row) -> list[str]:
    start = "converted" if row.converts else "from scratch"
    form = "" if not row.variation else "; " + ", ".join(f"`{name}={value}`" for name, value in row.variation.items())
    told = "the others are compared with it" if row.against is None else "no seed in common"
    if row.difference is not None:
        told = difference_told(row.difference)
    return [
        row.link,
        f"{row.arm}: {start}{form}",
        "–" if row.against is None else f"`{row.against}`",
        told,
        "not measured" if row.noise is None else f"±{number(row.noise.level)}",
        NOT_FINITE if row.loss is None else number(row.loss),
        f"{row.parameters / 1e6:.3g}M, {row.tokens / 1e6:.3g}M, {row.seeds}",
    ]


def _claims(preset: str, studies: Sequence[Results]) -> str:
    """What papers say of the preset, in their figures, and what came out here."""
    lines = []
    for results in studies:
        presets = {name: arm["preset"] for name, arm in results["definition"].get("arms", {}).items()}
        for entry in results["groups"].values():
            presets |= {name: arm["preset"] for name, arm in entry["arms"].items()}
        for found in verdicts(results):
            if presets.get(found.claim["arm"]) == preset:
                group = "" if found.group == "all" else f", {found.group}"
                where = f"{results['study']}{group}" + ("" if results["size"] == "cpu" else f", {results['size']}")
                lines.append(
                    f"“{found.claim['says']}” (paper: {results['paper']}). Here ({where}): **{found.verdict}**; {found.reason}."
                )
    return (
        f"\nWhat was expected, a paper's statements with its figures, and what came out here:\n\n{_bullets(lines)}"
        if lines
        else ""
    )


def write_cards(folder: str | Path) -> list[str]:
    """Write the card of every preset, the overview and its plot, from the results of the studies in `evidence/results` there
    and those of `depthroute bench` that come with the package. All of them or none.

    Args:
        folder: `model_cards` of a checkout.

    Returns:
        The names of the files written.

    Raises:
        Refused: the folder does not exist, a result file is not as its command wrote it, a study's page is missing, or
            matplotlib is not installed. Nothing is written then.
    """
    target = Path(folder)
    if not target.is_dir():
        raise Refused(f"{target}: no such folder, allowed: the folder with evidence/results, in a checkout model_cards")
    studies, benches = read_results(target / RESULTS_FOLDER), read_benches()
    for page in sorted({row.page for row in all_rows(studies)}):
        if not (target / page).is_file():
            raise Refused(
                f"{target / page}: missing beside its results, allowed: the page that `depthroute reproduce` wrote"
            )
    texts = {f"{preset}.md": card(preset, studies, benches) for preset in PRESETS}
    texts[OVERVIEW] = overview(studies, benches)
    drawn = bool(panels(studies, benches))
    with whole_output(target, overwrite=True) as partial:
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")
        if drawn:
            draw_overview(studies, benches, partial / PLOT)
    if not drawn:
        (target / PLOT).unlink(missing_ok=True)  # of results that are gone
    return [*texts, *([PLOT] if drawn else [])]
