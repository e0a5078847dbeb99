# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of files, and where a source says what they ought to be."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from depthroute.errors import Refused

from .progress import Progress
from .weights import CHUNK, weight_files


SUMS = ("SHA256SUMS", "SHA256SUMS.txt", "sha256sums.txt", "checksums.sha256")
"""Lists as `sha256sum` writes them."""

_READ = (".json", ".jinja", ".model", ".txt")

_HASH = re.compile(r"[0-9a-f]{64}")
_LINE = re.compile(r"\\?(?P<hash>[0-9a-fA-F]{64}) [ *](?:\./)?(?P<name>.+)")
_BSD_LINE = re.compile(r"SHA256 \((?:\./)?(?P<name>.+)\) = (?P<hash>[0-9a-fA-F]{64})")


def files_to_check(path: Path) -> list[Path]:
    """What a conversion of this source reads or keeps, and what a changed byte would make another model: weights,
    configurations, index, tokenizer, chat template."""
    if not path.is_dir():
        return [path]
    return [*weight_files(path), *sorted(file for file in path.iterdir() if file.suffix in _READ and file.is_file())]


def recorded_hashes(files: Iterable[Path]) -> dict[Path, str]:
    """The SHA-256 that is recorded of each file, where one is:

    - a file of the hub's cache is a link to a blob that has it for its name;
    - `FILE.sha256` beside it, or a line of one of `SUMS`, as `sha256sum` writes them.

    Conversions record none of their own: they are trained and edited in place, and the hub records hashes anew.

    Raises:
        Refused: a `.sha256` file without a hash in it, or two records that differ.
    """
    found: dict[Path, str] = {}
    for file in files:
        records = dict(_records(file))
        if len(set(records.values())) > 1:
            raise Refused(f"{file}: sha256: recorded differently in {' and '.join(records)}; allowed: one hash")
        if records:
            found[file] = next(iter(records.values()))
    return found


def _records(file: Path) -> Iterable[tuple[str, str]]:
    """Where a hash of the file is recorded, and the hash."""
    blob = file.resolve()
    if file.is_symlink() and blob.parent.name == "blobs" and _HASH.fullmatch(blob.name):
        yield "the hub's cache", blob.name
    beside = file.with_name(f"{file.name}.sha256")
    if beside.is_file():
        words = beside.read_text(encoding="utf-8", errors="replace").lower().split()
        hashes = [word for word in words if _HASH.fullmatch(word)]
        if len(hashes) != 1:
            raise Refused(f"{beside}: got {len(hashes)} hashes, allowed: one SHA-256 in hexadecimal digits")
        yield beside.name, hashes[0]
    for name in SUMS:
        if (file.parent / name).is_file():
            for line in (file.parent / name).read_text(encoding="utf-8", errors="replace").splitlines():
                match = _LINE.fullmatch(line.strip()) or _BSD_LINE.fullmatch(line.strip())
                if match is not None and match["name"] == file.name:
                    yield name, match["hash"].lower()


def hash_file(file: Path, progress: Progress) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            progress.advance(len(chunk))
    return digest.hexdigest()


def hashes_of_weights(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file of weights in a folder, by name; each is read whole."""
    return {file.name: hash_file(file, Progress()) for file in weight_files(folder)}


def check_hashes(recorded: dict[Path, str], progress: Progress) -> None:
    """Read every file and compare.

    Raises:
        Refused: a file is not what was recorded.
    """
    for file, expected in recorded.items():
        got = hash_file(file, progress)
        if got != expected:
            raise Refused(f"{file}: sha256: got {got}, recorded {expected}; allowed: the file as it was published")


def source_fingerprint(path: Path) -> list[tuple[str, int, int, str]]:
    """Name, size, time of change (ns) and hash of the head of every file that a source's tensors come from, and of its
    configuration: enough to tell that something has been exchanged, without reading it."""
    config = [path / "config.json"] if (path / "config.json").is_file() else []
    return [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns, _hash_of_head(file))
        for file in [*config, *weight_files(path)]
    ]


def _hash_of_head(file: Path) -> str:
    with file.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little") if file.suffix == ".safetensors" else CHUNK
        return hashlib.sha256(first + stream.read(min(length, 8 * CHUNK))).hexdigest()
