# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Fixed launch configurations: what a kernel is compiled with follows from the architecture, D, H and M, never from T or S.

Nothing is tuned at run time, so the first step is as fast as the others and every run does the same additions in the same
order.
"""

from dataclasses import dataclass

import torch


REGISTERS = 65536
"""Of a streaming multiprocessor, in every NVIDIA architecture of the table."""


@dataclass(frozen=True)
class Architecture:
    """How much one program holds. "Numbers" are those of one tile that each thread holds.

    Attributes:
        lanes: threads of a warp.
        forward_numbers, forward_warps: of the forward phase (two tiles of a block of queries), and warps of a program at most.
        backward_numbers, backward_warps: of the gradients of the phase's sources and queries (three tiles of all queries).
        fused_numbers, fused_warps: where all queries fit in this, one launch does the whole backward phase.
        row_numbers, row_warps: of a merge (forward two, backward five tiles of one row).
        stages, pipeline_bytes: sources of a phase under way while one is worked on, and the shared memory that they, values
            and keys of 4 bytes, may take.
        phase_programs, merge_programs: programs of a backward launch over the tokens at most; each leaves one partial sum
            of the queries' gradients.
        phase_registers, dots_registers, merge_registers, merge_backward_registers: registers of a thread at most in these kernels. Left to
            itself the assembler takes fewer to fit more programs, and spills. None: not limited.
    """

    lanes: int = 32
    forward_numbers: int = 32
    forward_warps: int = 8
    backward_numbers: int = 16
    backward_warps: int = 8
    fused_numbers: int = 8
    fused_warps: int = 16
    row_numbers: int = 8
    row_warps: int = 16
    stages: int = 3
    pipeline_bytes: int = 98304
    phase_programs: int = 256
    merge_programs: int = 512
    phase_registers: int | None = 200
    dots_registers: int | None = 128
    merge_registers: int | None = 64
    merge_backward_registers: int | None = 96


ARCHITECTURES = {
    "sm_80": Architecture(),
    "sm_90": Architecture(),
    "sm_100": Architecture(),
    # waves of 64 lanes, 512 registers for each lane, no limit to ask for
    "gfx942": Architecture(
        lanes=64,
        forward_warps=4,
        backward_warps=4,
        fused_warps=8,
        row_warps=8,
        stages=2,
        pipeline_bytes=65536,
        phase_registers=None,
        dots_registers=None,
        merge_registers=None,
        merge_backward_registers=None,
    ),
    "default": Architecture(
        stages=2, phase_registers=None, dots_registers=None, merge_registers=None, merge_backward_registers=None
    ),
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


def warps_for(numbers: int, each: int, limit: int, architecture: Architecture) -> int:
    """Warps that leave every thread `each` of `numbers`, as far as the limit allows."""
    return min(limit, max(1, power_of_two(-(-numbers // (each * architecture.lanes)))))


def limited(options: dict[str, int], registers: int | None) -> dict[str, int]:
    """The options, with a limit of registers where there is one: no more than one program of that many warps can have."""
    if registers is None:
        return options
    return {**options, "maxnreg": min(registers, REGISTERS // (32 * options["num_warps"]))}


def merge_launch(heads: int, head_dim: int, architecture: Architecture, backward: bool) -> dict[str, int]:
    """For Merge: whole rows."""
    block_h, block_d = tile(heads, head_dim)
    warps = warps_for(block_h * block_d, architecture.row_numbers, architecture.row_warps, architecture)
    options = {"BLOCK_H": block_h, "BLOCK_D": block_d, "num_warps": warps}
    return limited(options, architecture.merge_backward_registers if backward else architecture.merge_registers)


def block_of_queries(queries: int, row: int, architecture: Architecture) -> tuple[int, int]:
    """How many queries of whole rows a program holds, and its warps."""
    room = architecture.forward_warps * architecture.lanes * architecture.forward_numbers
    block = max(1, min(power_of_two(queries), room // row))
    return block, warps_for(block * row, architecture.forward_numbers, architecture.forward_warps, architecture)


def stages_of(row: int, architecture: Architecture) -> int:
    """Sources under way: fewer where rows are long."""
    return max(1, min(architecture.stages, architecture.pipeline_bytes // (8 * row)))


def forward_launch(queries: int, heads: int, head_dim: int, architecture: Architecture) -> dict[str, int]:
    """For the forward phase: BLOCK_M queries of whole rows for each program."""
    block_h, block_d = tile(heads, head_dim)
    block_m, warps = block_of_queries(queries, block_h * block_d, architecture)
    stages = stages_of(block_h * block_d, architecture)
    options = {"BLOCK_M": block_m, "BLOCK_H": block_h, "BLOCK_D": block_d, "STAGES": stages, "num_warps": warps}
    return limited(options, architecture.phase_registers)


@dataclass(frozen=True)
class BackwardLaunch:
    """The launches of a backward phase, in order (both steps, or DOTS and then APPLY), and in how many pieces APPLY cuts the
    width."""

    steps: tuple[dict[str, int], ...]
    splits: int


def backward_launch(queries: int, heads: int, head_dim: int, architecture: Architecture) -> BackwardLaunch:
    """For the backward phase. APPLY holds all queries: where M whole rows are too many it cuts the rows, not the queries."""
    block_h, block_d = tile(heads, head_dim)
    row, block_m = block_h * block_d, power_of_two(queries)
    block_dots, warps = block_of_queries(queries, row, architecture)
    shared = {"BLOCK_M": block_m, "BLOCK_DOTS": block_dots, "BLOCK_H": block_h, "BLOCK_D": block_d}
    shared["STAGES"] = stages_of(row, architecture)
    if block_m * row <= architecture.fused_warps * architecture.lanes * architecture.fused_numbers:
        warps = warps_for(block_m * row, architecture.fused_numbers, architecture.fused_warps, architecture)
        both = {"DOTS": True, "APPLY": True, "APPLY_H": block_h, "APPLY_D": block_d, "num_warps": warps}
        return BackwardLaunch((limited({**shared, **both}, architecture.phase_registers),), 1)
    dots = {**shared, "DOTS": True, "APPLY": False, "APPLY_H": 1, "APPLY_D": 1, "num_warps": warps}
    room = architecture.backward_warps * architecture.lanes * architecture.backward_numbers
    apply_d = max(1, min(block_d, room // block_m))
    warps = warps_for(block_m * apply_d, architecture.backward_numbers, architecture.backward_warps, architecture)
    apply = {**shared, "DOTS": False, "APPLY": True, "APPLY_H": 1, "APPLY_D": apply_d, "num_warps": warps}
    steps = (limited(dots, architecture.dots_registers), limited(apply, architecture.phase_registers))
    return BackwardLaunch(steps, heads * -(-head_dim // apply_d))
