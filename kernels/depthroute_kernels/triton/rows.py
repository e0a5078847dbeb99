# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: rows of tensors that are known by address, and the tile [heads, width of a head] of a row."""

import triton
import triton.language as tl


# below every logit, and finite: a source whose bias is −inf has weight zero wherever it stands
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)


@triton.jit
def row(table, entry, offset, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The element at `offset` (int64, in elements) of the tensor whose address is at `entry`."""
    pointer = tl.load(table + entry).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(tl.multiple_of(pointer, 16) + offset, 16)
    else:
        pointer += offset
    return pointer


@triton.jit
def row_of_each(table, entries, there, offset, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """`row` for a vector of entries; `there` says which of them exist."""
    pointers = tl.load(table + entries, mask=there, other=0).to(tl.pointer_type(TYPE)) + offset
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers


@triton.jit
def columns(
    first_head,
    first_column,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Offsets of a tile in its row, and which of them exist."""
    h = first_head + tl.arange(0, BLOCK_H)
    d = first_column + tl.arange(0, BLOCK_D)
    return h[:, None] * HEAD_DIM + d[None, :], (h < HEADS)[:, None] & (d < HEAD_DIM)[None, :]


@triton.jit
def publish(AMD: tl.constexpr):
    """Every thread of the program sees what any of them stored before. On AMD a barrier alone does not wait for stores."""
    if AMD:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\n\tv_mov_b32 $0, $1",
            "=v,v,~{memory}",
            [tl.full([], 0, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()
