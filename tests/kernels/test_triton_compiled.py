# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What is compiled: 64-bit offsets, no spills, one kernel for every number of sources and tokens; and bytes moved."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch


pytest.importorskip("triton")

from triton.runtime import interpreter
from triton_helpers import launches  # noqa: F401 - a fixture

from depthroute.modeling.depth_backend import MergeInput, PhaseInput
from depthroute_kernels import triton as triton_reads
from depthroute_kernels.triton import bytes_moved, compile_ahead, launch


README = Path(__file__).parents[2] / "kernels" / "README.md"
REPORT = json.loads(compile_ahead.RESULTS.read_text(encoding="utf-8"))


def run_compiler(code):
    """In a process of its own: in this one Triton only interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def narrow_products(ttir):
    """Lines that multiply, in 32 bits, something made of a token's number or of how many there are."""
    tainted, found = {"%tokens"}, []
    for line in ttir.splitlines():
        line = line.partition(" loc(")[0]
        match = re.match(r"\s*(%\w+)(?::\d+)? = ([\w.]+) ?(.*)", line)
        if match is None:
            continue
        result, operation, rest = match.groups()
        operands = set(re.findall(r"%\w+", rest))
        narrow = re.search(r"i32>?(?: \{.*)?$", rest) is not None
        if operation == "tt.get_program_id" and " x " in f" {rest} ":
            tainted.add(result)
        elif operation == "scf.for":
            index, bounds = re.search(r"(%\w+) = (%\w+ to %\w+)", rest).groups()
            if narrow and tainted & set(re.findall(r"%\w+", bounds)):
                tainted.add(index)
        elif operation == "arith.muli" and narrow and operands & tainted:
            found.append(line)
        elif operands & tainted and narrow and operation != "arith.remsi":
            tainted.add(result)
    return found


COMPILE = """
import json
import triton
from depthroute_kernels.triton import compile_ahead, launch
chosen = {}
for named, kernel, constants, options in compile_ahead.cases(launch.ARCHITECTURES["sm_90"]):
    if (named["dtype"], named["D"], named["H"], named["anchored"]) == ("bf16", 1024, 4, True):
        constants = {**constants, "OWN_KEYS": True, "BIASED": True, "PRIOR_BIASED": True}
        chosen[f'{named["kernel"]}, {named["M"]} queries'] = (kernel, constants, options)
found = {}
for name, (kernel, constants, options) in chosen.items():
    source = compile_ahead.source_of(kernel, constants)
    compiled = triton.compile(source, target=compile_ahead.TARGETS["sm_90"], options=options)
    found[name] = {"ttir": compiled.asm["ttir"], **compile_ahead.resources(compiled)}
amd = {}
for named, kernel, constants, options in compile_ahead.cases(launch.ARCHITECTURES["gfx942"], amd=True):
    if list(named.values())[1:] == ["bf16", 1024, 1, 2, False] and named["kernel"] in ("phase backward", "merge forward"):
        source = compile_ahead.source_of(kernel, constants)
        compiled = triton.compile(source, target=compile_ahead.TARGETS["gfx942"], options=options)
        amd[named["kernel"]] = compiled.asm["amdgcn"]
print(json.dumps([found, amd]))
"""


@pytest.fixture(scope="module")
def compiled():
    """TTIR and resources by kernel for sm_90, and the assembly of two kernels for gfx942."""
    return run_compiler(COMPILE)


def test_offsets_are_64_bits_wide(compiled):
    found, _ = compiled
    assert set(found) == {
        "phase forward, 2 queries",
        "phase backward, 2 queries",
        "merge forward, 2 queries",
        "merge backward, 2 queries",
        "phase forward, 8 queries",
        "phase backward, dots, 8 queries",
        "phase backward, apply, 8 queries",
    }
    for name, kernel in found.items():
        assert narrow_products(kernel["ttir"]) == [], name
        assert re.search(r"arith.muli .*: i64", kernel["ttir"]), name
        assert kernel["registers"] > 0


