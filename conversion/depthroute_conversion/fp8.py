# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Fine-grained FP8 checkpoints (`quant_method: "fp8"`), read as what they stand for.

    weight [..., R, C] float8_e4m3fn    weight_scale_inv [..., ⌈R/b_r⌉, ⌈C/b_c⌉]      value = weight · its block's scale

with `weight_block_size` = [b_r, b_c]; the last blocks are smaller where a size is no multiple. Without block sizes a matrix has
one scale. The product is taken in float32 and rounded once, to the type that the configuration names. A matrix without a
scale is one that was not quantized. Activation scales say how inputs were rounded at run time, which no model in a wider type
does: they are left out.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from depthroute.errors import Refused

from .headers import DTYPES, StoredTensor
from .keys import listed
from .side_files import SideFiles
from .source import FolderSource, Source
from .weights import read_tensor


FP8_DTYPES = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn}
"""Tensor types of such a checkpoint, by their names in safetensors headers."""

_SCALE = "_scale_inv"
_ACTIVATIONS = ("activation_scale", "input_scale")


def block_size(where: Path, settings: dict[str, Any]) -> tuple[int, int] | None:
    """The block [b_r, b_c] of one scale; None where a matrix has one.

    Args:
        where: the configuration's file, for messages.
        settings: its `quantization_config`.

    Raises:
        Refused: a number format that is not e4m3, or a block size that is no pair of positive integers.
    """
    kind = settings.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise Refused(f"{where}: quantization_config: fmt: got {kind!r}, allowed: 'e4m3'")
    size = settings.get("weight_block_size")
    if size is None:
        return None
    if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise Refused(f"{where}: quantization_config: weight_block_size: got {size!r}, allowed: two sizes ≥ 1, or null")
    return size[0], size[1]


class Fp8Source(Source):
    """A view of a folder: its scales are hidden, and its matrices multiplied by them when they are read.

    Raises:
        Refused: a matrix without scale or a scale without matrix, a scale of another shape than the blocks imply, or experts
            whose gate and up matrices would share a block.
    """

    def __init__(self, folder: FolderSource, block: tuple[int, int] | None):
        self.folder = folder
        self.path, self.label, self.hub_id = folder.path, folder.label, folder.hub_id
        self.architecture = folder.architecture
        self.block = block
        stored = folder.stored
        self._quantized = {key: item for key, item in stored.items() if item.dtype == torch.float8_e4m3fn}
        self._scales = {key: item for key, item in stored.items() if key.endswith(_SCALE)}
        hidden = {key for key in stored if key.endswith(_ACTIVATIONS)} | set(self._scales)
        self._shown = {key: item for key, item in stored.items() if key not in hidden}
        self.config: PreTrainedConfig = folder.config
        self._dtype: torch.dtype = self.config.dtype or _plain_dtype(self._shown, self._quantized)
        self.config.dtype = self._dtype
        del self.config.quantization_config
        self._check()
        self.decisions = (*folder.decisions, *self._decisions(hidden - set(self._scales)))

    def _decisions(self, activations: set[str]) -> Iterator[str]:
        name = str(self._dtype).removeprefix("torch.")
        yield f"quantization_config: {len(self._quantized)} tensors of FP8 with scales, dequantized to {name}"
        if activations:
            yield f"{len(activations)} scales of activations left out: inputs are no longer rounded to FP8"

    def _check(self) -> None:
        path = self.path
        if bare := sorted(key for key in self._quantized if key + _SCALE not in self._scales):
            raise Refused(f"{path}: {listed(bare)}: got FP8 without a scale, allowed: each with its {_SCALE[1:]}")
        matched = {key + _SCALE for key in self._quantized}
        if alone := sorted(set(self._scales) - matched):
            raise Refused(f"{path}: {listed(alone)}: got scales of no FP8 tensor, allowed: one for each")
        for key, item in self._quantized.items():
            scale = self._scales[key + _SCALE]
            if len(item.shape) < 2:
                raise Refused(f"{path}: {key}: got FP8 of shape {list(item.shape)}, allowed: matrices")
            if scale.dtype == torch.float8_e4m3fn or scale.shape not in self._scale_shapes(item.shape):
                allowed = " or ".join(str(list(shape)) for shape in self._scale_shapes(item.shape))
                kind = str(scale.dtype).removeprefix("torch.")
                raise Refused(
                    f"{path}: {key}{_SCALE}: got {list(scale.shape)} of {kind}, allowed: {allowed} by the blocks "
                    f"{None if self.block is None else list(self.block)}, in a plain type"
                )
            rows = item.shape[-2] // 2
            if key.endswith("gate_up_proj") and self.block is not None and rows % self.block[0]:
                raise Refused(
                    f"{path}: {key}: got {rows} rows of each expert's gate, allowed: a multiple of {self.block[0]} "
                    "(gate and up would share a block); convert a checkpoint with one tensor per expert"
                )

    def _scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        *leading, rows, columns = shape
        if self.block is not None:
            return [(*leading, math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1]))]
        return [(*leading, 1, 1), tuple(leading)] if leading else [(), (1,), (1, 1)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: item.shape for key, item in self._shown.items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        return {key: self._dtype if key in self._quantized else item.dtype for key, item in self._shown.items()}

    def files(self) -> dict[str, Path]:
        return {key: item.file for key, item in self._shown.items()}

    def is_verbatim(self, key: str) -> bool:
        return key not in self._quantized

    def read(self, key: str) -> Tensor:
        """One tensor; an FP8 one multiplied by its scales.

        Raises:
            Refused: a scale that is not finite.
        """
        tensor = read_tensor(key, self._shown[key])
        if key not in self._quantized:
            return tensor
        scale = read_tensor(key + _SCALE, self._scales[key + _SCALE])
        if not torch.isfinite(scale).all():
            raise Refused(f"{self._scales[key + _SCALE].file}: {key}{_SCALE}: got values that are not finite")
        return dequantize(tensor, scale, self.block, self._dtype)

    def copy_side_files(self, out: Path) -> SideFiles:
        return self.folder.copy_side_files(out)


def dequantize(tensor: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype) -> Tensor:
    """FP8 values times their scales.

    Args:
        tensor: [..., R, C] float8_e4m3fn.
        scale: [..., ⌈R/b_r⌉, ⌈C/b_c⌉], or one number for each matrix where there are no blocks.
        block: [b_r, b_c], or None.
        dtype: of the result.

    Returns:
        [..., R, C]; never more than one row of blocks is in float32.
    """
    *_, rows, columns = tensor.shape
    height, width = block or (rows, columns)
    grid = scale.float().reshape(-1, math.ceil(rows / height), math.ceil(columns / width))
    out = torch.empty(tensor.shape, dtype=dtype)
    for source, target, scales in zip(tensor.reshape(-1, rows, columns), out.reshape(-1, rows, columns), grid):
        for source_rows, target_rows, row in zip(source.split(height), target.split(height), scales):
            target_rows.copy_(source_rows.float() * row.repeat_interleave(width)[:columns])
    return out


def _plain_dtype(shown: dict[str, StoredTensor], quantized: dict[str, StoredTensor]) -> torch.dtype:
    """The type of what was not quantized, where the configuration names none."""
    return next((item.dtype for key, item in shown.items() if key not in quantized), torch.bfloat16)
