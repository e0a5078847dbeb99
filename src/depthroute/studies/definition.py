# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a study is: its question, arms, sizes and the paper's claims, read from a YAML file and checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ..errors import Refused, one_line
from ..modeling.configuration_depthroute import PRESETS, nearest_names


DEFINITIONS = Path(__file__).parent / "definitions"
"""One file per study; its name is the file's without the suffix."""

SETTINGS = DEFINITIONS / "settings"
"""Options that several studies share."""

SIZES = ("cpu", "gpu", "paper")
EXPECTATIONS = ("lower", "higher", "same", "at_least", "at_most")

T = TypeVar("T")


@dataclass(frozen=True)
class Arm:
    """One variant of a study.

    Attributes:
        preset: one of `depthroute.PRESETS`.
        describes: what it is, in a few words.
        fields: configuration fields over the preset's.
        options: options of `depthroute train` of this arm alone.
        seeds: of this arm, instead of the size's; by size.
    """

    preset: str
    describes: str = ""
    fields: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None
    seeds: Mapping[str, list[int]] | None = None


@dataclass(frozen=True)
class Text:
    """Which part of the standard library's sources a run sees, so that a short run does not read all of it.

    Attributes:
        documents, characters: training documents, and of each the first so many characters; None: all.
        validation_documents, validation_characters: the same of the text to measure on.
    """

    documents: int | None = None
    characters: int | None = None
    validation_documents: int | None = None
    validation_characters: int | None = None


