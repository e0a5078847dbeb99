# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a conversion notes about its source, so that there is a way back.

`converted_from` in `config.json` says what the model was: it travels with every save, also after training.
`depthroute_source.json` beside the weights says what its bytes were: every tensor of the source with its key, file and SHA-256,
or why they are no longer the source's. Neither names a path.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from depthroute import DepthRouteConfig
from depthroute.errors import Refused
from depthroute.files import write_json

from .keys import KeyPlan, listed
from .source import FolderSource, Source
from .weights import INDEX, bytes_of, read_headers


WAY_BACK = "depthroute_source.json"
ENTRY = "converted_from"
_PRIVATE = ("_name_or_path", "auto_map")  # code stays behind, and what names it with it
_FORMAT = 2
_READ = (1, _FORMAT)
"""Formats that are read. The first also had what the configuration has, as `origin`."""


@dataclass(frozen=True)
class Origin:
    """What a model was before it was converted.

    Attributes:
        source: its label.
        hub_id: its hub id, where it has one.
        architecture: its class in transformers.
        config: the entries of its `config.json`.
    """

    source: str
    hub_id: str | None
    architecture: str
    config: dict[str, Any]


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of the source: our key for it, and the SHA-256 of its bytes."""

    ours: str
    sha256: str


@dataclass(frozen=True)
class KeptFile:
    """A safetensors file of the source: what its header says besides the tensors, and the source's keys in it."""

    metadata: dict[str, str] | None
    keys: list[str]


@dataclass(frozen=True)
class WayBack:
    """What is needed to give the source's tensors back, byte for byte.

    Attributes:
        origin: what it was.
        differs: why the bytes are not the source's, one reason each; then there are no tensors and files here.
        tensors: by the source's keys.
        files: by the file's name.
        index: what the index says besides its map, None where there was one file.
        left_out: keys of the source that are no weights.
    """

    origin: Origin
    differs: list[str] = field(default_factory=list)
    tensors: dict[str, KeptTensor] = field(default_factory=dict)
    files: dict[str, KeptFile] = field(default_factory=dict)
    index: dict[str, Any] | None = None
    left_out: list[str] = field(default_factory=list)


def origin_of(source: Source) -> Origin:
    """What a stock or imported source is."""
    path = source.path / "config.json"
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if stored.get("model_type") != source.config.model_type:  # a .gguf file, or another's names for the same things
        stored = source.config.to_dict()
    entries = {key: value for key, value in stored.items() if key not in _PRIVATE}
    return Origin(source.label, source.hub_id, source.architecture.name, entries)


def sha256_of(tensor: Tensor) -> str:
    """Of a tensor's bytes in row-major order, in hexadecimal digits."""
    return hashlib.sha256(bytes_of(tensor.contiguous())).hexdigest()


def find_way_back(
    source: Source, plan: KeyPlan, written: Callable[[str], Tensor], dtype: torch.dtype | None
) -> WayBack:
    """The way back from a conversion of a stock or imported source.

    Args:
        source: what was converted.
        plan: what became of its tensors.
        written: a written tensor by our key.
        dtype: what every tensor was cast to, None where none was.
    """
    origin = origin_of(source)
    differs = []
    kept = {theirs: ours for ours, theirs in plan.copied.items()}
    kept |= {source.rules.to_source(ours): to for ours, to in plan.shared.items()}
    if other := sorted(key for key in kept if not source.is_verbatim(key)):
        differs.append(f"{len(other)} tensors were computed from what the source stores: {listed(other)}")
    if cast := _cast(source, kept, dtype):
        differs.append(cast)
    if differs:
        return WayBack(origin, differs)
    places = source.files()
    files: dict[str, KeptFile] = {}
    for file in sorted(set(places.values())):
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        files[file.name] = KeptFile(metadata, sorted(key for key in kept if places[key] == file))
    # one of them is in memory at a time; a head that is tied is the embedding
    tensors = {theirs: KeptTensor(ours, sha256_of(written(ours))) for theirs, ours in kept.items()}
    return WayBack(origin, [], tensors, files, _index_metadata(source.path), sorted(set(places) - set(kept)))


