# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The model card of a folder, from `model_cards/template.md` and the files that commands wrote there (`record.py`).

The template has sections by topic, each between a line `<!-- only: TOPIC, TOPIC -->` and a line `<!-- end -->`; a section stands
on the card where one of its topics applies (`topics_of`). Words in it that begin with a dollar sign are filled in by `card_text`.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from depthroute import PRESETS, DepthRouteConfig
from depthroute.errors import Refused, one_line
from depthroute.files import write_json

from .card_metadata import card_metadata, dump, problems
from .evaluations import merged, read_evaluations, table_rows
from .hashes import hashes_of_weights
from .record import (
    CARD,
    EVALUATIONS,
    MADE_OF,
    RECORD,
    UNPUBLISHED,
    Facts,
    languages,
    metadata_of,
    read_facts,
    read_mapping,
    write_record,
)
from .reports import ConversionReport, read_fields
from .source import Source
from .training_record import training_rows


MEASURED = ("Conversion", "Verification", "Training", "Evaluation", "Fields")
"""The chapters that are made of files. In a card that was edited by hand these alone are renewed."""

_SECTION = re.compile(r"^<!-- only: (?P<topics>[\w, ]+) -->\n(?P<text>.*?)^<!-- end -->\n", re.MULTILINE | re.DOTALL)
_CLASS_TOPICS = {
    "DepthRouteForCausalLM": "causal_lm",
    "DepthRouteModel": "embedding",
    "DepthRouteForSequenceClassification": "classifier",
}


def template() -> str:
    """The card's template: beside this package in a wheel, in `model_cards/` of a checkout."""
    packaged = files("depthroute_conversion") / "template.md"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    return (Path(__file__).parents[2] / "model_cards" / "template.md").read_text(encoding="utf-8")


def sections_of(text: str) -> set[str]:
    """The topics that a template has sections for."""
    return {topic for match in _SECTION.finditer(text) for topic in match["topics"].split(", ")}


def with_sections(text: str, topics: set[str]) -> str:
    """The text with those of its sections that are on one of the topics."""
    return _SECTION.sub(lambda match: match["text"] if topics & set(match["topics"].split(", ")) else "", text)


def topics_of(facts: Facts) -> set[str]:
    """What a card is about: the residual type, how it starts, what it has besides, its class, and where it comes from."""
    config = facts.config
    routed = config.residual_type in ("depth_attention", "dual_stream")
    scaled = config.residual_type in ("rezero", "layerscale")
    topics = {
        "preset": config.preset_name in PRESETS,
        "custom": config.preset_name not in PRESETS,
        "anchored": routed and config.depth_anchored,
        "plain": routed and not config.depth_anchored,
        "scales_at_one": scaled and config.depth_anchored,
        "scales_at_papers_values": scaled and not config.depth_anchored,
        "value_route": config.depth_value_route != "shared",
        "details": bool(config.depth_detail_bases),
        "experts": config.num_experts > 0,
        "converted": bool(facts.record),
        "verified": facts.verification is not None,
        "unverified": bool(facts.record) and facts.verification is None,
        "trained": bool(facts.runs),
        "evaluated": bool(facts.evaluations),
        "sentence_transformers": facts.sentence_transformers,
    }
    by_class = _CLASS_TOPICS.get(facts.architecture, "other_class")
    return {config.residual_type, by_class, *(topic for topic, holds in topics.items() if holds)}


def write_card(
    folder: Path, source: Source, config: DepthRouteConfig, report: ConversionReport, weights: Mapping[str, str]
) -> None:
    """Write `depthroute_conversion.json` and `README.md` into a new folder. They name no path of this machine."""
    name = Path(report.out).name
    write_record(folder, source, conversion_command(source.label, name, report), report, weights)
    (folder / CARD).write_text(card_text(read_facts(folder, name)), encoding="utf-8")


