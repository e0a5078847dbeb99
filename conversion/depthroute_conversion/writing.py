# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Weights, written tensor by tensor into safetensors shards: what is in memory is one tensor, and never a shard.

safetensors itself writes a file from tensors that are all in memory; its format is a header and then the tensors' bytes, so
that a file can also be written from front to back. Each one is read back by safetensors when it is done.
"""

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from depthroute.errors import Refused

from .headers import DTYPES, read_header
from .progress import Progress
from .unfinished import UnfinishedFolder
from .weights import INDEX, bytes_of, is_finite, pieces


MAX_SHARD_SIZE = "5GB"
"""Default bytes of a shard: what an interrupted conversion has to do again at most."""

METADATA = {"format": "pt"}
"""As transformers has it in every header."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ShardPlan:
    """Which tensors lie in which file: one file where all fit, as transformers has it.

    Attributes:
        files: the keys of each file, by its name.
        tensors: every tensor, by its key.
    """

    files: Mapping[str, list[str]]
    tensors: Mapping[str, PlannedTensor]

    @property
    def total_size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def largest_shard(self) -> int:
        """The bytes of the largest file's tensors."""
        return max(sum(self.tensors[key].size for key in keys) for keys in self.files.values())


def plan_shards(tensors: Mapping[str, PlannedTensor], max_shard_size: int | str = MAX_SHARD_SIZE) -> ShardPlan:
    """Distribute tensors over files, in their order.

    Args:
        tensors: what is to be written.
        max_shard_size: bytes of a file at most, or such as "5GB"; a larger tensor has a file of its own.

    Raises:
        Refused: a size that is none.
    """
    try:
        split = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda tensor: tensor.size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise Refused(f"max_shard_size: got {max_shard_size!r}, allowed: bytes, or such as 5GB or 500MB") from error
    return ShardPlan(split.filename_to_tensors, tensors)


def write_weights(work: UnfinishedFolder, plan: ShardPlan, read: Callable[[str], Tensor], progress: Progress) -> None:
    """Write every shard that is not finished yet, and the index where there are several.

    Args:
        work: the folder.
        plan: what is to be written.
        read: one tensor by its key, of the planned shape, of any floating-point type; only one is asked for at a time.
        progress: told about every byte.

    Raises:
        Refused: a value that is finite but not so in the planned type, or a tensor of another shape.
        OSError: writing fails; the error names the file.
    """
    for name, keys in plan.files.items():
        tensors = {key: plan.tensors[key] for key in keys}
        if not work.is_finished(name, progress):
            work.note(name, write_shard(work.files / name, tensors, read, progress))
    if len(plan.files) > 1:
        entries = {
            "metadata": {
                "total_parameters": sum(math.prod(tensor.shape) for tensor in plan.tensors.values()),
                "total_size": plan.total_size,
            },
            "weight_map": {key: name for name, keys in plan.files.items() for key in keys},
        }
        text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
        with _naming(work.files / INDEX), (work.files / INDEX).open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())


def write_shard(
    file: Path,
    tensors: Mapping[str, PlannedTensor],
    read: Callable[[str], Tensor],
    progress: Progress,
    metadata: Mapping[str, str] | None = METADATA,
) -> str:
    """Write one safetensors file with that metadata in its header; returns its SHA-256. It has its name only once it is on the
    disk. Raises as `write_weights`."""
    # as safetensors sorts them: the widest type first keeps every tensor aligned
    order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
    partial = file.with_name(f"{file.name}.partial")
    digest = hashlib.sha256()
    with _naming(partial), partial.open("wb", buffering=0) as stream:
        for block in _blocks(order, tensors, read, metadata):
            digest.update(block)
            progress.advance(len(block))
            while block:  # an unbuffered write may take a part only
                block = block[stream.write(block) :]
        os.fsync(stream.fileno())
    written = {key: (item.shape, item.dtype) for key, item in read_header(partial).items()}
    if written != {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}:
        raise OSError(errno.EIO, "holds other tensors than were written", str(partial))
    partial.rename(file)
    return digest.hexdigest()


def _blocks(
    order: list[str],
    tensors: Mapping[str, PlannedTensor],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None,
) -> Iterator[memoryview]:
    """The bytes of the file, in order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for key in order:
        begin, end = end, end + tensors[key].size
        kind = _NAMES[tensors[key].dtype]
        header[key] = {"dtype": kind, "shape": list(tensors[key].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for key in order:
        tensor = read(key)
        if tuple(tensor.shape) != tensors[key].shape:
            raise Refused(f"{key}: got {list(tensor.shape)}, allowed: {list(tensors[key].shape)}")
        yield from map(bytes_of, cast_pieces(key, tensor, tensors[key].dtype))
        del tensor  # before the next one is read


def cast_pieces(key: str, tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor's elements, cast, a piece at a time.

    Raises:
        Refused: a value that is finite, and not so in `dtype`.
    """
    for piece in pieces(tensor):
        cast = piece.to(dtype)
        if cast.dtype != piece.dtype and not is_finite(cast) and is_finite(piece):
            largest = tensor.abs().max().item()
            raise Refused(
                f"dtype: got {dtype}, in which {key} overflows (largest value {largest:.4g}); allowed: a wider type"
            )
        yield cast


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Errors of writing, which do not say where they happened, name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error
