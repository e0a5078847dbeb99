# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Recipes: YAML files of options for `depthroute train`, those of this package by name, and what one takes from another."""

from pathlib import Path
from typing import Any

import yaml

from ..errors import Refused, one_line
from ..modeling.configuration_depthroute import nearest_names


RECIPE_FOLDER = Path(__file__).parent / "recipes"
"""One file per recipe; the name is the file's without its suffix."""

EXTENDS = "extends"
"""The entry that names the recipe, or the file beside this one, whose entries this one starts from."""

INSTEAD_OF: dict[str, tuple[str, ...]] = {
    "train_files": (
        "dataset",
        "dataset_config",
        "train_split",
        "validation_split",
        "validation_documents",
        "stream",
        "shuffle_buffer",
    ),
    "dataset": ("train_files", "validation_files", "dataset_config", "train_split", "validation_split"),
    "validation_files": ("validation_split", "validation_documents", "validation_fraction"),
    "validation_split": ("validation_files", "validation_documents", "validation_fraction"),
    "validation_documents": ("validation_files", "validation_split", "validation_fraction"),
    "validation_fraction": ("validation_files", "validation_split", "validation_documents"),
    "max_steps": ("train_tokens",),
    "train_tokens": ("max_steps",),
    "num_train_epochs": ("max_steps", "train_tokens"),
    "global_batch_size": ("gradient_accumulation_steps",),
    "gradient_accumulation_steps": ("global_batch_size",),
}
"""Option → what it takes the place of: those entries of a file end where the command line gives the option."""


def recipe_names() -> list[str]:
    """The recipes of this package."""
    return sorted(file.stem for file in RECIPE_FOLDER.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """The file of a recipe: `name` is a path that ends in `.yaml` or `.yml`, or the name of one of this package's.

    Raises:
        Refused: an unknown name, with the nearest ones.
    """
    if Path(name).suffix.lower() in (".yaml", ".yml"):
        return Path(name)
    if name not in recipe_names():
        raise Refused(
            f"recipe: got {name!r}, nearest: {nearest_names(name, recipe_names())}; or a file that ends in .yaml"
        )
    return RECIPE_FOLDER / f"{name}.yaml"


def read_recipe(name: str) -> dict[str, Any]:
    """The entries of a recipe or YAML file, on top of those of the recipe that it extends. Dashes in names become underscores;
    mappings are merged entry by entry, all else is replaced.

    Raises:
        Refused: an unknown recipe, an unreadable file, no mapping of names to values, or recipes that extend each other.
    """
    return _read(recipe_file(name), ())


def _read(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if file in seen:
        raise Refused(f"{file}: {EXTENDS}: comes back to itself, allowed: a recipe that does not extend this one")
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(f"{file}: {one_line(error)}, allowed: a readable YAML file") from error
    if not isinstance(entries, dict):
        raise Refused(f"{file}: got {type(entries).__name__}, allowed: a mapping of option names to values")
    own = {str(key).replace("-", "_"): value for key, value in entries.items()}
    parent = own.pop(EXTENDS, None)
    if parent is None:
        return own
    beside = file.parent / str(parent)
    inherited = _read(beside if beside.is_file() else recipe_file(str(parent)), (*seen, file))
    return merged(inherited, own)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: what an entry takes the place of ends, mappings are merged, all else is replaced."""
    ended = {name for key in above for name in INSTEAD_OF.get(key, ())} - above.keys()
    result = {key: value for key, value in below.items() if key not in ended}
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = {**result[key], **value} if both else value
    return result


def list_recipes() -> dict[str, str]:
    """Name → description of every recipe of this package."""
    return {name: str(read_recipe(name)["description"]) for name in recipe_names()}
