# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Other libraries' depth reads, called through their public functions. None is needed; what is installed is measured.

Each adapter tells with `refusal(case)` why its library cannot do a case: what its documentation or its own checks exclude, or
a device that it has no kernels for. Whether it computes a case that it accepts rightly is not its adapter's word: the
benchmark compares it with float64 first.

    fla naive     flash-linear-attention 0.6, fla.ops.attnres.naive_attnres: torch's own operations, on any device
    fla fused     the same library, fused_attnres: Triton
    fast-attnres  fast-attnres 2.1, attnres.attnres: Triton, bfloat16
    flash-attn-res flash-attn-res 0.1.12, phase_1 and phase_2: Triton, two phases as here, results in bfloat16
    liger         liger-kernel 0.8.5, liger_attn_res: Triton, stacked sources

All compute plain weights without a base; none has heads, biases, or keys apart from values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..triton.status import interpreted
from .machine import installed
from .operator_cases import EPS, OperatorCase, Read, ReadInputs, sources_of


@dataclass(frozen=True)
class Peer:
    """One library's function.

    Attributes:
        name: in results.
        distributions: names under which it may be installed.
        module: what is imported, not before it is asked for.
        needs_gpu: no kernels for another device. Where Triton interprets, kernels that have no check of their own run on the
            CPU: `interpretable`.
        limits: what of a case it cannot do, in words, or None.
        call: the reads of a case through the imported module.
    """

    name: str
    distributions: tuple[str, ...]
    module: str
    needs_gpu: bool
    interpretable: bool
    limits: Callable[[OperatorCase], str | None]
    call: Callable[[ModuleType, OperatorCase, ReadInputs], list[Tensor]]

    @property
    def version(self) -> str | None:
        """Of the installed distribution."""
        return next((found for name in self.distributions if (found := installed(name)) is not None), None)

    def refusal(self, case: OperatorCase) -> str | None:
        """Why the library cannot do a case; None where it says that it can."""
        if case.form != "plain":
            return "it has no base" if case.form == "added" else "it has no anchored weights"
        on_gpu = torch.device(case.device).type == "cuda"
        # the interpreter's arithmetic of bfloat16 is not the GPU's
        interprets = self.interpretable and interpreted() and case.dtype != "bfloat16"
        if self.needs_gpu and not on_gpu and not interprets:
            return f"it needs a GPU, got {case.device}"
        return self.limits(case)

    def read(self, case: OperatorCase) -> Read | str:
        """The reads of a case, or why there are none. Imports the library."""
        if find_spec(self.module.partition(".")[0]) is None:
            return "not installed"
        reason = self.refusal(case)
        if reason is not None:
            return reason
        try:
            module = import_module(self.module)
        except (ImportError, RuntimeError, AttributeError) as error:
            # installed, but not with what it needs here: the versions of torch and Triton that it was made for
            return f"it cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return lambda inputs: self.call(module, case, inputs)


def fla_naive(module: ModuleType, case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    return [
        module.naive_attnres(inputs.query[m], sources_of(inputs, m), inputs.key_norm, rms_eps=EPS)
        for m in range(case.queries)
    ]


def fla_naive_limits(case: OperatorCase) -> str | None:
    return "it computes in float32" if case.dtype == "float64" else None


def fla_fused(module: ModuleType, case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    return [
        module.fused_attnres(inputs.query[m], sources_of(inputs, m), inputs.key_norm, rms_eps=EPS)
        for m in range(case.queries)
    ]


def fast_attnres(module: ModuleType, case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    folded = inputs.query * inputs.key_norm
    return [module.attnres(sources_of(inputs, m), folded[m], eps=EPS) for m in range(case.queries)]


def fast_attnres_limits(case: OperatorCase) -> str | None:
    if case.dtype != "bfloat16":
        return f"it takes bfloat16, got {case.dtype}"
    most = case.sources + (case.queries > 1)
    if most > 129 or case.width > 8192:
        return f"it takes at most 129 sources and width 8192, got {most} and {case.width}"
    return None


def flash_attn_res(module: ModuleType, case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    folded = inputs.query * inputs.key_norm
    mixes, lses = module.phase_1_batched_attention_triton_op(torch.stack(inputs.values), folded, EPS)
    return [
        mixes[0],
        *(
            module.phase_2_online_softmax_merge_triton_op(inputs.partials[m - 1], folded[m], mixes[m], lses[m], EPS)
            for m in range(1, case.queries)
        ),
    ]


def flash_attn_res_limits(case: OperatorCase) -> str | None:
    if case.dtype != "bfloat16":
        return f"its results are bfloat16, got {case.dtype}"
    return None if case.width & (case.width - 1) == 0 else f"it takes widths that are powers of two, got {case.width}"


def liger(module: ModuleType, case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    return [
        module.liger_attn_res(torch.stack(sources_of(inputs, m)), inputs.query[m], inputs.key_norm, EPS)
        for m in range(case.queries)
    ]


def float32_limits(case: OperatorCase) -> str | None:
    return "its statistics are float32, got float64" if case.dtype == "float64" else None


PEERS = (
    Peer(
        "fla naive",
        ("flash-linear-attention", "fla-core"),
        "fla.ops.attnres",
        False,
        False,
        fla_naive_limits,
        fla_naive,
    ),
    Peer(
        "fla fused", ("flash-linear-attention", "fla-core"), "fla.ops.attnres", True, False, float32_limits, fla_fused
    ),
    Peer("fast-attnres", ("fast-attnres",), "attnres", True, False, fast_attnres_limits, fast_attnres),
    Peer("flash-attn-res", ("flash-attn-res",), "flash_attn_res", True, False, flash_attn_res_limits, flash_attn_res),
    Peer("liger", ("liger-kernel",), "liger_kernel.transformers.functional", True, True, float32_limits, liger),
)
