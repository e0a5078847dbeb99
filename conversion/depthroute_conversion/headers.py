# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The header of a safetensors file, checked against the file before anything is allocated.

    8 bytes: the header's length n, little-endian    n bytes: JSON    the rest: the tensors, back to back in some order

Every byte of the file must belong to exactly one of these: a header that leaves gaps, lets tensors overlap, names one twice,
or describes another number of bytes than there are is damaged, or made to be read in two ways.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from depthroute.errors import Refused


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Tensor types that a model can be made of, by their names in safetensors headers."""

_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""Bits of an element, for every type that the format knows."""

_LONGEST = 100_000_000
"""Bytes of a header that safetensors itself accepts at most."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies, and what its file's header says about it.

    Attributes:
        file: the file.
        shape: its sizes.
        dtype: its type.
        start: its first byte, counted from the beginning of the file.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.numel * self.dtype.itemsize


def read_header(file: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """The tensors of one file, by key.

    Args:
        file: a safetensors file.
        dtypes: the tensor types that it may hold, by their names in headers.

    Raises:
        Refused: it cannot be read, is no whole safetensors file, or holds a tensor of another type.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(_LONGEST, size - 8):
                raise _damaged(file, f"got {size} bytes, and a header of {length} bytes")
            text = stream.read(length)
    except OSError as error:
        raise Refused(f"{file}: cannot be read: {error.strerror}; allowed: a readable file") from error
    entries = _parse(file, text)
    stored = {key: _entry(file, key, entry, 8 + length, dtypes) for key, entry in entries.items()}
    _check_ranges(file, stored, 8 + length, size)
    tensors = {key: item for key, (item, _) in stored.items()}
    try:
        with safe_open(file, framework="pt") as opened:
            seen = set(opened.keys())
    except (SafetensorError, OSError) as error:
        raise _damaged(file, str(error)) from error
    if seen != set(tensors):  # two readers that disagree about a file: neither is to be believed
        raise _damaged(file, f"its header names {len(tensors)} tensors, safetensors finds {len(seen)}")
    return tensors


def _damaged(file: Path, what: str) -> Refused:
    return Refused(f"{file}: no whole safetensors file (truncated or damaged): {what}")


def unique_entries(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=…)`: an object that names nothing twice.

    Raises:
        ValueError: it does. (`json` itself takes the last one.)
    """
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is named twice")
    return entries


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=unique_entries)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"its header is no JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _damaged(file, f"its header is a {type(entries).__name__}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, "its metadata is no table of texts")
    return entries


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _entry(file: Path, key: str, entry: Any, data: int, dtypes: Mapping[str, torch.dtype]) -> tuple[StoredTensor, int]:
    """The tensor, and the end of its bytes."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(file, f"{key}: got {str(entry)[:80]}, allowed: dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _BITS:
        raise Refused(f"{file}: {key}: dtype: got {kind!r}, allowed: {', '.join(dtypes)}")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, f"{key}: got shape {str(shape)[:80]}, data_offsets {str(offsets)[:80]}")
    begin, end = offsets
    if math.prod(shape) * _BITS[kind] != (end - begin) * 8:
        raise _damaged(file, f"{key}: got {end - begin} bytes for shape {shape} of {kind}")
    if kind not in dtypes:
        raise Refused(f"{file}: {key}: dtype: got {kind}, allowed: {', '.join(dtypes)} (unquantized weights)")
    return StoredTensor(file, tuple(shape), dtypes[kind], data + begin), data + end


def _check_ranges(file: Path, stored: Mapping[str, tuple[StoredTensor, int]], data: int, size: int) -> None:
    reached, before = data, "the header"
    for key, (item, end) in sorted(stored.items(), key=lambda entry: (entry[1][0].start, entry[1][1])):
        if item.start != reached:
            between = "overlap" if item.start < reached else "leave a gap"
            raise _damaged(file, f"{before} and {key} {between} at byte {min(item.start, reached)}")
        reached, before = end, key
    if reached != size:
        raise _damaged(file, f"got {size} bytes, and tensors up to byte {reached}")