@dataclass(frozen=True)
class Size:
    """How large a study is.

    Attributes:
        seeds: of initial weights and data order; every arm has the same.
        options: of `depthroute train`, for every run.
        settings: a file of `definitions/settings`, by name, which the options are over.
        groups: matched sets by name, each with options over `options`, and `recipe`, which those are over in turn.
        text: what is read of the standard library; None: the recipes' own data set.
        hub_text: options that name a data set of the hub instead, for `--text hub`.
        diagnosed_tokens: over which the diagnostics go.
        note: what was planned and is not in this size.
    """

    seeds: list[int]
    options: Mapping[str, Any]
    groups: Mapping[str, Mapping[str, Any]]
    settings: str | None = None
    text: Text | None = None
    hub_text: Mapping[str, Any] | None = None
    diagnosed_tokens: int = 2048
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and what would bear it out here.

    Attributes:
        says: the statement, shortened.
        measure: `loss`, `first_loss`, `largest_rise`, or a name in a run's `measures`.
        arm: whose.
        against: the arm that it is paired with; None: the level itself.
        expect: one of `EXPECTATIONS`.
        within: half-width of what counts as the same.
        value: for `at_least` and `at_most`.
        groups: where; None: in every group.
    """

    says: str
    measure: str
    arm: str
    expect: str
    against: str | None = None
    within: float | None = None
    value: float | None = None
    groups: list[str] | None = None


@dataclass(frozen=True)
class Study:
    """
    Attributes:
        name: of the study and its file.
        title, question, paper: for its page.
        baseline: the arm that every other is compared with.
        noise_arm: the arm that differs from the baseline in rounding only.
        arms, sizes, claims: see there.
        notes: caveats for the page.
    """

    name: str
    title: str
    question: str
    paper: str
    baseline: str
    noise_arm: str
    arms: dict[str, Arm]
    sizes: dict[str, Size]
    claims: list[Claim]
    notes: list[str]


def study_names() -> list[str]:
    """The studies there are."""
    return sorted(file.stem for file in DEFINITIONS.glob("*.yaml"))


def read_study(name: str | Path) -> Study:
    """A study by name, or from a file that ends in `.yaml`.

    Raises:
        Refused: unknown study (with the nearest), unreadable file, or an entry that is not accepted.
    """
    file = Path(name)
    if file.suffix != ".yaml":
        if str(name) not in study_names():
            raise Refused(f"study: got {str(name)!r}, nearest: {nearest_names(str(name), study_names())}")
        file = DEFINITIONS / f"{name}.yaml"
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"{file}: {one_line(error)}, allowed: a readable YAML file") from error
    if not isinstance(entries, dict):
        raise Refused(f"{file}: got {type(entries).__name__}, allowed: a mapping")
    return _study(file, entries)


def _study(file: Path, entries: dict[str, Any]) -> Study:
    where = file.name
    entries = {"notes": [], **entries}
    arms = {name: _made(Arm, arm, f"{where}: arms: {name}") for name, arm in _mapping(entries, "arms", where).items()}
    sizes = {name: _size(entry, f"{where}: sizes: {name}") for name, entry in _mapping(entries, "sizes", where).items()}
    claims = [_made(Claim, claim, f"{where}: claims[{i}]") for i, claim in enumerate(entries.get("claims") or [])]
    study = _made(Study, {**entries, "name": file.stem, "arms": arms, "sizes": sizes, "claims": claims}, where)
    _check(study, where)
    return study


def _size(entry: Any, where: str) -> Size:
    entry = {"options": {}, "groups": {"all": {}}, **_as_mapping(entry, where)}
    if entry.get("text") is not None:
        entry["text"] = Text() if entry["text"] == {} else _made(Text, entry["text"], f"{where}: text")
    known = [file.stem for file in SETTINGS.glob("*.yaml")]
    if (settings := entry.get("settings")) is not None and settings not in known:
        raise Refused(f"{where}: settings: got {settings!r}, nearest: {nearest_names(str(settings), known)}")
    return _made(Size, entry, where)


def _check(study: Study, where: str) -> None:
    for name, arm in study.arms.items():
        if arm.preset not in PRESETS:
            raise Refused(
                f"{where}: arms: {name}: preset: got {arm.preset!r}, nearest: {nearest_names(arm.preset, PRESETS)}"
            )
    named = {"baseline": study.baseline, "noise_arm": study.noise_arm}
    for index, claim in enumerate(study.claims):
        if claim.expect not in EXPECTATIONS:
            raise Refused(f"{where}: claims[{index}]: expect: got {claim.expect!r}, allowed: {', '.join(EXPECTATIONS)}")
        needed = {"same": "within", "at_least": "value", "at_most": "value"}.get(claim.expect)
        if needed is not None and getattr(claim, needed) is None:
            raise Refused(
                f"{where}: claims[{index}]: {needed}: got none, allowed: a number, with expect: {claim.expect}"
            )
        if claim.against is None and needed != "value":
            raise Refused(f"{where}: claims[{index}]: against: got none, allowed: an arm, with expect: {claim.expect}")
        named[f"claims[{index}]: arm"] = claim.arm
        if claim.against is not None:
            named[f"claims[{index}]: against"] = claim.against
    for field, arm_name in named.items():
        if arm_name not in study.arms:
            raise Refused(f"{where}: {field}: got {arm_name!r}, nearest: {nearest_names(arm_name, study.arms)}")
    for name, size in study.sizes.items():
        if name not in SIZES:
            raise Refused(f"{where}: sizes: got {name!r}, allowed: {', '.join(SIZES)}")
        if not size.seeds or len(set(size.seeds)) != len(size.seeds):
            raise Refused(f"{where}: sizes: {name}: seeds: got {size.seeds}, allowed: one or more, each once")


def _mapping(entries: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    return _as_mapping(entries.get(key), f"{where}: {key}")


def _as_mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise Refused(f"{where}: got {value!r}, allowed: a mapping with entries")
    return value


def _made(cls: type[T], entry: Any, where: str) -> T:
    """An instance of a dataclass from the entries of a file.

    Raises:
        Refused: an entry too many, with the nearest that is allowed, or one too few.
    """
    entry = _as_mapping(entry, where)
    known = [item.name for item in fields(cls)]  # type: ignore[arg-type]
    for name in entry:
        if name not in known:
            raise Refused(f"{where}: {name}: unknown entry, nearest: {nearest_names(str(name), known)}")
    try:
        return cls(**entry)
    except TypeError as error:
        raise Refused(f"{where}: {one_line(error)}") from error
