# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The two layouts of sparse experts: fused, as the model holds them (one three-dimensional tensor for all experts), and
apart, as most checkpoints do (one matrix per expert). transformers loads either; a conversion keeps the source's.

    mlp.experts.gate_up_proj [E, 2I, D]    mlp.experts.0.gate_proj.weight [I, D]   mlp.experts.0.up_proj.weight [I, D]   …
    mlp.experts.down_proj    [E, D, I]     mlp.experts.0.down_proj.weight [D, I]   …

E experts, I the width of one.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor


FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Fused tensor → the matrices that each expert's slice is made of, stacked over rows."""

_FUSED_KEY = re.compile(rf"(?P<experts>.*\.mlp\.experts)\.(?P<name>{'|'.join(FUSED)})")


def apart_shapes(key: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The matrices of a fused tensor, with their shapes; empty where `key` is no fused tensor."""
    match = _FUSED_KEY.fullmatch(key)
    if match is None:
        return {}
    experts, rows, columns = shape
    parts = FUSED[match["name"]]
    return {
        f"{match['experts']}.{index}.{part}.weight": (rows // len(parts), columns)
        for index in range(experts)
        for part in parts
    }


def in_layout_of(keys: Collection[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """A model's shapes, with its experts in the layout in which a checkpoint with these keys holds them. Each layer's may
    be another."""
    found: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        parts = {} if key in keys else apart_shapes(key, shape)
        found.update(parts if any(part in keys for part in parts) else {key: shape})
    return found


def apart(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by key, fused ones as views of their matrices: the same numbers under the same names for both layouts."""
    for key, tensor in tensors:
        parts = apart_shapes(key, tuple(tensor.shape)) if tensor.dim() == 3 else {}
        if not parts:
            yield key, tensor
            continue
        matrices = (
            matrix for expert in tensor for matrix in expert.chunk(len(parts) // tensor.shape[0], dim=0)
        )  # in the order of `apart_shapes`
        yield from zip(parts, matrices)
