# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What is converted: a folder of safetensors, a hub id that becomes one, or a .gguf file that transformers can load.

Opening a source checks all that can be known without reading its weights. No code of a source is ever run.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from depthroute.errors import Refused
from depthroute.files import download, is_hub_id

from .architectures import Architecture, choose_architecture
from .keys import KeyRules
from .side_files import SIDE_FILE_PATTERNS, SideFiles, copy_side_files
from .source_config import read_stock_config
from .weights import DTYPES, PICKLES, StoredTensor, read_headers, read_tensor, size_note


_HUB_FILES = ["*.safetensors", *SIDE_FILE_PATTERNS]


class Source(ABC):
    """A checked source.

    Attributes:
        label: what to call it in a report and a card: a hub id, or the last part of a path.
        hub_id: its hub id, where it has one.
        path: the folder or file on this machine.
        config: its configuration, of a hosted model type.
        architecture: its class, and which of ours takes its place.
        decisions: what was decided about it that its configuration does not say, one line each.
    """

    label: str
    hub_id: str | None = None
    path: Path
    config: PreTrainedConfig
    architecture: Architecture
    decisions: tuple[str, ...] = ()

    @cached_property
    def rules(self) -> KeyRules:
        """How its keys are named."""
        return self.architecture.rules(self.shapes())

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by the source's keys, which are those of its stock class."""

    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of every tensor, as `read` gives it."""

    def dtype(self) -> torch.dtype:
        """The type that a model of these tensors has: theirs, or the configuration's where they are of several."""
        rules = self.rules
        types = Counter(dtype for key, dtype in self.dtypes().items() if not rules.is_derived(key))
        if len(types) == 1:
            return next(iter(types))
        return self.config.dtype or types.most_common(1)[0][0]

    @abstractmethod
    def read(self, key: str) -> Tensor:
        """One tensor; no other is kept in memory."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with the source's key, read when it is asked for."""
        for key in self.shapes():
            yield key, self.read(key)

    @abstractmethod
    def is_verbatim(self, key: str) -> bool:
        """Whether the bytes that `read` gives are the bytes that the source stores: what a way back needs."""

    def files(self) -> dict[str, Path]:
        """The file of every tensor; empty where they are not stored one by one."""
        return {}

    def stated(self) -> dict[str, Any]:
        """What the weights themselves say for the head of a card, over what a card beside them says: licence, languages."""
        return {}

    def load_stock(self, dtype: torch.dtype) -> PreTrainedModel:
        """The source in transformers' own class, cast to `dtype`, ready to compute. The whole of it is in memory."""
        stock = self.architecture.stock
        # cast one by one: the whole of it in two types would be more memory than was counted with
        tensors = {key: tensor.to(dtype) for key, tensor in self.tensors()}
        # with no name given, `from_pretrained` only fills the model with these tensors
        model = stock.from_pretrained(
            None, config=self.config, state_dict=tensors, dtype=dtype, attn_implementation="sdpa"
        )
        return model.eval()

    def computing(self, stock: PreTrainedModel, read: Callable[[str], Tensor]) -> nn.Module:
        """What computes the source's outputs with a model of its stock class, whose weights may be in memory one layer at a time:
        the model itself, where there is nothing beside it.

        Args:
            stock: the model.
            read: a tensor that the stock class has no place for, by its key, as it is to be computed with.
        """
        return stock

    @abstractmethod
    def copy_side_files(self, out: Path) -> SideFiles:
        """Keep what belongs to the model beside its weights: tokenizer, chat template, generation configuration, licence."""


@dataclass
class FolderSource(Source):
    """A folder with `config.json` and safetensors weights."""

    path: Path
    label: str
    config: PreTrainedConfig
    architecture: Architecture
    stored: Mapping[str, StoredTensor]
    hub_id: str | None = None
    decisions: tuple[str, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: item.shape for key, item in self.stored.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {key: item.dtype for key, item in self.stored.items()}

    def read(self, key: str) -> Tensor:
        return read_tensor(key, self.stored[key])

    def is_verbatim(self, key: str) -> bool:
        return True

    def files(self) -> dict[str, Path]:
        return {key: item.file for key, item in self.stored.items()}

    def load_stock(self, dtype: torch.dtype) -> PreTrainedModel:
        stock = self.architecture.stock
        return stock.from_pretrained(self.path, dtype=dtype, attn_implementation="sdpa", local_files_only=True).eval()

    def copy_side_files(self, out: Path) -> SideFiles:
        return copy_side_files(self.path, out, self.config.vocab_size)


def open_source(source: str | Path, ignore_code: bool = False) -> Source:
    """Open and check a source.

    Args:
        source: a local folder, a `.gguf` file, or a hub id.
        ignore_code: open a folder that comes with code of its own as the stock architecture that its configuration names. The
            code is not run either way; what it would have computed otherwise is not kept.

    Raises:
        Refused: there is no such folder or file, the hub cannot give it, its configuration is not that of a supported,
            unquantized model, or its weights are not whole safetensors.
    """
    path = Path(source).expanduser()
    if source == "":  # as a path, this folder
        raise Refused("source: got '', allowed: a model folder, a .gguf file or a hub id")
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return _open_folder(path.resolve(), path.resolve().name, None, ignore_code)
    if isinstance(source, str) and is_hub_id(source):
        return _open_hub(source, ignore_code)
    raise Refused(
        f"source: got {str(source)!r}, which does not exist; allowed: a model folder, a .gguf file or a hub id"
    )


def _open_file(path: Path) -> Source:
    if path.suffix in PICKLES:
        raise Refused(f"{path}: got a pickle file, allowed: safetensors only (pickle files run code)")
    if path.suffix != ".gguf":
        raise Refused(f"{path}: got a file, allowed: a model folder, a .gguf file or a hub id")
    from .gguf_source import GgufSource

    return GgufSource(path.resolve())


def _open_folder(folder: Path, label: str, hub_id: str | None, ignore_code: bool) -> Source:
    # those are sources themselves
    from .fp8 import FP8_DTYPES, Fp8Source, block_size
    from .imported import foreign_entries, open_imported
    from .represet import is_own, open_own

    if is_own(folder):
        return open_own(folder, label, hub_id)
    if (entries := foreign_entries(folder)) is not None:
        return open_imported(folder, entries, label, hub_id, ignore_code)
    config, declared = read_stock_config(folder, ignore_code)
    settings = getattr(config, "quantization_config", None)
    stored = read_headers(folder, DTYPES if settings is None else FP8_DTYPES)
    architecture, decision = choose_architecture(config.model_type, declared, stored)
    decisions = tuple(line for line in (decision, size_note(folder, stored)) if line is not None)
    found = FolderSource(folder, label, config, architecture, stored, hub_id, decisions)
    return found if settings is None else Fp8Source(found, block_size(folder / "config.json", settings))


def _open_hub(hub_id: str, ignore_code: bool) -> Source:
    from .imported import foreign_entries
    from .represet import is_own

    folder = _download(hub_id, ["config.json"])
    if not is_own(folder) and foreign_entries(folder) is None:
        read_stock_config(folder, ignore_code)  # refuse before the weights travel
    return _open_folder(_download(hub_id, _HUB_FILES), hub_id, hub_id, ignore_code)


def _download(hub_id: str, patterns: list[str]) -> Path:
    return download(hub_id, patterns, "source", "a model folder, a .gguf file")
