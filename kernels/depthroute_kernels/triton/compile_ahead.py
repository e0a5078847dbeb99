# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel for GPUs that are not there, and note registers, shared memory and spills.

    python -m depthroute_kernels.triton.compile_ahead [--json FILE] [--readme kernels/README.md]

What is compiled is what `run` would launch: the constants come from `launch`. A kernel that spills registers to memory is an
error, and nothing is written.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import launch, merge_kernels, phase_kernels, table
from .run import TYPES


TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
WIDTHS = (1024, 4096)
HEADS = (1, 4)
DTYPES = (torch.bfloat16, torch.float32)
QUERIES = (2, 8)
"""Reads of one phase: one layer's, and those of a block of four layers."""

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
NUMBERS = ("tokens", "count", "queries", "complete", "groups", "programs", "summands")
MARK = "<!-- compiled ahead: {} -->"
RESULTS = Path(__file__).parent / "results" / "compiled-ahead.json"


def cases(
    architecture: launch.Architecture, amd: bool = False
) -> Iterator[tuple[dict[str, Any], Any, dict[str, Any], dict[str, int]]]:
    """What names a kernel in the table, the kernel, its constants, the compiler's options."""
    for dtype, width, heads, anchored, m in itertools.product(DTYPES, WIDTHS, HEADS, (False, True), QUERIES):
        head_dim = width // heads
        number = torch.float32
        shared = {
            "EPS": 1e-6,
            "HEADS": heads,
            "HEAD_DIM": head_dim,
            "TYPE": TYPES[dtype],
            "ACCUMULATOR": TYPES[number],
            "OUT": TYPES[dtype],
            "OWN_KEYS": False,
            "BIASED": False,
            "BASED": True,
            "SUBTRACT": dtype.itemsize > 2,
            "SUMMANDS": dtype.itemsize > 2,
            "KEEP_MIX": dtype.itemsize == 2,
            "WANT_LOGITS": False,
            "ANCHORED": anchored,
            "PRIOR_BIASED": False,
            "HAS_GRAD_SUMS": True,
            "ALIGNED": True,
            "AMD": amd,
        }
        plan = launch.backward_launch(m, heads, head_dim, architecture)
        kernels = [
            (
                "phase forward",
                phase_kernels.phase_forward,
                launch.forward_launch(m, heads, head_dim, architecture),
            )
        ]
        for step in plan.steps:
            part = "" if step["DOTS"] and step["APPLY"] else ", dots" if step["DOTS"] else ", apply"
            kernels.append((f"phase backward{part}", phase_kernels.phase_backward, step))
        for name, kernel in (
            ("merge forward", merge_kernels.merge_forward),
            ("merge backward", merge_kernels.merge_backward),
        ):
            kernels.append((name, kernel, launch.merge_launch(heads, head_dim, architecture, "backward" in name)))
        for name, kernel, options in kernels:
            if "merge" in name and m != QUERIES[0]:
                continue
            named = {"kernel": name, "dtype": NAMES[dtype], "D": width, "H": heads, "M": m, "anchored": anchored}
            constants = {key: value for key, value in {**shared, **options}.items() if key in kernel.arg_names}
            yield named, kernel, constants, {key: options[key] for key in ("num_warps", "maxnreg") if key in options}