def test_amd_waits_for_stores_before_what_was_stored_is_loaded(compiled):
    """Triton's barrier waits for other threads, not for their stores."""
    for name, count in (("phase backward", 2), ("merge forward", 1)):
        waits = re.findall(r"ASMSTART\n(.*?)ASMEND.*?\n(.*?s_barrier)", compiled[1][name], re.DOTALL)
        assert len(waits) == count
        for inside, until_barrier in waits:
            assert "s_waitcnt vmcnt(0)" in inside
            assert not re.search(r"(global|buffer|flat)_(store|load)", until_barrier)
        last_store = compiled[1][name].rpartition("ASMSTART")[0].rpartition("_store_")[2]
        assert "s_barrier" not in last_store


def test_the_search_for_narrow_products_finds_them():
    ttir = """
    %0 = tt.get_program_id x : i32
    %1 = arith.addi %0, %c1 : i32
    %2 = arith.muli %1, %width : i32
    %3 = arith.extsi %0 : i32 to i64
    %4 = arith.muli %3, %wide : i64
    %5 = arith.remsi %0, %blocks : i32
    %6 = arith.muli %5, %c8 : i32
    %7 = scf.for %8 = %c0 to %tokens step %c1 iter_args(%9 = %a) -> (i32)  : i32 {
      %10 = tt.splat %8 : i32 -> tensor<4xi32>
      %11 = arith.muli %10, %12 : tensor<4xi32>
"""
    assert [line.split()[0] for line in narrow_products(ttir)] == ["%2", "%11"]


SPECIALISE = """
import json
import torch
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from depthroute_kernels.triton import compile_ahead, launch, merge_kernels, phase_kernels, table

backend = make_backend(compile_ahead.TARGETS["sm_90"])

def keys(kernel, *calls):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    return len({str(bind(**call, debug=False)[1]) for call in calls})

found = {"table": keys(table.store_addresses, *[
    {"table": torch.zeros(32, dtype=torch.int64), **{f"a{i}": address for i in range(32)}}
    for address in (0, 1, 16, 4096, 2**31 + 8, 2**46 + 2)
])}
pointer = torch.zeros(16)
for named, kernel, constants, options in compile_ahead.cases(launch.ARCHITECTURES["sm_90"]):
    if (named["dtype"], named["D"], named["H"], named["anchored"], named["M"]) != ("bf16", 1024, 4, True, 2):
        continue
    calls = []
    for number in (1, 2, 16, 31, 32, 57, 129):
        call = {name: number for name in kernel.arg_names if name in compile_ahead.NUMBERS}
        call |= {name: pointer for name in kernel.arg_names if name not in call and name not in constants}
        calls.append({**call, "table": torch.zeros(32, dtype=torch.int64), "gain": float(number), **constants})
    found[named["kernel"]] = keys(kernel, *calls)
print(json.dumps(found))
"""


def test_one_kernel_for_every_number_of_sources_and_tokens():
    found = run_compiler(SPECIALISE)
    assert set(found) == {"table", "phase forward", "phase backward", "merge forward", "merge backward"}
    assert set(found.values()) == {1}


def test_compiled_ahead_for_every_architecture_without_spills():
    kernels = REPORT["kernels"]
    assert {entry["architecture"] for entry in kernels} == set(launch.ARCHITECTURES) - {"default"}
    for entry in kernels:
        assert entry["spills"] == 0 and entry["registers"] > 0
    # what the report has is what would be launched now
    for name, target in compile_ahead.TARGETS.items():
        reported = {
            tuple(e[k] for k in ("kernel", "dtype", "D", "H", "M", "anchored")): e
            for e in kernels
            if e["architecture"] == name
        }
        current = {
            tuple(named.values()): options for named, _, _, options in compile_ahead.cases(launch.ARCHITECTURES[name])
        }
        assert reported.keys() - {("table", "", 0, 0, 0, False)} == current.keys()
        for key, options in current.items():
            assert reported[key]["warps"] == options["num_warps"]
            threads = options["num_warps"] * target.warp_size
            assert threads <= 1024 and options.get("maxnreg", 0) * threads <= launch.REGISTERS


@pytest.mark.parametrize(
    ("mark", "table"),
    [(compile_ahead.MARK, lambda: compile_ahead.as_table(REPORT)), (bytes_moved.MARK, bytes_moved.as_table)],
    ids=["compiled ahead", "bytes moved"],
)
def test_readme_has_the_tables(mark, table):
    text = README.read_text(encoding="utf-8")
    assert text.partition(mark.format("begin") + "\n")[2].partition(mark.format("end"))[0] == table()


