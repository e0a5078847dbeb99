# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What has its name is on the disk: a power failure leaves no file of the right name with nothing, or half of it, inside."""

import os
from pathlib import Path

import pytest

from depthroute import convert, revert
from depthroute_conversion.unfinished import UnfinishedFolder


pytestmark = pytest.mark.skipif(os.name == "nt", reason="folders cannot be synced there")


class Disk:
    """What `os.fsync` has put on the disk, and for every rename what was not there yet.

    Attributes:
        renames: of each, the old name, the new path, and what of it had not been synced as it was.
    """

    def __init__(self, monkeypatch):
        self._synced, self.renames = {}, []
        fsync = os.fsync

        def recorded(descriptor):
            fsync(descriptor)
            status = os.fstat(descriptor)
            self._synced[status.st_ino] = self._state(descriptor, status)

        monkeypatch.setattr(os, "fsync", recorded)
        for name in ("rename", "replace"):
            monkeypatch.setattr(Path, name, self._watched(getattr(Path, name)))

    @staticmethod
    def _state(place, status):
        return sorted(os.listdir(place)) if os.path.isdir(place) else (status.st_size, status.st_mtime_ns)

    def has_name(self, path: Path) -> bool:
        """Whether the name was in its folder when that was last put on the disk."""
        return path.name in self._synced.get(path.parent.stat().st_ino, [])

    def has(self, path: Path) -> bool:
        """Whether the file, or the folder with the names that are in it, is on the disk as it is."""
        return self._synced.get(path.stat().st_ino) == self._state(path, path.stat())

    def _watched(self, rename):
        def watched(path, target):
            inside = path.rglob("*") if path.is_dir() else ()
            missing = [each.name for each in (path, *inside) if not self.has(each)]
            found = rename(path, target)
            self.renames.append((path.name, Path(target), missing))
            return found

        return watched


@pytest.mark.parametrize("way", ["convert", "revert"])
def test_nothing_has_its_name_before_it_is_on_the_disk(way, originals, tmp_path, monkeypatch, request):
    source = originals["sharded"]
    if way == "revert":
        source = request.getfixturevalue("converted")("sharded")
    disk, out = Disk(monkeypatch), tmp_path / "out"
    if way == "convert":
        convert(source, out, max_shard_size="60kB", verify=False)
    else:
        revert(source, out)
    written = [(target.name, missing) for name, target, missing in disk.renames if name.endswith(".partial")]
    shards = [(name, missing) for name, missing in written if name.endswith(".safetensors")]
    assert len(shards) == len(list(out.glob("*.safetensors"))) > 2
    assert [name for name, _ in written].count("journal.json") == len(shards) + 1
    # what an interrupted run goes on from
    assert not any(missing for name, missing in written if name == "journal.json" or (name, missing) in shards), written
    # the whole folder: names, and configuration and tokenizer as well
    assert disk.renames[-1] == ("out", out, [])
    # and its own name, before what is beside it is removed
    assert disk.has_name(out)


def test_a_shard_s_name_is_on_the_disk_before_the_journal_has_it(originals, tmp_path, monkeypatch):
    disk, journal = Disk(monkeypatch), UnfinishedFolder._save

    def save(work):
        assert not work.hashes or disk.has(work.files)
        journal(work)

    monkeypatch.setattr(UnfinishedFolder, "_save", save)
    convert(originals["qwen3"], tmp_path / "out", max_shard_size="60kB", verify=False)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
