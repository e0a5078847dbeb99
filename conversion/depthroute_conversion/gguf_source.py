# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A .gguf file as a source: its tensors are dequantized one at a time, by the package gguf, and named and arranged as
transformers does when it loads such a file. What transformers would drop on the way, and with it the function, is refused."""

import re
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from depthroute.errors import Refused, one_line

from .architectures import architectures_of, language_models
from .keys import listed
from .side_files import SideFiles
from .source import Source


_BROKEN = (ValueError, OSError, LookupError, RuntimeError, OverflowError, struct.error)
_UNSCALED = ("none", "")
_READ_FOR_SOME = {"attention.key_length": "head_dim", "expert_feed_forward_length": "moe_intermediate_size"}
"""Metadata that transformers reads for some families only, and what it is called in a configuration."""

_STATED = {
    "license": "license",
    "license_name": "license.name",
    "license_link": "license.link",
    "language": "languages",
}
"""A card's entries, and what they are called in a file's metadata, under `general.`."""

_REPOSITORY = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")


class GgufSource(Source):
    """A .gguf file; its tensors are float32.

    Raises:
        Refused: no GGUF file, a damaged one, one of an architecture that is not hosted, the package gguf is missing, tensors
            that transformers would leave out, or scaled rotary frequencies, which it does not read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.label = path.name
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise Refused(f"{path}: got a file that does not begin with GGUF, allowed: a .gguf file")
        try:
            self._open()
        except ImportError as error:
            raise Refused(f"{path}: reading .gguf files needs the package gguf: {one_line(error)}") from error
        except Refused:
            raise
        except _BROKEN as error:
            raise Refused(f"{path}: transformers cannot load it: {type(error).__name__}: {one_line(error)}") from error

    def _open(self) -> None:
        from gguf import GGUFReader

        self.config: PreTrainedConfig = AutoConfig.from_pretrained(
            self.path.parent, gguf_file=self.path.name, local_files_only=True, trust_remote_code=False
        )
        hosted = architectures_of(self.config.model_type)
        if not hosted:
            got = self.config.model_type
            raise Refused(f"{self.path}: architectures: got model_type {got!r}, allowed: {language_models()}")
        self.architecture = hosted[0]
        self._reader = GGUFReader(self.path)
        family = self._field("general.architecture")
        for field, name in _READ_FOR_SOME.items():
            if (value := self._field(f"{family}.{field}")) is not None:
                setattr(self.config, name, value)
        scaling = self._field(f"{family}.rope.scaling.type")
        if scaling not in (None, *_UNSCALED):
            raise Refused(
                f"{self.path}: {family}.rope.scaling.type: got {scaling!r}, allowed: none (transformers does not read it); "
                "convert the model's own folder"
            )
        with torch.device("meta"):
            model = self.architecture.stock(self.config)
        self._processor = TENSOR_PROCESSORS.get(family, TensorProcessor)(config=self.config.to_dict())
        self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        self._check(model.state_dict())

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        return None if field is None else field.contents()

    def _check(self, expected: dict[str, Tensor]) -> None:
        self._parts: dict[str, list[Any]] = {}
        left_out = []
        for tensor in self._reader.tensors:
            # fused experts are named without the ending
            name = self._names.get(tensor.name) or self._names.get(tensor.name.removesuffix(".weight"))
            if name is None:
                left_out.append(tensor.name)
            else:
                self._parts.setdefault(name, []).append(tensor)
        if left_out:
            raise Refused(
                f"{self.path}: {listed(left_out)}: got tensors that transformers does not read, allowed: none of them; "
                "convert the model's own folder"
            )
        self._shapes = {key: tuple(expected[key].shape) for key in self._parts}
        for key, parts in self._parts.items():
            if sum(int(part.n_elements) for part in parts) != expected[key].numel():
                got = ", ".join(f"{part.name} {[int(n) for n in reversed(part.shape)]}" for part in parts)
                raise Refused(f"{self.path}: {got}: allowed: {key} {list(self._shapes[key])} by its metadata")

    def stated(self) -> dict[str, Any]:
        found = {ours: self._field(f"general.{theirs}") for ours, theirs in _STATED.items()}
        url = self._field("general.base_model.0.repo_url") if self._field("general.base_model.count") == 1 else None
        if match := _REPOSITORY.fullmatch(str(url)):
            found["base_model"] = match[1]
        return {key: value for key, value in found.items() if value}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> dict[str, torch.dtype]:
        return dict.fromkeys(self._parts, torch.float32)

    def is_verbatim(self, key: str) -> bool:
        return False

    def read(self, key: str) -> Tensor:
        """One tensor [...] float32, of one or several of the file's.

        Raises:
            Refused: a quantization that the package gguf cannot undo, or a shape that the metadata contradict.
        """
        from gguf import dequantize

        gathered: dict[str, Any] = {"tensors": {}}
        for part in self._parts[key]:
            try:
                weights = dequantize(part.data, part.tensor_type)
            except NotImplementedError as error:
                raise Refused(f"{self.path}: {part.name}: cannot be dequantized: {one_line(error)}") from error
            # halves of fused experts are put in their place by the processor, which then gives no name
            result = self._processor.process(
                weights=weights, name=part.name, tensor_key_mapping=self._names, parsed_parameters=gathered
            )
            if result.name is not None:
                gathered["tensors"][key] = torch.tensor(result.weights, dtype=torch.float32)
        tensor: Tensor = gathered["tensors"][key]
        if tuple(tensor.shape) != self._shapes[key]:
            raise Refused(f"{self.path}: {key}: got {list(tensor.shape)}, allowed: {list(self._shapes[key])}")
        return tensor

    def copy_side_files(self, out: Path) -> SideFiles:
        before = set(out.iterdir())
        tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, local_files_only=True)
        tokenizer.save_pretrained(out)
        return SideFiles(sorted(path.name for path in set(out.iterdir()) - before))
