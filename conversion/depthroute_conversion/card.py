# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The model card of a converted folder, from `model_cards/template.md`."""

import json
import re
import shlex
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from depthroute import PRESETS, DepthRouteConfig

from .reports import ConversionReport, read_fields
from .source import Source


_CARRIED = ("license", "license_name", "license_link", "language")
_SECTION = re.compile(r"^<!-- only: (?P<topics>[\w, ]+) -->\n(?P<text>.*?)^<!-- end -->\n", re.MULTILINE | re.DOTALL)


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
    """The text with those of its sections that are on one of the topics, each between a line `<!-- only: TOPIC, TOPIC -->` and
    a line `<!-- end -->`."""
    return _SECTION.sub(lambda match: match["text"] if topics & set(match["topics"].split(", ")) else "", text)


def topics_of(config: DepthRouteConfig) -> set[str]:
    """What a card of this configuration is about: its residual type, how it starts, and what it has besides."""
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
    }
    return {config.residual_type, *(topic for topic, holds in topics.items() if holds)}


def write_card(folder: Path, source: Source, config: DepthRouteConfig, report: ConversionReport) -> None:
    """Write `README.md` into `folder`. It names no path of this machine."""
    name = Path(report.out).name
    preset = PRESETS.get(report.preset)
    if report.verification is None:
        figures = "The conversion was not verified: run `depthroute verify SOURCE FOLDER`.\n"
    else:
        figures = _table([("figure", "value"), *report.verification.rows()])
    text = Template(with_sections(template(), topics_of(config))).substitute(
        metadata=yaml.safe_dump(card_metadata(source, report), sort_keys=False, allow_unicode=True).strip(),
        name=name,
        source=f"[{source.hub_id}](https://huggingface.co/{source.hub_id})" if source.hub_id else f"`{source.label}`",
        preset=report.preset,
        equation=preset.equation if preset else "",
        paper=preset.paper if preset else "",
        command=conversion_command(source.label, name, report),
        fields=_table([("field", "value"), *((f"`{k}`", f"`{getattr(config, k)}`") for k in read_fields(config))]),
        conversion=_table([("", ""), *report.rows()]),
        figures=figures,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def conversion_command(source: str, out: str, report: ConversionReport) -> str:
    """The command that repeats a conversion, with names in place of paths."""
    asked = report.requested
    parts = ["depthroute", "convert", source, out, "--preset", asked["preset"]]
    if asked["dtype"] is not None:
        parts += ["--dtype", report.dtype]
    if asked["block_size"] is not None:
        parts += ["--block-size", str(asked["block_size"])]
    if not asked["anchored"]:
        parts.append("--plain")
    if asked["num_heads"] != 1:
        parts += ["--heads", str(asked["num_heads"])]
    for key, value in asked["fields"].items():
        parts += ["--set", f"{key}={json.dumps(value)}"]
    return shlex.join(parts)


def card_metadata(source: Source, report: ConversionReport) -> dict[str, Any]:
    """The hub's metadata; licence and languages are the source card's, where it has one."""
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if source.hub_id:
        metadata["base_model"] = source.hub_id
    carried = source_card_metadata(source.path)
    metadata.update({key: carried[key] for key in _CARRIED if key in carried})
    metadata["tags"] = ["depthroute", report.preset, "custom_code"]
    return metadata


def source_card_metadata(folder: Path) -> dict[str, Any]:
    """The YAML head of a folder's `README.md`; empty where there is none or it is no YAML mapping."""
    path = folder / "README.md"
    if not path.is_file():
        return {}
    head, *rest = path.read_text(encoding="utf-8", errors="replace").split("\n---", 1)
    if not rest or not head.startswith("---"):
        return {}
    try:
        metadata = yaml.safe_load(head[3:])
    except yaml.YAMLError:
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _table(rows: list[tuple[str, str]]) -> str:
    # a bar inside a cell would end it
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {left} | {right} |" for left, right in cells]
    return "\n".join([lines[0], "|---|---|", *lines[1:]]) + "\n"
