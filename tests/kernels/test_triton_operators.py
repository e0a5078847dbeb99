# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The Triton reads as PyTorch operators: registration, torch.compile, second derivatives, and where they can run."""

import os
import subprocess
import sys

import pytest
import torch


pytest.importorskip("triton")

from triton_helpers import distance, launches, triton_read  # noqa: F401 - a fixture

from depthroute.modeling.depth_backend import MergeInput, Part, PhaseInput, Prior
from depthroute_kernels import triton as triton_reads
from depthroute_kernels.triton import ops, status


def randn(*shape, seed=0, grad=True):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def sources(count, seed=0):
    return [randn(2, 8, seed=seed + index) for index in range(count)]


PHASES = {
    "plain": lambda: (sources(2), [], [randn(2, 8)], [], [], None, 1, 2.0, 1e-6, 1, False),
    "everything": lambda: (
        *(sources(4), sources(4, 9), [randn(2, 8, seed=s) for s in (20, 21)], [randn(2, 2, seed=s) for s in (22, 23)]),
        *(sources(2, 30), randn(2, grad=False), 1, 2.0, 1e-6, 2, True),
    ),
    "no complete read": lambda: (sources(2), [], [randn(2, 8)], [], [], None, 0, 1.0, 1e-6, 1, True),
}
MERGES = {
    "plain": lambda: (
        *(sources(1), [], [randn(8)], [], sources(1, 3), [randn(2, 1).exp().detach().requires_grad_()]),
        *([randn(2, 1, grad=False)], [], [], [], [], [], None, 0, 2.0, 1e-6, 1, True),
    ),
    "everything": lambda: (
        *(sources(2), sources(2, 9), [randn(8)], [randn(2, seed=5)], sources(1, 3)),
        *([randn(2, 2).exp().detach().requires_grad_()], [randn(2, 2, seed=2, grad=False)], sources(1, 30)),
        *([randn(2, 2, seed=6, grad=False).exp()], [randn(2, 2, seed=7, grad=False)], sources(1, 31)),
        *([randn(2, 8, seed=32, grad=False)], randn(2, grad=False), 1, 2.0, 1e-6, 2, False),
    ),
}


@pytest.mark.parametrize("name", PHASES)
def test_opcheck_of_phase(name, launches):  # noqa: F811
    torch.library.opcheck(torch.ops.depthroute.phase.default, PHASES[name](), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MERGES)
def test_opcheck_of_merge(name, launches):  # noqa: F811
    torch.library.opcheck(torch.ops.depthroute.merge.default, MERGES[name](), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("anchored", [False, True])
def test_compiles_without_a_break(anchored, launches):  # noqa: F811
    def read(values, private, queries, base):
        (phase,) = triton_reads.phase([PhaseInput(values, queries, base=base)], complete=1, anchored=anchored)
        (merged,) = triton_reads.merge(
            [MergeInput(phase.partial[0], private, queries[1], base=base)], anchored=anchored
        )
        return phase.complete[0], merged.x

    arguments = (sources(2), sources(1, 5), randn(2, 8, seed=7), randn(2, 8, seed=8))
    leaves = [*arguments[0], *arguments[1], *arguments[2:]]
    compiled = torch.compile(read, fullgraph=True, backend="aot_eager")
    results = []
    for one in (read, compiled):
        xs = one(*arguments)
        results.append([*xs, *torch.autograd.grad(sum(x.square().sum() for x in xs), leaves)])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*results))
    assert launches["phase_forward"] == launches["merge_backward"] == 2


@pytest.mark.parametrize("private", [0, 1], ids=["phase", "merge"])
def test_second_derivative_names_the_way_out(private, launches):  # noqa: F811
    values = sources(3)
    (grad,) = torch.autograd.grad(
        triton_read(values, randn(8), private=private).square().sum(), values[:1], create_graph=True
    )
    with pytest.raises(RuntimeError, match='depth_backend="reference"'):
        grad.sum().backward()


def test_fake_tensors_need_no_kernel():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        values = [torch.empty(2, 8, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        query = torch.empty(3, 8, device="cuda")
        (phase,) = triton_reads.phase([PhaseInput(values, query)], complete=1, anchored=True)
    assert [one.dtype for one in phase.complete] == [torch.float32]
    assert phase.partial[1].prior.total.shape == (2, 8) and phase.logits.shape == (3, 2, 2, 1)


def test_inputs_must_agree():
    part = Part(randn(2, 8), randn(2, 1), randn(2, 1))
    prior = Prior(randn(2, 8), randn(2, 1), randn(2, 1))
    one = MergeInput(part, sources(1), randn(8))
    lines = {
        "summands: got [0, 1] in one call, allowed: the same number in every input": [one, one._replace(summands=1)],
        "base: got 1 for 2 inputs, allowed: one for each, or none": [one, one._replace(base=randn(2, 8))],
    }
    for line, inputs in lines.items():
        with pytest.raises(ValueError) as caught:
            triton_reads.merge(inputs)
        assert str(caught.value) == line
    with pytest.raises(ValueError, match="prior: got 1 for 2 anchored reads"):
        triton_reads.merge([one, one._replace(part=part._replace(prior=prior))], anchored=True)
    with pytest.raises(ValueError, match="complete: got 2, allowed: 0 to the number of queries, 1"):
        triton_reads.phase([PhaseInput(sources(2), randn(1, 8))], complete=2)


def test_where_they_can_run(monkeypatch):
    assert triton_reads.available("cpu") is None and triton_reads.available("cpu", torch.bfloat16) is None
    assert "dtype: got int64" in triton_reads.available("cpu", torch.int64)
    assert triton_reads.available("cuda") == "device: got cuda, allowed with TRITON_INTERPRET=1: cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in triton_reads.available("cpu")
    assert "device: got meta" in triton_reads.available("meta")
    with pytest.raises(RuntimeError, match="device: got cpu"):
        triton_reads.phase([PhaseInput(sources(2), randn(1, 8))], complete=1)
    monkeypatch.setattr(status.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in triton_reads.available("cuda")


def run_python(code, **environment):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


HIDE_TRITON = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
IMPORT = """
import torch
import depthroute_kernels, depthroute_kernels.triton as reads
from depthroute.modeling.depth_backend import PhaseInput
print(reads.available("cpu"), "|", reads.available("cuda"))
try:
    reads.phase([PhaseInput([torch.randn(2, 8)] * 2, torch.randn(1, 8))], complete=1)
except RuntimeError as error:
    print(error)
"""


def test_import_without_triton():
    done = run_python(HIDE_TRITON + IMPORT, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("triton: the package is not installed") == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_import_with_triton_and_no_driver():
    done = run_python(IMPORT, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("device: got cpu") and "found no driver" in first.partition("|")[2]
    assert second.startswith("device: got cpu, allowed by the Triton depth reads: cuda")


def test_empty_gradients_stand_for_none():
    gradients = ops._present([None, torch.ones(2)], torch.zeros(1, dtype=torch.float64))
    assert gradients[0].shape == (0,) and gradients[0].dtype == torch.float64 and gradients[1].shape == (2,)
    assert distance(torch.zeros(2), torch.ones(2, dtype=torch.float64)) == 1.0
