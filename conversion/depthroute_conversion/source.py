# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What is converted: a folder of safetensors, a hub id that becomes one, or a .gguf file that transformers can load.

Opening a source checks all that can be known without reading its weights. No code of a source is ever run.
"""

import json
import shutil
import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from depthroute.errors import Refused, one_line
from depthroute.files import download, is_hub_id
from depthroute.modeling.configuration_depthroute import HOSTED_MODEL_TYPES, read_backbone_config

from .keys import KEY_RULES, KeyRules
from .tokenizer import copy_tokenizer
from .weights import PICKLES, StoredTensor, read_headers, read_tensors


STOCK_CLASSES: dict[str, type[PreTrainedModel]] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
    "llama": LlamaForCausalLM,
}
"""By model type: the class whose logits a conversion must keep."""

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "README.md", "LICENSE*", "NOTICE*"]
_LEGAL = ("LICENSE*", "NOTICE*")


class Source(ABC):
    """A checked source.

    Attributes:
        label: what to call it in a report and a card: a hub id, or the last part of a path.
        hub_id: its hub id, where it has one.
        path: the folder or file on this machine.
        config: its configuration, of a hosted model type.
    """

    label: str
    hub_id: str | None = None
    path: Path
    config: PreTrainedConfig

    @property
    def rules(self) -> KeyRules:
        """How its keys are named."""
        return KEY_RULES[self.config.model_type]

    @abstractmethod
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by the source's keys."""

    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The type that a model of these tensors has: theirs, or the configuration's where they are of several."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with the source's key."""

    @abstractmethod
    def load_stock(self, dtype: torch.dtype) -> PreTrainedModel:
        """The source in transformers' own class, cast to `dtype`, ready to compute logits."""

    @abstractmethod
    def copy_side_files(self, out: Path) -> list[str]:
        """Keep tokenizer, chat template, generation configuration and licence; returns their names."""


@dataclass
class FolderSource(Source):
    """A folder with `config.json` and safetensors weights."""

    path: Path
    label: str
    config: PreTrainedConfig
    stored: Mapping[str, StoredTensor]
    hub_id: str | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: item.shape for key, item in self.stored.items()}

    def dtype(self) -> torch.dtype:
        types = Counter(item.dtype for key, item in self.stored.items() if not self.rules.is_derived(key))
        if len(types) == 1:
            return next(iter(types))
        return self.config.dtype or types.most_common(1)[0][0]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return read_tensors(dict(self.stored))

    def load_stock(self, dtype: torch.dtype) -> PreTrainedModel:
        stock = STOCK_CLASSES[self.config.model_type]
        return stock.from_pretrained(self.path, dtype=dtype, attn_implementation="sdpa", local_files_only=True).eval()

    def copy_side_files(self, out: Path) -> list[str]:
        kept = copy_tokenizer(self.path, out)
        for pattern in ("generation_config.json", *_LEGAL):
            for file in sorted(self.path.glob(pattern)):
                shutil.copyfile(file, out / file.name)
                kept.append(file.name)
        return kept


class GgufSource(Source):
    """A .gguf file. Its tensors are dequantized to float32 by transformers, once: reading it takes a while."""

    def __init__(self, path: Path):
        self.path = path
        self.label = path.name
        self._model = _load_gguf(path)
        self.config = self._model.config
        # what the weights were quantized with is no property of the dequantized model
        del self.config.quantization_config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in self._model.state_dict().items()}

    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.state_dict().items()

    def load_stock(self, dtype: torch.dtype) -> PreTrainedModel:
        # a plain model: the loaded one still takes itself for a quantized one
        return (
            type(self._model)
            .from_pretrained(
                None, config=self.config, state_dict=self._model.state_dict(), dtype=dtype, attn_implementation="sdpa"
            )
            .eval()
        )

    def copy_side_files(self, out: Path) -> list[str]:
        before = set(out.iterdir())
        tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, local_files_only=True)
        tokenizer.save_pretrained(out)
        return sorted(path.name for path in set(out.iterdir()) - before)


