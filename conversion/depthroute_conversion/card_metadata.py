# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The head of a model card: what the hub reads, made from a folder's facts, and checked without a network."""

import re
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from depthroute.errors import one_line

from .evaluations import model_index
from .record import UNPUBLISHED, Facts, metadata_of


PIPELINES = {
    "DepthRouteForCausalLM": ("text-generation", "text-ranking"),
    "DepthRouteModel": ("feature-extraction", "sentence-similarity"),
    "DepthRouteForSequenceClassification": ("text-classification", "text-ranking", "zero-shot-classification"),
    "DepthRouteForTokenClassification": ("token-classification",),
    "DepthRouteForQuestionAnswering": ("question-answering",),
}
"""What a model of a class is used for: by default the first; the others where the source's card says so."""

RELATIONS = ("finetune", "quantized", "merge", "adapter")
"""How the hub may be told that a model relates to its base."""

_LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def card_metadata(facts: Facts) -> dict[str, Any]:
    """What the hub reads of this folder. Figures in the model index are those of its evaluations."""
    hub = facts.hub
    base = hub.get("base_model")
    base = None if base == UNPUBLISHED else base
    allowed = PIPELINES.get(facts.architecture, PIPELINES["DepthRouteForCausalLM"])
    pipeline = "sentence-similarity" if facts.sentence_transformers else allowed[0]
    if hub.get("pipeline_tag") in allowed:
        pipeline = hub["pipeline_tag"]
    results = model_index(facts.evaluations, pipeline)
    data = ModelCardData(
        library_name="sentence-transformers" if facts.sentence_transformers else "transformers",
        pipeline_tag=pipeline,
        base_model=base,
        base_model_relation="finetune" if base else None,
        license=hub.get("license"),
        license_name=hub.get("license_name"),
        license_link=hub.get("license_link"),
        language=hub.get("language"),
        datasets=sorted({name for run in facts.runs if (name := _hub_dataset(run))}) or None,
        tags=[
            "depthroute",
            facts.config.preset_name,
            "custom_code",
            *(["sentence-transformers"] if facts.sentence_transformers else []),
        ],
        model_name=facts.name if results else None,
        eval_results=results or None,
    )
    return {key: value for key, value in data.to_dict().items() if value is not None}


def _hub_dataset(run: dict[str, Any]) -> str | None:
    name = run.get("data", {}).get("dataset")
    return name if name and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) else None


def dump(metadata: dict[str, Any]) -> str:
    """As YAML."""
    return yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).strip()


def problems(card: str, converted: bool) -> list[str]:
    """What keeps the hub, or its readers, from using a card: one line each, naming the entry; none for a good one.

    Args:
        converted: the model comes from another, which the card has to name.
    """
    metadata = metadata_of(card)
    if not metadata:
        return ["metadata: got none, allowed: a head in YAML between two lines of ---"]
    try:
        ModelCard(card)
    except (ValueError, TypeError, AttributeError) as error:
        return [f"metadata: {one_line(error)}"]
    found = [*_license_problems(metadata)]
    if converted and "base_model" not in metadata:
        found.append("base_model: missing, allowed: the id of what was converted (--base-model ORG/NAME)")
    bases = metadata.get("base_model", [])
    for base in bases if isinstance(bases, list) else [bases]:
        try:
            validate_repo_id(base)
        except HFValidationError:
            found.append(f"base_model: got {base!r}, allowed: a hub id (ORG/NAME)")
    relation = metadata.get("base_model_relation")
    if relation is not None and relation not in RELATIONS:
        found.append(f"base_model_relation: got {relation!r}, allowed: {', '.join(RELATIONS)}")
    spoken = metadata.get("language", [])
    for language in spoken if isinstance(spoken, list) else [spoken]:
        if not (isinstance(language, str) and _LANGUAGE.fullmatch(language)):
            found.append(f"language: got {language!r}, allowed: ISO 639 codes, multilingual, code")
    found += [f"{key}: missing" for key in ("library_name", "pipeline_tag", "tags") if not metadata.get(key)]
    return found


def _license_problems(metadata: dict[str, Any]) -> list[str]:
    license_id = metadata.get("license")
    if license_id is None:
        return ["license: missing, allowed: an id of the hub (--license apache-2.0, …), or other with --license-name"]
    ids = license_id if isinstance(license_id, list) else [license_id]
    if not all(isinstance(one, str) and _LICENSE.fullmatch(one) for one in ids):
        return [f"license: got {license_id!r}, allowed: an id of the hub, in small letters (apache-2.0, …)"]
    if "other" in ids and not metadata.get("license_name"):
        return ["license_name: missing, allowed with license other: a name (--license-name)"]
    return []
