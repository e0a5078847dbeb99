# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The files in a model folder that its card is made of. Each is written by a command; a card has no number of its own.

depthroute_conversion.json    `convert`: what was converted, how, and what verification found; what the hub is told of the source
depthroute_run.json           `train`: data, rates, losses
depthroute_evaluations.json   `card --results`: the figures of `eval`'s results, without what they say about the machine
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from depthroute import DepthRouteConfig, __version__
from depthroute.errors import Refused
from depthroute.files import write_json

from .reports import ConversionReport
from .routing import read_converted_config
from .source import Source


RECORD, RUN, EVALUATIONS = "depthroute_conversion.json", "depthroute_run.json", "depthroute_evaluations.json"
MADE_OF = (RECORD, RUN, EVALUATIONS)
CARD = "README.md"
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""What a source's card says that holds for its conversion."""

UNPUBLISHED = "none"
"""In place of a base model's hub id: it has none."""

_CACHED = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")


@dataclass(frozen=True)
class Facts:
    """A model folder as its card sees it.

    Attributes:
        name: what the model is called.
        config: its configuration.
        architecture: the class that it names.
        record: what `convert` wrote, empty where nothing was converted.
        runs: what `train` wrote, the latest last.
        evaluations: rows of `evaluations.py`.
        sentence_transformers: whether it has the modules of an embedding model.
    """

    name: str
    config: DepthRouteConfig
    architecture: str
    record: dict[str, Any] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    sentence_transformers: bool = False

    @property
    def hub(self) -> dict[str, Any]:
        """What the hub is told of the source: base model, licence, languages. A folder that was trained from a conversion and
        has no record still says in its configuration what it was converted from."""
        origin = (getattr(self.config, "converted_from", None) or {}).get("hub_id")
        return {**({"base_model": origin} if origin else {}), **self.record.get("hub", {})}

    @property
    def verification(self) -> dict[str, Any] | None:
        """What `verify` found, with `failure`: why that does not count, or None."""
        return self.record.get("verification")


def read_facts(folder: Path, name: str | None = None) -> Facts:
    """
    Raises:
        Refused: no DepthRoute model folder, or a file in it that no command wrote.
    """
    config = read_converted_config(folder)
    record, run, evaluations = (read_mapping(folder / file) for file in MADE_OF)
    parts = {
        RECORD: [record.get("hub", {}), record.get("conversion", {}), record.get("verification") or {}],
        RUN: run.get("earlier_runs", []),
        EVALUATIONS: evaluations.get("rows", []),
    }
    for file, values in parts.items():
        if not (isinstance(values, list) and all(isinstance(value, dict) for value in values)):
            raise Refused(f"{folder / file}: got no JSON objects in it, allowed: as a command wrote it")
    return Facts(
        name=name or folder.resolve().name,
        config=config,
        architecture=(config.architectures or ["DepthRouteForCausalLM"])[0],
        record=record,
        runs=[*run.get("earlier_runs", []), run] if run else [],
        evaluations=evaluations.get("rows", []),
        sentence_transformers=(folder / "modules.json").is_file(),
    )


def read_mapping(file: Path) -> dict[str, Any]:
    """A JSON file's object; empty where there is no such file.

    Raises:
        Refused: it is no readable JSON object.
    """
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{file}: {type(error).__name__}, allowed: a readable JSON object") from error
    if not isinstance(value, dict):
        raise Refused(f"{file}: got a {type(value).__name__}, allowed: a JSON object")
    return value


def write_record(
    folder: Path, source: Source, command: str, report: ConversionReport, weights: Mapping[str, str]
) -> None:
    """Write `depthroute_conversion.json`, with the SHA-256 of the files of weights. It names no path of this machine."""
    values = {**report.to_dict(), "out": Path(report.out).name}
    verification = values.pop("verification")
    if report.verification is not None:
        verification |= {"allow_gap": True, "failure": report.verification.failure(allow_gap=True)}
    write_json(
        folder / RECORD,
        {
            "depthroute_version": __version__,
            "command": command,
            "hub": hub_facts(source),
            "conversion": values,
            "verification": verification,
            "weights": dict(weights),
        },
    )


def hub_facts(source: Source) -> dict[str, Any]:
    """Base model, licence and languages of what is converted.

    The base model is the source itself where that is on the hub; otherwise what its weights or its card say.
    """
    folder = source.path if source.path.is_dir() else source.path.parent
    carried = {**source_card_metadata(folder), **source.stated()}
    facts = {key: carried[key] for key in CARRIED if key in carried}
    if "language" in facts:
        facts["language"] = languages(facts["language"])
    base = source.hub_id or cached_hub_id(source.path) or carried.get("base_model")
    if base is not None:
        facts["base_model"] = base
    return facts


def cached_hub_id(path: Path) -> str | None:
    """The hub id of a folder in the hub's cache, or of a file there; None of any other."""
    for place in (path, path.parent):
        if place.parent.name == "snapshots" and (match := _CACHED.fullmatch(place.parent.parent.name)):
            return f"{match['owner']}/{match['name']}"
    return None


def languages(value: Any) -> list[str]:
    """A card's languages as a list of codes. In YAML, Norwegian without quotes is a falsehood."""
    values = value if isinstance(value, list) else [value]
    return ["no" if item is False else str(item) for item in values]


def source_card_metadata(folder: Path) -> dict[str, Any]:
    """The YAML head of a folder's `README.md`; empty where there is none or it is no YAML mapping."""
    path = folder / CARD
    return metadata_of(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def metadata_of(text: str) -> dict[str, Any]:
    """The YAML head of a card; empty where there is none or it is no YAML mapping."""
    head, *rest = text.lstrip("\ufeff").split("\n---", 1)
    if not rest or not head.startswith("---"):
        return {}
    try:
        metadata = yaml.safe_load(head[3:])
    except yaml.YAMLError:
        return {}
    return metadata if isinstance(metadata, dict) else {}
