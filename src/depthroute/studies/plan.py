# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A study of one size, spelled out: which `depthroute train` runs it takes."""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Refused
from ..modeling.configuration_depthroute import nearest_names
from ..training.arguments import as_arguments
from ..training.recipes import merged, read_recipe
from .definition import SETTINGS, Arm, Size, Study
from .texts import TRAIN_FILE, VALIDATION_FILE


BASE = "base"
"""The value of `model` in a definition that stands for the checkpoint given to `depthroute reproduce`."""


@dataclass(frozen=True)
class PlannedRun:
    """
    Attributes:
        group, arm, seed: which.
        entries: options of `depthroute train` without the output folder; files by their names alone.
        fingerprint: of the text and the base that the names stand for.
    """

    group: str
    arm: str
    seed: int
    entries: Mapping[str, Any]
    fingerprint: str

    @property
    def key(self) -> str:
        """Equal for runs that would be equal, of whatever study."""
        told = json.dumps([self.entries, self.fingerprint], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def command(self) -> str:
        """The run as a command, to be given beside its files."""
        return shlex.join(["depthroute", "train", *as_arguments(dict(self.entries), self.arm)])

    def arguments(self, text: Path | None, base: str | None) -> list[str]:
        """The same with the places of the files.

        Args:
            text: folder of the text's files.
            base: the checkpoint that `model: base` stands for.
        """
        entries = dict(self.entries)
        for name in ("train_files", "validation_files"):
            if name in entries:
                entries[name] = [str(Path(str(text)) / file) for file in entries[name]]
        if entries.get("model") == BASE:
            entries["model"] = base
        return as_arguments(entries, self.arm)


def plan_runs(
    study: Study,
    size: str,
    fingerprint: str,
    hub: bool = False,
    seeds: Sequence[int] | None = None,
    groups: Sequence[str] | None = None,
    arms: Sequence[str] | None = None,
) -> list[PlannedRun]:
    """All runs, seed by seed, so that a study that is stopped early has pairs.

    Args:
        fingerprint: of the text and the base.
        hub: read the size's data set of the hub instead of the library's text.
        seeds, groups, arms: only these; the baseline's arms are always among them.

    Raises:
        Refused: a size, group or arm that the study does not have, or no data set of the hub.
    """
    if size not in study.sizes:
        raise Refused(f"size: got {size!r}, allowed for {study.name}: {', '.join(study.sizes)}")
    chosen = study.sizes[size]
    for what, wanted, known in (("groups", groups, chosen.groups), ("arms", arms, study.arms)):
        for name in wanted or ():
            if name not in known:
                raise Refused(f"{what}: got {name!r}, nearest: {nearest_names(name, known)}")
    if hub and chosen.text is not None and not chosen.hub_text:
        raise Refused(f"text: got 'hub', allowed for {study.name} at size {size}: library")
    kept = [name for name in study.arms if arms is None or name in (*arms, study.baseline, study.noise_arm)]
    runs = []
    for group in chosen.groups if groups is None else groups:
        by_seed: dict[int, list[PlannedRun]] = {}
        for name in kept:
            arm = study.arms[name]
            for seed in seeds or (arm.seeds or {}).get(size, chosen.seeds):
                entries = run_entries(chosen, group, arm, hub)
                by_seed.setdefault(seed, []).append(
                    PlannedRun(group, name, seed, {**entries, "seed": seed}, fingerprint)
                )
        runs += [run for seed in sorted(by_seed) for run in by_seed[seed]]
    return runs


def run_entries(size: Size, group: str, arm: Arm, hub: bool) -> dict[str, Any]:
    """Options of one arm's runs in one group: the recipe's, below the settings', the size's, the group's and the arm's."""
    of_group = dict(size.groups[group])
    recipe = of_group.pop("recipe", None)
    entries = {} if recipe is None else read_recipe(recipe)
    entries.pop("description", None)
    if size.settings is not None:
        entries = merged(entries, read_recipe(str(SETTINGS / f"{size.settings}.yaml")))
    if size.text is not None and not hub:
        files = {"train_files": [TRAIN_FILE], "validation_files": [VALIDATION_FILE]}
        entries = merged(entries, files)
    for above in (size.options, size.hub_text if hub and size.hub_text else {}, of_group, arm.options or {}):
        entries = merged(entries, dict(above))
    entries["preset"] = arm.preset
    if arm.fields:
        entries["fields"] = {**entries.get("fields", {}), **arm.fields}
    return entries