def refresh_card(
    folder: str | Path,
    results: Sequence[str | Path] = (),
    verification: str | Path | None = None,
    base_model: str | None = None,
    license_id: str | None = None,
    license_name: str | None = None,
    license_link: str | None = None,
    language: Sequence[str] = (),
) -> list[str]:
    """Bring a folder's card up to what its files say. What was written into it by hand stays, but for the chapters `MEASURED`.

    Args:
        folder: a DepthRoute model folder: converted, trained, or made otherwise.
        results: files that `depthroute eval --json` wrote; their figures are kept in `depthroute_evaluations.json`.
        verification: file that `depthroute verify --json` wrote, of this folder.
        base_model: hub id of what was converted, or "none" where that is not on the hub.
        license_id, license_name, license_link, language: for the hub, in place of those of the source's card.

    Returns:
        What the hub still lacks, one line each; none where the card is complete.

    Raises:
        Refused: no DepthRoute model folder, a file that no command wrote, or one about another model. Nothing is written.
    """
    path = Path(folder)
    told = {"base_model": base_model, "license": license_id, "license_name": license_name, "license_link": license_link}
    told = {key: value for key, value in told.items() if value is not None}
    facts = read_facts(path)
    record = dict(facts.record)
    if told or language:
        record["hub"] = {**facts.hub, **told, **({"language": languages(list(language))} if language else {})}
    if verification is not None:
        record["verification"] = read_verification(Path(verification), path)
        record["weights"] = hashes_of_weights(path)
    rows = facts.evaluations
    for file in results:
        rows = merged(rows, read_evaluations(Path(file), path, record.get("hub", {}).get("base_model")))
    card, now = path / CARD, replace(facts, record=record, evaluations=rows)
    text = _brought_forward(card, facts, now, [*told, *(["language"] if language else [])])
    if record != facts.record:
        write_json(path / RECORD, record)
    if rows != facts.evaluations:
        write_json(path / EVALUATIONS, {"rows": rows})
    card.write_text(text, encoding="utf-8")
    return card_problems(path, text)


def current_card(folder: Path) -> str:
    """The card as the folder's files have it now, with what was written into the present one by hand. Nothing is written."""
    facts = read_facts(folder)
    return _brought_forward(folder / CARD, facts, facts, [])


def _brought_forward(card: Path, before: Facts, now: Facts, told: Sequence[str]) -> str:
    new = card_text(now)
    if not card.is_file():
        return new
    text = card.read_text(encoding="utf-8")
    # a folder may have been renamed since its card was written
    names = (before.name, str(before.record.get("conversion", {}).get("out", before.name)))
    written = [card_text(replace(before, name=name)) for name in names]
    old = next((each for each in written if _parts(each)[1] == _parts(text)[1]), written[0])
    return renewed(text, old, new, told)


def card_problems(folder: Path, text: str) -> list[str]:
    """What a folder's card lacks for the hub."""
    facts = read_facts(folder)
    return problems(text, "conversion" in facts.record and facts.hub.get("base_model") != UNPUBLISHED)


def read_verification(file: Path, folder: Path) -> dict[str, Any]:
    """What `depthroute verify --json` wrote about a folder.

    Raises:
        Refused: another file, or about another folder.
    """
    values = read_mapping(file)
    if not {"rows", "converted", "failure", "trained_routing"} <= set(values):
        raise Refused(f"{file}: got no verification, allowed: a file that `depthroute verify --json` wrote")
    rows = values["rows"]
    if not (isinstance(rows, list) and all(isinstance(row, list) and len(row) == 2 for row in rows)):
        raise Refused(f"{file}: rows: got {rows!r}, allowed: a list of labels and values")
    if values["converted"] != (name := folder.resolve().name):
        raise Refused(f"{file}: got the verification of {values['converted']!r}, allowed: of {name!r}")
    return values


def card_text(facts: Facts) -> str:
    """The whole card.

    Raises:
        Refused: one of the files that it is made of is not as its command wrote it.
    """
    try:
        return _card_text(facts)
    except (AttributeError, TypeError, LookupError, ValueError) as error:
        raise Refused(
            f"{facts.name}: {type(error).__name__}: {one_line(error)}; allowed: {', '.join(MADE_OF)} as commands wrote them"
        ) from error


