# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a folder's safetensors files hold, checked by their headers before a tensor is read, and read one tensor at a time."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.errors import Refused

from .headers import DTYPES, StoredTensor, read_header, unique_entries
from .keys import listed


__all__ = ["DTYPES", "INDEX", "PICKLES", "SINGLE", "StoredTensor", "read_headers", "read_range", "read_tensor"]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Formats that run code when read."""

CHUNK = 1 << 24
"""Bytes that are worked on at a time."""


def read_headers(folder: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """The tensors of a model folder, by key.

    Args:
        folder: the model folder.
        dtypes: the tensor types that it may hold, by their names in headers.

    Raises:
        Refused: no safetensors weights (pickle formats are named), an unreadable index, a shard that is missing, damaged, or
            outside the folder, a key that two shards hold, an index that does not name exactly what its shards hold, or a
            tensor type that is not among `dtypes`.
    """
    index = _read_index(folder)
    if index is None:
        return read_header(_inside(folder, SINGLE), dtypes)
    shards: dict[str, set[str]] = {}
    for key, shard in index.items():
        shards.setdefault(shard, set()).add(key)
    stored: dict[str, StoredTensor] = {}
    for shard, named in sorted(shards.items()):
        held = read_header(_inside(folder, shard), dtypes)
        if twice := sorted(set(held) & set(stored)):
            raise Refused(
                f"{folder / shard}: {listed(twice)}: also in {stored[twice[0]].file.name}; allowed: one shard"
            )
        if absent := sorted(named - set(held)):
            raise Refused(f"{folder / shard}: {INDEX} names {len(absent)} keys that it does not hold: {listed(absent)}")
        if unnamed := sorted(set(held) - named):
            raise Refused(f"{folder / shard}: holds {len(unnamed)} keys that {INDEX} does not name: {listed(unnamed)}")
        stored.update(held)
    return stored


def weight_files(path: Path) -> list[Path]:
    """The files that hold a source's tensors: those of a folder, or a file that is one itself."""
    if not path.is_dir():
        return [path]
    index = _read_index(path)
    return [path / name for name in sorted({SINGLE} if index is None else set(index.values()))]


def size_note(folder: Path, stored: Mapping[str, StoredTensor]) -> str | None:
    """A line about an index whose `total_size` is not that of its tensors; None where it is, or where there is no index. No
    reader depends on the number, which published checkpoints have in parameters, or of another dtype; it is not refused."""
    index = folder / INDEX
    if (folder / SINGLE).is_file() or not index.is_file():
        return None
    metadata = _parse_index(index).get("metadata")
    noted = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(item.size for item in stored.values())
    if noted is None or noted == size:
        return None
    return f"{INDEX}: total_size: got {noted!r}, its tensors have {size} bytes; the tensors are what counts"


def _read_index(folder: Path) -> dict[str, str] | None:
    """The index's map from keys to shards; None where there is one weight file."""
    if (folder / SINGLE).is_file():
        return None
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    entries = _parse_index(folder / INDEX)
    named = entries.get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise Refused(f"{folder / INDEX}: KeyError, allowed: a readable index with a weight_map")
    if outside := sorted({file for file in named.values() if Path(file).name != file}):
        raise Refused(f"{folder / INDEX}: got {listed(outside)}, allowed: shards in the folder itself")
    if absent := sorted({file for file in named.values() if not (folder / file).is_file()}):
        raise Refused(f"{folder}: missing shards, named in {INDEX}: {listed(absent)}")
    return named


def _parse_index(path: Path) -> dict:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_entries)
    except (OSError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__} ({error})"
        raise Refused(f"{path}: {what}, allowed: a readable index with a weight_map") from error
    if not isinstance(entries, dict):
        raise Refused(f"{path}: got a {type(entries).__name__}, allowed: a readable index with a weight_map")
    return entries


def _no_weights(folder: Path) -> Refused:
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if shards:
        return Refused(
            f"{folder / INDEX}: missing, beside {listed(shards)}; allowed: {SINGLE}, or shards with their index"
        )
    unsafe = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if unsafe:
        return Refused(f"{folder}: weights: got {listed(unsafe)}, allowed: safetensors only (pickle files run code)")
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    hint = f"; name the file itself to convert {listed(ggufs)}" if ggufs else ""
    return Refused(f"{folder}: weights: got none, allowed: {SINGLE}, or shards with {INDEX}{hint}")


def _inside(folder: Path, name: str) -> Path:
    """The file, if it lies in the folder; or, in a snapshot of the hub's cache, among the blobs that snapshots link to."""
    root = folder.resolve()
    home = root.parents[1] if root.parent.name == "snapshots" else root
    if not (folder / name).resolve().is_relative_to(home):
        raise Refused(
            f"{folder / name}: links to {(folder / name).resolve()}, outside the folder; allowed: the file itself"
        )
    return folder / name


def read_tensor(key: str, item: StoredTensor) -> Tensor:
    """One tensor, in memory of its own.

    Raises:
        Refused: the file has become shorter since its header was read.
        OSError: reading fails.
    """
    return read_range(key, item, 0, item.numel).view(item.shape)


def read_range(key: str, item: StoredTensor, first: int, count: int) -> Tensor:
    """`count` elements of a tensor from element `first` on, as a tensor [count]. Raises as `read_tensor`."""
    tensor = torch.empty(count, dtype=item.dtype)
    if count == 0:
        return tensor
    # not mapped: a file that is cut short while it is mapped ends the process, and where a file's tensors lie is no concern
    # of arithmetic (a matrix product may depend on it in its last bit)
    memory = bytes_of(tensor)
    position = item.start + first * item.dtype.itemsize
    descriptor = os.open(item.file, os.O_RDONLY)
    try:
        done = 0
        while done < len(memory):
            got = os.preadv(descriptor, [memory[done:]], position + done)
            if got == 0:
                raise Refused(f"{item.file}: {key}: ends at byte {position + done}, it was longer when it was opened")
            done += got
    finally:
        os.close(descriptor)
    return tensor


def pieces(tensor: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    """A tensor's elements in order, as tensors [n] of `CHUNK` bytes at most, cast to `dtype` where one is given."""
    flat = tensor.reshape(-1)
    for piece in flat.split(max(1, CHUNK // max(flat.dtype.itemsize, 1))) if flat.numel() else ():
        yield piece if dtype is None else piece.to(dtype)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()  # numpy's types do not say that it is a buffer
    return memoryview(array)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinities; takes no memory for it."""
    if tensor.numel() == 0:
        return True
    # NaN is the smallest and the largest of numbers that it is among
    smallest, largest = tensor.aminmax()
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())
