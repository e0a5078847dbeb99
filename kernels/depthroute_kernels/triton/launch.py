# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Fixed launch configurations: what a kernel is compiled with follows from the architecture, D, H and M, never from T or S.

Nothing is tuned at run time, so the first step is as fast as the others and every run does the same additions in the same
order.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Architecture:
    """How much one program holds.

    Attributes:
        lanes: threads of a warp.
        max_warps: warps of a program at most.
        row_numbers: numbers of one row that a thread holds at most before the row gets more warps.
        forward_numbers: numbers of a block of queries that a thread holds (it holds two such blocks).
        apply_numbers: the same for the backward pass (three blocks).
        apply_warps: warps of a program of the backward pass at most.
        stages: sources under way while one is worked on.
        phase_programs: programs of a backward launch over the tokens at most; each leaves one partial sum of M · D.
        merge_programs: the same, of D.
    """

    lanes: int = 32
    max_warps: int = 8
    row_numbers: int = 16
    forward_numbers: int = 32
    apply_numbers: int = 16
    apply_warps: int = 16
    stages: int = 3
    phase_programs: int = 256
    merge_programs: int = 512


ARCHITECTURES = {
    "sm_80": Architecture(),
    "sm_90": Architecture(),
    "sm_100": Architecture(),
    # a wave has 64 lanes and registers for 512 numbers each; LDS is 64 KiB
    "gfx942": Architecture(lanes=64, max_warps=4, apply_warps=8, stages=2),
    "default": Architecture(stages=2),
}


def architecture_name(device: torch.device) -> str:
    """The row of `ARCHITECTURES` for a device: the newest one that is not newer than it."""
    if device.type != "cuda":
        return "default"
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return name if name in ARCHITECTURES else "default"
    major, _ = torch.cuda.get_device_capability(device)
    return "sm_100" if major >= 10 else "sm_90" if major == 9 else "sm_80" if major == 8 else "default"


def power_of_two(number: int) -> int:
    """The least power of two ≥ number ≥ 1."""
    return 1 << (number - 1).bit_length()


def tile(heads: int, head_dim: int) -> tuple[int, int]:
    """BLOCK_H, BLOCK_D: a whole row."""
    return power_of_two(heads), power_of_two(head_dim)


def warps_for(numbers: int, each: int, architecture: Architecture, limit: int | None = None) -> int:
    """Warps that leave every thread `each` of `numbers`, as far as the limit (of the architecture) allows."""
    return min(limit or architecture.max_warps, max(1, power_of_two(-(-numbers // (each * architecture.lanes)))))


def row_launch(heads: int, head_dim: int, architecture: Architecture) -> dict[str, int]:
    """For the kernels that hold single rows: Merge, forward and backward."""
    block_h, block_d = tile(heads, head_dim)
    warps = warps_for(block_h * block_d, architecture.row_numbers, architecture)
    return {"BLOCK_H": block_h, "BLOCK_D": block_d, "STAGES": architecture.stages, "num_warps": warps}


def forward_launch(queries: int, heads: int, head_dim: int, architecture: Architecture) -> dict[str, int]:
    """For the forward phase: BLOCK_M queries of whole rows for each program."""
    block_h, block_d = tile(heads, head_dim)
    room = architecture.max_warps * architecture.lanes * architecture.forward_numbers
    block_m = max(1, min(power_of_two(queries), room // (block_h * block_d)))
    warps = warps_for(block_m * block_h * block_d, architecture.forward_numbers, architecture)
    return {
        "BLOCK_M": block_m,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "STAGES": architecture.stages,
        "num_warps": warps,
    }


@dataclass(frozen=True)
class BackwardLaunch:
    """One launch that does both steps (`dots` is None), or one for each; and in how many pieces APPLY cuts the width."""

    dots: dict[str, int] | None
    apply: dict[str, int]
    splits: int


def backward_launch(queries: int, heads: int, head_dim: int, architecture: Architecture) -> BackwardLaunch:
    """For the backward phase. APPLY holds all queries: M too large for whole rows cuts the rows, not the queries."""
    block_h, block_d = tile(heads, head_dim)
    block_m = power_of_two(queries)
    room = architecture.apply_warps * architecture.lanes * architecture.apply_numbers
    shared = {"BLOCK_M": block_m, "BLOCK_H": block_h, "BLOCK_D": block_d, "STAGES": architecture.stages}
    dots_room = architecture.max_warps * architecture.lanes * architecture.forward_numbers
    shared["BLOCK_DOTS"] = max(1, min(block_m, dots_room // (block_h * block_d)))
    if block_m * block_h * block_d <= room:
        warps = warps_for(
            block_m * block_h * block_d, architecture.apply_numbers, architecture, architecture.apply_warps
        )
        both = {**shared, "APPLY_H": block_h, "APPLY_D": block_d, "num_warps": warps}
        return BackwardLaunch(None, both, 1)
    apply_d = max(1, min(block_d, room // block_m))
    warps = warps_for(shared["BLOCK_DOTS"] * block_h * block_d, architecture.forward_numbers, architecture)
    dots = {**shared, "APPLY_H": 1, "APPLY_D": 1, "num_warps": warps}
    warps = warps_for(block_m * apply_d, architecture.apply_numbers, architecture, architecture.apply_warps)
    apply = {**shared, "APPLY_H": 1, "APPLY_D": apply_d, "num_warps": warps}
    return BackwardLaunch(dots, apply, heads * -(-head_dim // apply_d))
