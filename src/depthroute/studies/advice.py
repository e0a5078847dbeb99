# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The written advice of the cards (`advice.yaml`), checked."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from ..errors import Refused, one_line
from ..modeling.configuration_depthroute import PRESETS, nearest_names


FILE = Path(__file__).parent / "advice.yaml"


@dataclass(frozen=True)
class Advice:
    """On one preset: when to take it, when to leave it, what to watch."""

    take: str
    leave: str
    watch: str


@dataclass(frozen=True)
class Need:
    """What somebody wants, and which presets are for it.

    Attributes:
        need: in a few words.
        at: whether a model is trained from scratch or a checkpoint is converted.
        because: the reason.
        presets: first choice first; empty where the measured train step chooses.
        cheapest: take the preset that routes and has the shortest measured train step (`costs.cheapest`).
    """

    need: str
    at: Literal["scratch", "conversion"]
    because: str
    presets: tuple[str, ...] = ()
    cheapest: bool = False


def read_advice(file: Path = FILE) -> tuple[dict[str, Advice], list[Need]]:
    """Advice on every preset, and the needs in the overview's order.

    Raises:
        Refused: an entry too many or too few, or a preset that there is none of.
    """
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        advice = {name: Advice(**entry) for name, entry in entries["presets"].items()}
        needs = [Need(**{**entry, "presets": tuple(entry.get("presets", ()))}) for entry in entries["needs"]]
    except (OSError, yaml.YAMLError, TypeError, LookupError, AttributeError, ValueError) as error:
        raise Refused(f"{file.name}: {one_line(error)}; allowed: `presets` and `needs` with their entries") from error
    _check(file.name, advice, needs)
    return advice, needs


def _check(where: str, advice: dict[str, Advice], needs: list[Need]) -> None:
    named: list[Any] = [*advice, *(name for need in needs for name in need.presets)]
    for name in named:
        if name not in PRESETS:
            raise Refused(f"{where}: preset: got {name!r}, nearest: {nearest_names(str(name), PRESETS)}")
    for name in PRESETS:
        if name not in advice:
            raise Refused(f"{where}: presets: got nothing on {name!r}, allowed: an entry for every preset")
    for need in needs:
        if need.at not in ("scratch", "conversion"):
            raise Refused(f"{where}: {need.need}: at: got {need.at!r}, allowed: scratch, conversion")
        if need.cheapest == bool(need.presets):
            raise Refused(f"{where}: {need.need}: got {list(need.presets)}, allowed: either presets or cheapest: true")


@cache
def own_advice() -> tuple[dict[str, Advice], list[Need]]:
    """That of this package."""
    return read_advice()
