# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Who computes a depth read: the choice of an implementation, for a model and for the public operator.

An implementation is a module with `phase` and `merge`, as `depth_backend` defines them, and joins by one row of `BACKENDS`.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from depthroute.modeling import depth_ops
from depthroute.modeling.depth_backend import PhaseInput

from . import cpu, triton


logger = logging.getLogger(__name__)

BACKENDS: dict[str, ModuleType] = {"cpu": cpu, "triton": triton}
"""Implementations in two phases, by name. Each tells with `unavailable(device, dtype, compiling)` why it cannot run there."""


def backend_for(name: str, device: torch.device, dtype: torch.dtype, field: str = "depth_backend") -> ModuleType | None:
    """The implementation that a model's reads use, or None: the reference.

    Args:
        name: "auto": the first of `BACKENDS` that can run, else the reference; or the name of one. "cpu" is the reference where
            torch.compile, torch.func or forward-mode differentiation have to follow it.
        device, dtype: of the sources.
        field: what the caller's user has set to `name`, for the message.

    Raises:
        ValueError: one is asked for by name and cannot run here.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling and name in ("auto", "cpu") and is_transformed():
        return None
    return BACKENDS.get(_choose(name, device.type, dtype, field, compiling))


def is_transformed() -> bool:
    """Whether torch.func's transforms or forward-mode differentiation are under way, which only the reference follows."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


@torch.compiler.assume_constant_result
def _choose(name: str, device: str, dtype: torch.dtype, field: str, compiling: bool) -> str:
    return _choose_once(name, device, dtype, field, compiling)


@cache
def _choose_once(name: str, device: str, dtype: torch.dtype, field: str, compiling: bool) -> str:
    # Triton's interpreter is there to test with, not to be chosen
    automatic = ["cpu"] if device == "cpu" else list(BACKENDS)
    candidates = automatic if name == "auto" else [name]
    reasons = {key: BACKENDS[key].unavailable(torch.device(device), dtype, compiling) for key in candidates}
    chosen = next((key for key, reason in reasons.items() if reason is None), "reference")
    # the compiler fuses the reference and cannot see into the path for a CPU
    traced = name == "cpu" and device == "cpu" and compiling
    if chosen == "reference" and name != "auto" and not traced:
        raise ValueError(f"{field}: got {name!r}, allowed: 'auto' or 'reference' here; {reasons[name]}")
    logger.info("depth reads on %s in %s%s: %s", device, dtype, " under torch.compile" if compiling else "", chosen)
    return chosen


def in_one_phase(backend: ModuleType) -> Callable[..., Any]:
    """`depth_ops.depth_read`, computed by a phase of complete reads."""

    def depth_read(
        values: Sequence[Tensor],
        query: Tensor,
        *,
        keys: Sequence[Tensor] | None = None,
        key_norm: Tensor | None = None,
        bias: Tensor | None = None,
        prior_bias: Tensor | None = None,
        base: Tensor | None = None,
        gain: float = 1.0,
        scale: float = 1.0,
        eps: float = 1e-6,
        num_heads: int = 1,
        anchored: bool = False,
        return_weights: bool = False,
    ) -> Any:
        depth_ops.check_sources(values, keys, num_heads)
        dtype = depth_ops.statistics_dtype(values[0])
        queries = scale * (query.to(dtype) if key_norm is None else query.to(dtype) * key_norm.to(dtype))
        one = queries.dim() == 1
        queries = queries.unsqueeze(0) if one else queries
        biases = None if bias is None else bias.to(dtype).expand(len(queries), -1)
        (output,) = backend.phase(
            [PhaseInput(values, queries, keys, biases, base)],
            complete=len(queries),
            prior_bias=None if prior_bias is None else prior_bias.detach().to(dtype),
            gain=float(gain),
            eps=eps,
            num_heads=num_heads,
            anchored=anchored,
        )
        reads = [read.to(values[0].dtype) for read in output.complete]
        read = reads[0] if one else torch.stack(reads)
        if not return_weights:
            return read
        weights = torch.softmax(output.logits, 1)
        weights = weights[0] if one else weights
        return read, weights.squeeze(-1) if num_heads == 1 else weights

    return depth_read


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "reference": depth_ops.depth_read,
    **{name: in_one_phase(backend) for name, backend in BACKENDS.items()},
}
"""The public operator by implementation. `"auto"` is not among them: it stands for the choice that `depth_read` makes."""


def depth_read(
    values: Sequence[Tensor],
    query: Tensor,
    *,
    keys: Sequence[Tensor] | None = None,
    key_norm: Tensor | None = None,
    bias: Tensor | None = None,
    prior_bias: Tensor | None = None,
    base: Tensor | None = None,
    gain: float = 1.0,
    scale: float = 1.0,
    eps: float = 1e-6,
    num_heads: int = 1,
    anchored: bool = False,
    return_weights: bool = False,
    implementation: str = "auto",
) -> Any:
    """One softmax over depth and the mix that it selects (Attention Residuals, arXiv 2603.15031):

        l_i = scale · q · (γ ⊙ k_i / sqrt(mean(k_i²) + eps)) + b_i      p = softmax_i(l)
        w   = p, or p − softmax_i(b⁰) where anchored                    x = base + gain · Σ_i w_i v_i

    with `num_heads` softmaxes over contiguous slices of q, k and v; the RMS is over the whole width. Logits, softmax and
    sum are float32 (float64 for float64 sources), also under autocast; x is cast once. Sources are not written to. Every
    other tensor argument receives gradients, with the reference also twice; what is saved for them is sources as they are,
    and numbers per source and token.

    Args:
        values: S ≥ 1 tensors [..., D] of any floating dtype.
        query: [D], or [M, D] for M reads of the same sources.
        keys: S tensors [..., D]; default: the values.
        key_norm: γ [D]; default: ones.
        bias: b [S]; default: zeros.
        prior_bias: b⁰ [S], the biases at initialisation, a constant without gradient; default: zeros. Used only where
            anchored.
        base: [..., D]; default: none.
        gain, scale, eps: numbers; eps is inside the root.
        num_heads: H, a divisor of D.
        anchored: subtract the prior's weights: at q = 0 and b = b⁰ the result is `base` bit for bit.
        return_weights: also return p.
        implementation: a name of `IMPLEMENTATIONS`, or "auto": the one that is made for the device, else the reference.

    Returns:
        x [..., D], or [M, ..., D], in the dtype of the first value; with `return_weights` a pair of x and p: [S, ...], or
        [M, S, ...] for M queries, with a trailing H where H > 1.

    Raises:
        ValueError: unknown implementation, or one that cannot run here; no source, keys that differ in number from the values, or H that does not
            divide D.
    """
    name = implementation
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"implementation: got {name!r}, allowed: {', '.join(['auto', *IMPLEMENTATIONS])}")
    if not len(values):
        name = "reference"  # which refuses it
    elif name == "auto" or name in BACKENDS:
        backend = backend_for(name, values[0].device, values[0].dtype, "implementation")
        name = next((key for key, known in BACKENDS.items() if known is backend), "reference")
    return IMPLEMENTATIONS[name](
        values,
        query,
        keys=keys,
        key_norm=key_norm,
        bias=bias,
        prior_bias=prior_bias,
        base=base,
        gain=gain,
        scale=scale,
        eps=eps,
        num_heads=num_heads,
        anchored=anchored,
        return_weights=return_weights,
    )
