# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What commands read and write: checked before the work, and written whole or not at all."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from .errors import Refused, one_line


_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_NOT = ["original/*", "onnx/*", "gguf/*", "consolidated*"]
# the base of the hub's own error is the error of the HTTP client that it uses, which changed between its releases
HUB_ERRORS: tuple[Any, ...] = (OSError, HFValidationError, HfHubHTTPError.__bases__[0])


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id: owner/name, or one name alone."""
    return _HUB_ID.fullmatch(name) is not None and name not in (".", "..") and not name.endswith(".gguf")


def download(hub_id: str, patterns: list[str], field: str = "model", local: str = "a model folder") -> Path:
    """The folder with those files of a hub model, from the hub or from its cache.

    Raises:
        Refused: the hub cannot give it. The line names `field`, and what else is allowed: `local`.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=_HUB_NOT))
    except HUB_ERRORS as error:
        raise Refused(
            f"{field}: got {hub_id!r}, no local folder, and the hub could not give it ({type(error).__name__}: "
            f"{one_line(error)}); allowed: {local} or the id of a reachable hub model"
        ) from error


def check_model(model: str | Path) -> str:
    """`model` as a string, if it is a local model folder or the id of a hub model that can be had.

    Raises:
        Refused: a folder without `config.json`, a path that does not exist, or a hub id that the hub cannot give.
    """
    path = Path(model)
    if path.is_dir() and str(model):
        if not (path / "config.json").is_file():
            raise Refused(f"{path}: no config.json in this folder, allowed: a model folder")
        return str(model)
    if path.exists() or not is_hub_id(str(model)):
        shown = str(model) or "model: got ''"
        raise Refused(f"{shown}: not a folder, allowed: a model folder, or a hub id (owner/name)")
    download(str(model), ["config.json"])
    return str(model)


def check_parents(path: str | Path) -> None:
    """Refuse an output that could not be made, because what its parent folder would be is a file.

    Raises:
        Refused: naming that file.
    """
    existing = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not existing.is_dir():
        raise Refused(f"{path}: {existing} is a file, allowed: a path of folders")


def check_json_file(file: str | Path | None) -> None:
    """Refuse a `--json` file that could not be written in the end.

    Raises:
        Refused: its folder does not exist, or it is a folder itself.
    """
    if file is None:
        return
    if not Path(file).absolute().parent.is_dir():
        raise Refused(f"{file}: its folder does not exist, allowed: a file in an existing folder")
    if Path(file).is_dir():
        raise Refused(f"{file}: is a folder, allowed: a file")


def write_json(file: str | Path, value: Any) -> None:
    """Write `value` as JSON, by `write_text`. Non-finite numbers become null."""
    write_text(file, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def write_text(file: str | Path, text: str) -> None:
    """Write a temporary file beside `file`, then rename it: a reader sees the old text or the new one, whole."""
    target = Path(file).absolute()
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def check_output_folder(folder: str | Path, overwrite: bool) -> None:
    """Refuse an output folder that holds something already, unless files in it may be replaced.

    Raises:
        Refused: it is not empty and `overwrite` is False, or it or a parent of it is a file.
    """
    path = Path(folder)
    check_parents(path)
    if path.exists() and not path.is_dir():
        raise Refused(f"{path}: is a file, allowed: a folder")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise Refused(f"{path}: exists and is not empty, allowed: a new folder, or --overwrite")


@contextmanager
def whole_output(folder: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` to write files to. When the block ends well it becomes `folder` (where that
    exists, its files move there and replace those of the same name); when it does not, nothing has happened.

    Raises:
        Refused: as `check_output_folder`.
    """
    check_output_folder(folder, overwrite)
    target = Path(folder).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".partial", dir=target.parent) as temporary:
        partial = Path(temporary) / target.name  # inside: the temporary folder itself is private
        partial.mkdir()
        yield partial
        if target.is_dir():
            for file in partial.iterdir():
                file.replace(target / file.name)
        else:
            partial.rename(target)