def source_of(kernel: Any, constants: dict[str, Any], number: str = "fp32") -> ASTSource:
    """The kernel with the types that `run` gives it and every pointer at a multiple of 16 bytes."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = "i32"
        elif re.fullmatch(r"a\d+", name):
            signature[name] = "i64"
        else:
            signature[name] = {"table": "*i64", "gain": "fp64"}.get(name, f"*{number}")
    pointers = [index for index, name in enumerate(kernel.arg_names) if signature[name].startswith("*")]
    return ASTSource(kernel, signature, constants, {(index,): [["tt.divisibility", 16]] for index in pointers})


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, bytes of shared memory of a program, and bytes of a thread that went to memory."""
    if "amdgcn" in compiled.asm:
        found = {
            name: int(re.search(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[1])  # type: ignore[index]
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        }
        # scalar registers spill to lanes of vector registers, not to memory
        spilled = found["private_segment_fixed_size"] + 4 * found["vgpr_spill_count"]
        return {
            "registers": found["vgpr_count"],
            "shared": compiled.metadata.shared,
            "spills": spilled,
            "scalars_in_vectors": found["sgpr_spill_count"],
        }
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(cuobjdump), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack, local = (
        int(re.search(rf"\b{name}:(\d+)", text)[1])  # type: ignore[index]
        for name in ("REG", "STACK", "LOCAL")
    )
    return {"registers": registers, "shared": compiled.metadata.shared, "spills": stack + local}


def compile_all(names: list[str]) -> dict[str, Any]:
    """Every kernel for every architecture named."""
    results = []
    for name in names:
        target = TARGETS[name]
        small = source_of(table.store_addresses, {})
        listed = [
            ({"kernel": "table", "dtype": "", "D": 0, "H": 0, "M": 0, "anchored": False}, small, {"num_warps": 1})
        ]
        for named, kernel, constants, options in cases(launch.ARCHITECTURES[name], target.backend == "hip"):
            listed.append((named, source_of(kernel, constants), options))
        for named, source, options in listed:
            compiled = triton.compile(source, target=target, options=options)
            results.append({"architecture": name, **named, "warps": options["num_warps"], **resources(compiled)})
            print(*results[-1].values(), file=sys.stderr)
    return {"triton": triton.__version__, "kernels": results}


def as_table(report: dict[str, Any]) -> str:
    """The largest of every kernel and width, by architecture: registers of a thread × warps / KiB of shared memory / bytes
    spilled."""
    names = list(dict.fromkeys(entry["architecture"] for entry in report["kernels"]))
    lines = [f"| kernel | D | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    keys = dict.fromkeys((entry["kernel"], entry["D"]) for entry in report["kernels"])
    for kernel, width in keys:
        cells = []
        for name in names:
            found = [
                entry
                for entry in report["kernels"]
                if (entry["architecture"], entry["kernel"], entry["D"]) == (name, kernel, width)
            ]
            largest = (
                {key: max(entry[key] for entry in found) for key in ("registers", "shared", "spills", "warps")}
                if found
                else None
            )
            cells.append(
                f"{largest['registers']} × {largest['warps']} / {largest['shared'] / 1024:.1f} / {largest['spills']}"
                if largest
                else "–"
            )
        lines.append(f"| {kernel} | {width or '–'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_between(path: Path, mark: str, text: str) -> None:
    """Replace what stands between the two marks of a file."""
    begin, end = mark.format("begin"), mark.format("end")
    before, _, rest = path.read_text(encoding="utf-8").partition(begin + "\n")
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path}: found no {begin} … {end}, needed to place the table")
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def main() -> None:
    """Compile, refuse spills, write."""
    parser = argparse.ArgumentParser(description="Compile every depth read kernel ahead of time.")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--readme", type=Path, help="file whose table is replaced")
    parser.add_argument("--architectures", default=",".join(TARGETS), help="names, separated by commas")
    arguments = parser.parse_args()
    names = arguments.architectures.split(",")
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        raise SystemExit(f"architectures: got {', '.join(unknown)}, allowed: {', '.join(TARGETS)}")
    report = compile_all(names)
    spilling = [entry for entry in report["kernels"] if entry["spills"]]
    if spilling:
        raise SystemExit(f"spills: got {len(spilling)} kernels, allowed: none; the first is {spilling[0]}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(entry) for entry in report.pop("kernels"))
    arguments.json.write_text(f'{json.dumps(report)[:-1]}, "kernels": [\n{lines}\n]}}\n', encoding="utf-8")
    report = json.loads(arguments.json.read_text(encoding="utf-8"))
    if arguments.readme:
        write_between(arguments.readme, MARK, as_table(report))


if __name__ == "__main__":
    main()
