# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""An output folder that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from depthroute.errors import Refused
from depthroute.files import check_parents


def check_output(out: str | Path, overwrite: bool) -> Path:
    """The resolved output path, checked before any work is done.

    Raises:
        Refused: it exists and `overwrite` is False, or it is something that `overwrite` must not delete: a file, or a folder
            that holds files but no `config.json`; or a parent of it is a file.
    """
    target = Path(out).expanduser().resolve()
    check_parents(target)
    if not target.exists():
        return target
    if not target.is_dir():
        raise Refused(f"{out}: got an existing file, allowed: a new folder")
    if not overwrite:
        raise Refused(f"{out}: got an existing folder, allowed: a new one, or this one with --overwrite")
    if any(target.iterdir()) and not (target / "config.json").is_file():
        raise Refused(f"{out}: overwrite: got a folder that holds no model, allowed: an empty folder or a model folder")
    return target


def check_apart(source: Path, target: Path) -> None:
    """Refuse an output that would destroy its source.

    Raises:
        Refused: the output is the source's folder, or one that contains it.
    """
    if target == source or target in source.parents:
        raise Refused(f"{target}: the output is the source, or holds it; allowed: another folder")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its place at the end, and vanishes if anything fails before. A folder
    that `target` already is stays as it was until then."""
    new_parents = [parent for parent in target.parents if not parent.exists()]
    work = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    old = target.with_name(f".{target.name}.replaced-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        work.mkdir()
        yield work
        if target.exists():
            target.rename(old)
        try:
            work.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        for parent in new_parents:
            parent.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
