# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Work on a model folder that may be interrupted: what is finished is kept beside the target, and the same request goes on
from there.

    .NAME.unfinished/       beside NAME, the target
      lock                  one process at a time
      journal.json          what was asked for, and the SHA-256 of every finished shard
      NAME/                 what will be the target: it appears with one rename
      replaced/             the folder that it replaces, between two renames
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from depthroute.errors import CheckFailed, Refused, Unfinished, one_line

from .folder import check_output
from .hashes import hash_file
from .progress import Progress, announce


class UnfinishedFolder:
    """A model folder in the making.

    Attributes:
        files: where its files are written.
        root: what is kept where the work is interrupted.
    """

    def __init__(self, root: Path, name: str, request: Mapping[str, Any]):
        self.root = root
        self.files = root / name
        self._journal = root / "journal.json"
        # as it will be read back
        self._request = json.loads(json.dumps(request, sort_keys=True, default=str))
        self._hashes = self._go_on()
        self.files.mkdir(exist_ok=True)
        for path in self.files.iterdir():
            if path.name not in self._hashes:
                _remove(path)
        self._save()

    def _go_on(self) -> dict[str, str]:
        """The hashes of the shards that an earlier run of the same request finished."""
        if not self._journal.is_file():
            return {}
        try:
            found = json.loads(self._journal.read_text(encoding="utf-8"))
            before, hashes = dict(found["request"]), dict(found["hashes"])
        except (ValueError, KeyError, TypeError):
            announce(f"{self.root}: its journal cannot be read; starting afresh", True)
            return {}
        names = {*before, *self._request}
        changed = sorted(name for name in names if before.get(name) != self._request.get(name))
        if changed:
            announce(f"{self.root}: begun with another {', '.join(changed)}; starting afresh", True)
            return {}
        return {name: value for name, value in hashes.items() if (self.files / name).is_file()}

    @property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of every finished shard, by name."""
        return dict(self._hashes)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether there is anything to go on from."""
        return bool(self._hashes)

    def is_finished(self, name: str, progress: Progress) -> bool:
        """Whether an earlier run finished this file, and it is still what that wrote: it is read and hashed. One that is not
        is removed."""
        if name not in self._hashes:
            return False
        if hash_file(self.files / name, progress) == self._hashes[name]:
            return True
        announce(f"{self.files / name}: damaged since it was written; writing it again", True)
        (self.files / name).unlink()
        del self._hashes[name]
        self._save()
        return False

    def note(self, name: str, digest: str) -> None:
        """This file is finished and on the disk."""
        _sync(self.files)
        self._hashes[name] = digest
        self._save()

    def _save(self) -> None:
        partial = self._journal.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as stream:
            json.dump({"request": self._request, "hashes": self._hashes}, stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self._journal)

    def appear(self, target: Path) -> None:
        """Put the folder in its place, in that of a folder that is there already. Nothing is lost if it fails, and everything in
        it is on the disk before it has its name."""
        _sync_all(self.files)
        if target.exists():
            target.rename(self.root / "replaced")
        try:
            self.files.rename(target)
        except BaseException:
            _put_back(self.root, target)
            raise
        _sync(target.parent)


def check_target(out: str | Path, overwrite: bool) -> Path:
    """`check_output`, after what an earlier run left beside `out` was put in order, where there is any: a folder that it was
    about to replace is put back, and where it had done everything but clear up, that is done now.

    Raises:
        Refused: another process is at work on the same target, or `check_output` refuses it.
    """
    target = Path(out).expanduser().resolve()
    root = _beside(target)
    if root.is_dir():
        with _locked(root, target):
            _put_back(root, target)
            _clear_up(root, target)
    return check_output(out, overwrite)


@contextmanager
def unfinished_folder(target: Path, request: Mapping[str, Any], overwrite: bool = False) -> Iterator[UnfinishedFolder]:
    """A folder to work in that takes the target's place at the end. A folder that `target` already is stays as it was until
    then. A refusal removes all of it. Anything else that stops the work leaves it as it is, if a shard is finished, and says
    so; the same request finds it again.

    Args:
        target: the folder that is to appear.
        request: what the outcome depends on, by topic, as JSON knows it: files of the source, options, versions.
        overwrite: replace a model folder that `target` already is.

    Raises:
        Refused: another process is at work on the same target, or `check_output` refuses it.
        Unfinished: the disk is full, or fails; finished shards are kept.
    """
    root = _beside(target)
    new_parents = [parent for parent in target.parents if not parent.exists()]
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root, target):
        _put_back(root, target)
        try:
            check_output(target, overwrite)  # again: another process may have finished it meanwhile
        except Refused:
            _clear_up(root, target)
            raise
        work = None
        try:
            work = UnfinishedFolder(root, target.name, request)
            yield work
            work.appear(target)
        except BaseException as error:
            kept = work is not None and work.is_worth_keeping and not isinstance(error, (Refused, CheckFailed))
            # the old folder is still aside, where it could not be put back either: nothing may be removed then
            if kept or ((root / "replaced").exists() and not target.exists()):
                _clear_partial(root)
                how = f"what is finished is kept in {root}: the same command goes on from there"
                if isinstance(error, OSError):
                    raise Unfinished(f"{one_line(error)}; {how}") from error
                print(f"depthroute: interrupted; {how}", file=sys.stderr)
            else:
                _remove(root)
                _remove_empty(new_parents)
            raise
        _remove(root)


@contextmanager
def _locked(root: Path, target: Path) -> Iterator[None]:
    lock = FileLock(root / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise Refused(f"{target}: another process is writing it (in {root}); allowed: one at a time") from error
    try:
        yield
    finally:
        lock.release()


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def _clear_up(root: Path, target: Path) -> None:
    """Remove what is left of a run whose folder is in its place, and of one that had not begun any."""
    if not target.exists() or (root / target.name).exists():
        return
    if (root / "journal.json").exists():
        announce(f"{target}: whole: an earlier run finished it, and was stopped before it removed {root}", True)
    _remove(root)


def _put_back(root: Path, target: Path) -> None:
    """Undo the first half of a replacement that was interrupted between its two renames."""
    replaced = root / "replaced"
    if target.exists():
        _remove(replaced)
    elif replaced.exists():
        replaced.rename(target)


def _clear_partial(root: Path) -> None:
    for path in root.rglob("*.partial"):
        path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Remove what is there, if anything is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise
            return


def _sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Put a file's contents, or the names in a folder, on the disk. Windows has no such call for what is only read."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