@pytest.fixture
def bytes_of(launches, monkeypatch):  # noqa: F811
    """Count each byte that a launch loads once, and each that it stores once: `bytes_of(kernel name)`."""
    seen, counted = {"load": set(), "store": set()}, {}
    builder = interpreter.InterpreterBuilder

    def note(kind, pointers, mask):
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        addresses, there = np.broadcast_arrays(pointers.data, mask.data)
        seen[kind].update((int(address), size) for address in addresses[there.astype(bool)])

    load, store, execute = builder.create_masked_load, builder.create_masked_store, interpreter.GridExecutor.__call__

    def counting_load(self, pointers, mask, *rest):
        note("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self, pointers, value, mask, *rest):
        note("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def counting_launch(self, *arguments, **options):
        for kind in seen.values():
            kind.clear()
        execute(self, *arguments, **options)
        total = sum(size for kind in seen.values() for _, size in kind)
        counted[self.fn.__name__] = counted.get(self.fn.__name__, 0) + total

    monkeypatch.setattr(builder, "create_masked_load", counting_load)
    monkeypatch.setattr(builder, "create_masked_store", counting_store)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counting_launch)

    def take(name):
        return counted.pop(name, 0)

    return take


@pytest.mark.parametrize("fused", [True, False], ids=["one launch", "two launches"])
@pytest.mark.parametrize(
    "sizes",
    [
        bytes_moved.Sizes(16),
        bytes_moved.Sizes(16, base=True, anchored=True, heads=2),
        bytes_moved.Sizes(16, itemsize=4, keys=True, base=True),
    ],
    ids=["plain", "anchored", "keys"],
)
def test_bytes_moved_are_those_counted(sizes, fused, bytes_of, monkeypatch):
    architecture = dataclasses.replace(
        launch.ARCHITECTURES["default"], phase_programs=1, merge_programs=1, fused_numbers=8 if fused else 0
    )
    monkeypatch.setitem(launch.ARCHITECTURES, "default", architecture)
    dtype = torch.bfloat16 if sizes.itemsize == 2 else torch.float32
    names = ("phase_forward", "phase_backward", "merge_forward", "merge_backward")
    counted = []
    for tokens in (1, 3):
        made = iter(torch.randn(40, tokens, sizes.width, generator=torch.Generator().manual_seed(0)).to(dtype))

        def sources(count, made=made):
            return [next(made).clone().requires_grad_() for _ in range(count)]

        keys = [sources(3), sources(2)] if sizes.keys else [None, None]
        base = sources(1)[0] if sizes.base else None
        queries = torch.randn(3, sizes.width, generator=torch.Generator().manual_seed(1))
        options = {"num_heads": sizes.heads, "anchored": sizes.anchored}
        (phase,) = triton_reads.phase([PhaseInput(sources(3), queries, keys[0], None, base)], complete=1, **options)
        merged = [
            triton_reads.merge([MergeInput(part, sources(2), query, keys[1], None, base)], **options)[0].x
            for part, query in zip(phase.partial, queries[1:])
        ]
        sum(x.float().square().sum() for x in [*phase.complete, *merged]).backward()
        counted.append({name: bytes_of(name) for name in names})
    # what belongs to a launch is gone in the difference; two merges ran
    per_token = {name: (counted[1][name] - counted[0][name]) / 2 for name in names}
    assert per_token["phase_forward"] == bytes_moved.phase_forward(sizes, 3, 3, 1)
    assert per_token["phase_backward"] == bytes_moved.phase_backward(sizes, 3, 3, 1, architecture)
    assert per_token["merge_forward"] == 2 * bytes_moved.merge_forward(sizes, 2)
    assert per_token["merge_backward"] == 2 * bytes_moved.merge_backward(sizes, 2)


def test_two_phases_move_less_than_a_read_for_each_sublayer():
    for group in bytes_moved.GROUPS.values():
        both = [bytes_moved.forward_traffic(group), bytes_moved.backward_traffic(group)]
        assert sum(one.minimum for one in both) < sum(one.two_phases for one in both) < sum(one.fused for one in both)