def _card_text(facts: Facts) -> str:
    config, conversion = facts.config, facts.record.get("conversion", {})
    preset = PRESETS.get(config.preset_name)
    hub_id = facts.hub.get("base_model")
    label = conversion.get("source", "")
    if not conversion:
        origin = "A model"
    elif hub_id and hub_id != UNPUBLISHED:
        origin = f"[{hub_id}](https://huggingface.co/{hub_id})"
    else:
        origin = f"`{label}`"
    figures = [("figure", "value"), *map(tuple, (facts.verification or {}).get("rows", []))]
    return Template(with_sections(template(), topics_of(facts))).substitute(
        metadata=dump(card_metadata(facts)),
        name=facts.name,
        source=origin,
        preset=config.preset_name,
        equation=preset.equation if preset else "",
        paper=preset.paper if preset else "",
        command=facts.record.get("command", ""),
        fields=table([("field", "value"), *((f"`{k}`", f"`{getattr(config, k)}`") for k in read_fields(config))]),
        conversion=table([("", ""), *map(tuple, conversion.get("rows", []))]),
        figures=table(figures),
        training="\n".join(table([("", ""), *training_rows(run)]) for run in facts.runs),
        evaluation=table(table_rows(facts.evaluations)),
    )


def conversion_command(source: str, out: str, report: ConversionReport) -> str:
    """The command that repeats a conversion, with names in place of paths."""
    asked = report.requested
    parts = ["depthroute", "convert", source, out]
    if asked["preset"] is not None:
        parts += ["--preset", asked["preset"]]
    if asked["dtype"] is not None:
        parts += ["--dtype", report.dtype]
    if asked["block_size"] is not None:
        parts += ["--block-size", str(asked["block_size"])]
    if asked["anchored"] is not None:
        parts.append("--anchored" if asked["anchored"] else "--plain")
    if asked["num_heads"] not in (None, 1):
        parts += ["--heads", str(asked["num_heads"])]
    for key, value in asked["fields"].items():
        parts += ["--set", f"{key}={json.dumps(value)}"]
    if asked.get("ignore_code"):
        parts.append("--ignore-code")
    return shlex.join(parts)


def renewed(card: str, old: str, new: str, told: Sequence[str] = ()) -> str:
    """A card brought from what the folder's files said to what they say now. What was written by hand, and so is not what they
    said, stays: but for the chapters `MEASURED` and the figures in the head, which are what they say now.

    Args:
        card: as it is.
        old, new: the cards of the files then and now.
        told: entries of the head that were just asked for.
    """
    head, introduction, chapters = _parts(card)
    old_head, old_introduction, old_chapters = _parts(old)
    new_head, new_introduction, new_chapters = _parts(new)

    fixed = {*told, "model-index", "datasets"}
    by_hand = {key: value for key, value in head.items() if value != old_head.get(key) and key not in fixed}
    merged_head = {**new_head, **by_hand}
    merged_head["tags"] = list(dict.fromkeys([*new_head["tags"], *_as_list(by_hand.get("tags"))]))

    texts = {
        title: text for title, text in chapters.items() if title not in MEASURED and text != old_chapters.get(title)
    }
    order = [title for title in chapters if title in texts or title in new_chapters]
    for index, title in enumerate(new_chapters):
        if title not in chapters and (title in MEASURED or title not in old_chapters):
            before = [other for other in list(new_chapters)[:index] if other in order]
            order.insert(order.index(before[-1]) + 1 if before else len(order), title)
    if introduction == old_introduction:
        introduction = new_introduction
    return f"---\n{dump(merged_head)}\n---{introduction}{''.join(texts.get(title) or new_chapters[title] for title in order)}"


def _parts(card: str) -> tuple[dict[str, Any], str, dict[str, str]]:
    """A card's head, what stands before its first chapter, and its chapters by title, each with its heading."""
    head = metadata_of(card)
    body = card.split("\n---", 1)[1] if head else f"\n\n{card}"
    introduction, *pieces = re.split(r"^(?=## )", body, flags=re.MULTILINE)
    chapters: dict[str, str] = {}
    for piece in pieces:
        title = piece.partition("\n")[0].removeprefix("## ").strip()
        chapters[title] = chapters.get(title, "") + (piece if piece.endswith("\n") else f"{piece}\n")
    return head, introduction, chapters


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown; the first row is its heading."""
    # a bar inside a cell would end it
    lines = [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]]) + "\n"
