# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The model card of a converted folder, from `model_cards/template.md`."""

import json
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import yaml

from depthroute import PRESETS, DepthRouteConfig
from depthroute.modeling.configuration_depthroute import family_fields

from .reports import ConversionReport
from .source import Source


_CARRIED = ("license", "license_name", "license_link", "language")


def template() -> Template:
    """The card's template: beside this package in a wheel, in `model_cards/` of a checkout."""
    packaged = files("depthroute_conversion") / "template.md"
    if packaged.is_file():
        return Template(packaged.read_text(encoding="utf-8"))
    return Template((Path(__file__).parents[2] / "model_cards" / "template.md").read_text(encoding="utf-8"))


def write_card(folder: Path, source: Source, config: DepthRouteConfig, report: ConversionReport) -> None:
    """Write `README.md` into `folder`. It names no path of this machine."""
    name = Path(report.out).name
    preset = PRESETS[report.preset]
    if report.verification is None:
        figures = "The conversion was not verified: run `depthroute verify SOURCE FOLDER`.\n"
    else:
        figures = _table([("figure", "value"), *report.verification.rows()])
    text = template().substitute(
        metadata=yaml.safe_dump(card_metadata(source, report), sort_keys=False, allow_unicode=True).strip(),
        name=name,
        source=f"[{source.hub_id}](https://huggingface.co/{source.hub_id})" if source.hub_id else f"`{source.label}`",
        preset=report.preset,
        equation=preset.equation,
        paper=preset.paper,
        start=_start(config),
        command=conversion_command(source.label, name, config, report),
        fields=_table([("field", "value"), *((f"`{k}`", f"`{getattr(config, k)}`") for k in family_fields())]),
        conversion=_table([("", ""), *report.rows()]),
        figures=figures,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _start(config: DepthRouteConfig) -> str:
    if config.residual_type == "standard":
        return "The residual is the standard one: the model computes what its source computes."
    if config.depth_anchored:
        return (
            "The reads are anchored: until they are trained, the model computes what its source computes, bit for bit. "
            "Routing begins to matter with fine-tuning."
        )
    return (
        "The reads are plain, the form of the paper: a zero query mixes its sources evenly, so the model does not compute "
        "what its source computes, and needs fine-tuning. The table below says how far it is."
    )


def conversion_command(source: str, out: str, config: DepthRouteConfig, report: ConversionReport) -> str:
    """The command that repeats a conversion, with names in place of paths."""
    parts = ["depthroute convert", source, out, f"--preset {report.preset}"]
    if report.requested["dtype"] is not None:
        parts.append(f"--dtype {report.dtype}")
    if report.requested["block_size"] is not None:
        parts.append(f"--block-size {report.requested['block_size']}")
    if not report.requested["anchored"]:
        parts.append("--plain")
    if report.requested["num_heads"] != 1:
        parts.append(f"--heads {report.requested['num_heads']}")
    parts += [f"--set '{key}={json.dumps(value)}'" for key, value in report.requested["fields"].items()]
    return " ".join(parts)


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