def open_source(source: str | Path) -> Source:
    """Open and check a source.

    Args:
        source: a local folder, a `.gguf` file, or a hub id.

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
        return _open_folder(path.resolve(), path.resolve().name)
    if isinstance(source, str) and is_hub_id(source):
        return _open_hub(source)
    raise Refused(
        f"source: got {str(source)!r}, which does not exist; allowed: a model folder, a .gguf file or a hub id"
    )


def _open_file(path: Path) -> Source:
    if path.suffix in PICKLES:
        raise Refused(f"{path}: got a pickle file, allowed: safetensors only (pickle files run code)")
    if path.suffix != ".gguf":
        raise Refused(f"{path}: got a file, allowed: a model folder, a .gguf file or a hub id")
    return GgufSource(path.resolve())


def _open_folder(folder: Path, label: str, hub_id: str | None = None) -> FolderSource:
    config = read_stock_config(folder)
    return FolderSource(folder, label, config, read_headers(folder), hub_id)


def _open_hub(hub_id: str) -> FolderSource:
    folder = _download(hub_id, ["config.json"])
    read_stock_config(folder)  # refuse before the weights travel
    return _open_folder(_download(hub_id, _HUB_FILES), hub_id, hub_id)


def _download(hub_id: str, patterns: list[str]) -> Path:
    return download(hub_id, patterns, "source", "a model folder, a .gguf file")


def read_stock_config(folder: Path) -> PreTrainedConfig:
    """The configuration of an unquantized Qwen3, Qwen3-MoE or Llama causal language model.

    Raises:
        Refused: `config.json` is missing, unreadable or out of range; another architecture; quantized weights, named by
            their method.
    """
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise Refused(
            f"{path}: missing, the folder holds a PEFT adapter; allowed: a whole model (merge the adapter first)"
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {type(error).__name__}, allowed: a readable model configuration") from error
    if not isinstance(entries, dict):
        raise Refused(f"{path}: got a {type(entries).__name__}, allowed: a model configuration")
    _check_architecture(path, entries)
    if entries.get("quantization_config") is not None:
        method = _quantization_method(entries["quantization_config"])
        raise Refused(f"{path}: quantization_config: got {method!r}, allowed: unquantized weights")
    try:
        return read_backbone_config(folder)
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        raise Refused(f"{path}: {one_line(error)}") from error


def _check_architecture(path: Path, entries: dict) -> None:
    names = [stock.__name__ for stock in STOCK_CLASSES.values()]
    given = entries.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise Refused(f"{path}: architectures: got {given!r}, allowed: a list of one of {', '.join(names)}")
    model_type = entries.get("model_type")
    if model_type == "depthroute":
        raise Refused(f"{path}: model_type: got 'depthroute', already converted; allowed: a stock {' or '.join(names)}")
    if model_type not in HOSTED_MODEL_TYPES or not set(given) <= {STOCK_CLASSES[model_type].__name__}:
        shown = ", ".join(map(str, given)) or "none"
        raise Refused(f"{path}: architectures: got {shown} (model_type {model_type!r}), allowed: {' or '.join(names)}")


def _quantization_method(settings: object) -> str:
    if not isinstance(settings, dict):
        return str(settings)
    if any(settings.get(name) for name in ("load_in_8bit", "load_in_4bit")):
        return "bitsandbytes"
    return str(settings.get("quant_method", "unnamed"))


def _load_gguf(path: Path) -> PreTrainedModel:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise Refused(f"{path}: got a file that does not begin with GGUF, allowed: a .gguf file")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
        )
    except ImportError as error:
        raise Refused(f"{path}: reading .gguf files needs the package gguf: {one_line(error)}") from error
    except (ValueError, OSError, LookupError, RuntimeError, OverflowError, struct.error) as error:
        raise Refused(f"{path}: transformers cannot load it: {type(error).__name__}: {one_line(error)}") from error
    stock = STOCK_CLASSES.get(model.config.model_type)
    if type(model) is not stock:
        names = " or ".join(item.__name__ for item in STOCK_CLASSES.values())
        raise Refused(f"{path}: architectures: got {type(model).__name__}, allowed: {names}")
    return model
