# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a folder's safetensors files hold, checked by their headers before a tensor is read."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from depthroute.errors import Refused

from .keys import listed


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Formats that run code when read."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Tensor types that a model can be made of, by their names in safetensors headers."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies, and what its file's header says about it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_headers(folder: Path, dtypes: Mapping[str, torch.dtype] = DTYPES) -> dict[str, StoredTensor]:
    """The tensors of a model folder, by key.

    Args:
        folder: the model folder.
        dtypes: the tensor types that it may hold, by their names in headers.

    Raises:
        Refused: no safetensors weights (pickle formats are named), an unreadable index, a missing shard, a truncated file, a
            key that its shard does not hold, or a tensor type that is no floating-point weight.
    """
    files = _weight_files(folder)
    if isinstance(files, Path):
        return _read_header(files, dtypes)
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(files.values())):
        held = _read_header(folder / shard, dtypes)
        named = {key for key, file in files.items() if file == shard}
        if absent := sorted(named - set(held)):
            raise Refused(f"{folder / shard}: {INDEX} names {len(absent)} keys that it does not hold: {listed(absent)}")
        stored.update(held)
    return stored


def _weight_files(folder: Path) -> Path | dict[str, str]:
    """The one weight file, or the index's map from keys to shards."""
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    if not (folder / INDEX).is_file():
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        if shards:
            raise Refused(
                f"{folder / INDEX}: missing, beside {listed(shards)}; allowed: {SINGLE}, or shards with their index"
            )
        unsafe = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
        if unsafe:
            raise Refused(f"{folder}: weights: got {listed(unsafe)}, allowed: safetensors only (pickle files run code)")
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; name the file itself to convert {listed(ggufs)}" if ggufs else ""
        raise Refused(f"{folder}: weights: got none, allowed: {SINGLE}, or shards with {INDEX}{hint}")
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        named = {str(key): str(file) for key, file in index.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{folder / INDEX}: {type(error).__name__}, allowed: a readable index with a weight_map"
        ) from error
    outside = sorted({file for file in named.values() if Path(file).name != file})
    if outside:
        raise Refused(f"{folder / INDEX}: got {listed(outside)}, allowed: shards in the folder itself")
    absent = sorted({file for file in named.values() if not (folder / file).is_file()})
    if absent:
        raise Refused(f"{folder}: missing shards, named in {INDEX}: {listed(absent)}")
    return named


def _read_header(file: Path, dtypes: Mapping[str, torch.dtype]) -> dict[str, StoredTensor]:
    stored = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():
                header = tensors.get_slice(key)
                dtype = dtypes.get(header.get_dtype())
                if dtype is None:
                    raise Refused(
                        f"{file}: {key}: dtype: got {header.get_dtype()}, allowed: {', '.join(dtypes)} (unquantized weights)"
                    )
                stored[key] = StoredTensor(file, tuple(header.get_shape()), dtype)
    except (SafetensorError, OSError) as error:
        raise Refused(f"{file}: no whole safetensors file (truncated or damaged): {error}") from error
    return stored


def read_tensors(stored: dict[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its key, in the order of `stored`; mapped from the file, so that memory is used when it is."""
    with ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(file, framework="pt"))
            for file in {item.file for item in stored.values()}
        }
        for key, item in stored.items():
            yield key, opened[item.file].get_tensor(key)


def read_tensor(key: str, item: StoredTensor) -> Tensor:
    """One tensor, mapped from its file."""
    with safe_open(item.file, framework="pt") as tensors:
        return tensors.get_tensor(key)