def note_origin(config: DepthRouteConfig, source: Source) -> None:
    """Set the entry in the configuration of a conversion; one of our own folders hands on the entry that it has."""
    if source.config.model_type != "depthroute":
        setattr(config, ENTRY, asdict(origin_of(source)))
    elif isinstance(entry := read_converted_entry(source.path), dict):
        setattr(config, ENTRY, entry)


def read_converted_entry(folder: Path) -> Any:
    """The entry in the configuration of a folder of ours, as it stands there; None where it was trained from scratch."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get(ENTRY)


def leave_way_back(folder: Path, source: Source, plan: KeyPlan, dtype: torch.dtype | None) -> None:
    """Write `depthroute_source.json` into the folder of a conversion, whose weights are written; of a folder of ours, hand on
    what it has."""
    if source.config.model_type != "depthroute":
        written = FolderSource(folder, folder.name, source.config, source.architecture, read_headers(folder))
        way_back = find_way_back(source, plan, written.read, dtype)
    elif (source.path / WAY_BACK).is_file() and read_converted_entry(source.path) is not None:
        way_back = read_way_back(source.path)
        if cast := _cast(source, source.shapes(), dtype):
            way_back = WayBack(way_back.origin, [*way_back.differs, cast])
    else:
        return
    entries = asdict(way_back)
    del entries["origin"]  # the configuration has it
    write_json(folder / WAY_BACK, {"format": _FORMAT, **entries})


def read_way_back(folder: Path) -> WayBack:
    """What a folder says about its source: the entry of its configuration, and its `depthroute_source.json`, without which the
    bytes are not known.

    Raises:
        Refused: no such entry, or one of the two that cannot be read.
    """
    if (entry := read_converted_entry(folder)) is None:
        raise Refused(f"{folder / 'config.json'}: no {ENTRY}, allowed: a conversion of a stock model, which has one")
    with _as_written(f"{folder / 'config.json'}: {ENTRY}"):
        origin = _origin(entry)
    path = folder / WAY_BACK
    if not path.is_file():
        return WayBack(origin, [f"{WAY_BACK} is missing, the model was saved anew since"])
    with _as_written(path):
        return _parsed(json.loads(path.read_text(encoding="utf-8")), origin)


@contextmanager
def _as_written(where: Path | str) -> Iterator[None]:
    """
    Raises:
        Refused: what is read there is not as a conversion wrote it.
    """
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(f"{where}: {type(error).__name__}, allowed: as `depthroute convert` wrote it") from error


def _cast(source: Source, keys: Any, dtype: torch.dtype | None) -> str | None:
    if dtype is None:
        return None
    other = sorted({str(found) for key, found in source.dtypes().items() if key in keys} - {str(dtype)})
    return f"dtype: {' and '.join(other)} became {dtype}" if other else None


def _index_metadata(folder: Path) -> dict[str, Any] | None:
    if not (folder / INDEX).is_file():
        return None
    metadata = json.loads((folder / INDEX).read_text(encoding="utf-8")).get("metadata", {})
    return metadata if isinstance(metadata, dict) else {}


def _parsed(entries: dict[str, Any], origin: Origin) -> WayBack:
    if entries["format"] not in _READ:
        raise ValueError(f"format {entries['format']}")
    tensors = {key: KeptTensor(**value) for key, value in entries["tensors"].items()}
    files = {_name(name): KeptFile(**value) for name, value in entries["files"].items()}
    index = entries["index"]
    if sorted(key for file in files.values() for key in file.keys) != sorted(tensors):
        raise ValueError("its files do not have every tensor once")
    if not (index is None or isinstance(index, dict)):
        raise TypeError("its index is no object")
    return WayBack(origin, _texts(entries["differs"]), tensors, files, index, _texts(entries["left_out"]))


def _origin(entries: dict[str, Any]) -> Origin:
    origin = Origin(**entries)
    if not (isinstance(origin.architecture, str) and isinstance(origin.config, dict)):
        raise TypeError("no architecture, or no configuration")
    return origin


def _texts(values: list[Any]) -> list[str]:
    if not (isinstance(values, list) and all(isinstance(value, str) for value in values)):
        raise TypeError("no list of texts")
    return values


def _name(name: str) -> str:
    if Path(name).name != name or not name.endswith(".safetensors"):
        raise ValueError(f"{name!r} is no name of a safetensors file")
    return name
