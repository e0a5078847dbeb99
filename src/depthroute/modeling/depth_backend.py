# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A depth read in two phases: what faster implementations of `depth_ops.depth_read` take and give, and the hook to them.

Dimension letters: B batch, T tokens, D width, S sources, H depth heads (H divides D), M queries of one phase.

Several reads of the model see the same completed sources. **Phase** runs all their queries over those at once; **Merge**
adds, for one read, the sources that only it sees (outputs since, the running block) by an online softmax:

    l_mi = (q_m · k_i) / sqrt(mean(k_i²) + eps) + b_mi          c_m = max_i l_mi          e_mi = exp(l_mi − c_m)

    Phase, complete read    gain · Σ_i w_mi v_i                 p = e / Σ e, w = p, or p − p⁰ where anchored
    Phase, partial read     N_m = Σ_i w_mi v_i                  w = e, or e − e⁰ where anchored
                            Z_m = Σ_i e_mi   and c_m            (anchored: U = Σ_i e⁰_i v_i, Z⁰ and c⁰ too)
    Merge                   l_j, of the private sources         c = max(c_m, max_j l_j)
                            f = exp(c_m − c) / Z                Z = exp(c_m − c) Z_m + Σ_j exp(l_j − c)
                            plain       x = base + gain · (f N + Σ_j p_j v_j)
                            anchored    x = base + gain · (f N + (f − f⁰) U + Σ_j (p_j − p⁰_j) v_j)

Queries arrive folded (scale · γ ⊙ q), in float32 (float64 for float64 sources). All statistics, weights and sums are in that
dtype; x is cast once. p⁰, f⁰ and Z⁰ go through the operations, shape and layout of p, f and Z, so that at q = 0 their
difference is exactly zero. N, Z and U are differentiable, c is a constant that cancels.

Unnormalised numerators, because their gradient needs neither N nor x: nothing of width D is kept for them.

The implementations are in the package `depthroute_kernels`. Without it, as in a checkpoint folder that is loaded alone, the
reference does all the work.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


_RECORDING = "transformers.utils.output_capturing"


class PhaseInput(NamedTuple):
    """M queries and the S sources that all of them see. The inputs of one call agree in S, M, D and dtype.

    Attributes:
        values: S ≥ 1 tensors [..., D].
        queries: M folded queries [M, D], float32 (float64).
        keys: S tensors [..., D]; None: the values.
        bias: b [M, S], float32 (float64); None: zeros.
        base: [..., D], added to every complete read; None: none.
    """

    values: Sequence[Tensor]
    queries: Tensor
    keys: Sequence[Tensor] | None = None
    bias: Tensor | None = None
    base: Tensor | None = None


class Prior(NamedTuple):
    """The same phase at initialisation, shared by all its partial reads.

    Attributes:
        total: U [..., D], float32 (float64).
        sums: Z⁰ [..., H], constant.
        maxima: c⁰ [..., H], constant.
    """

    total: Tensor
    sums: Tensor
    maxima: Tensor


class Part(NamedTuple):
    """What a phase hands on for one partial read.

    Attributes:
        numerator: N [..., D], float32 (float64).
        sums: Z [..., H], float32 (float64).
        maxima: c [..., H], constant.
        prior: where anchored.
    """

    numerator: Tensor
    sums: Tensor
    maxima: Tensor
    prior: Prior | None = None


class PhaseOutput(NamedTuple):
    """What a phase gives.

    Attributes:
        complete: the first reads, finished: base + gain · Σ w v [..., D]; in the dtype of the values with a base, else
            float32 (float64).
        partial: the others.
        logits: l [M, S, ..., H] (biases included), detached, float32 (float64), any strides.
    """

    complete: list[Tensor]
    partial: list[Part]
    logits: Tensor


class MergeInput(NamedTuple):
    """One partial read and the sources that only it sees. The inputs of one call agree in sizes and dtype.

    Attributes:
        part: of the phase.
        values: private sources, P ≥ 1 tensors [..., D].
        query: the read's folded query [D].
        keys: P tensors [..., D]; None: the values.
        bias: b [P]; None: zeros.
        base: [..., D]; None: none.
        start: [..., D], a tensor to which `base` is equal up to rounding once the first `summands` of `values` are added: the
            stream at the time of the phase. With it, the gradient needs nothing else of width D but x. None: `base` is kept.
        summands: how many values.
    """

    part: Part
    values: Sequence[Tensor]
    query: Tensor
    keys: Sequence[Tensor] | None = None
    bias: Tensor | None = None
    base: Tensor | None = None
    start: Tensor | None = None
    summands: int = 0


class MergeOutput(NamedTuple):
    """One finished read.

    Attributes:
        x: [..., D], in the dtype of the values; where the call was not to cast, float32 (float64).
        logits: l [P, ..., H] of the private sources, detached, float32 (float64).
    """

    x: Tensor
    logits: Tensor


def choose_backend(config: Any, stream: Tensor) -> Any | None:
    """What computes depth reads: a module with the functions `phase`, `merge`, `of_inference`, `combine` and `write_streams`, and
    the class `InferenceReads` if `of_inference` is ever true; or None for the reference.

    Args:
        config: `depth_backend` names it.
        stream: [B, T, D], on the device and in the dtype of the sources.

    Raises:
        ValueError: an implementation is asked for by name that cannot run here.
    """
    if torch.compiler.is_compiling():
        name = config.depth_backend
    else:
        # asked for in every read, and a configuration's own lookup takes longer than a small operation
        name = object.__getattribute__(config, "depth_backend")
    if name == "reference":
        return None
    try:
        from depthroute_kernels.dispatch import backend_for
    except ImportError as error:
        if name == "auto":
            return None
        raise ValueError(
            f"depth_backend: got {name!r}, allowed: 'auto' or 'reference' where depthroute_kernels is not installed"
        ) from error
    return backend_for(name, stream.device, stream.dtype)


def has_hooks(module: nn.Module) -> bool:
    """Whether something looks at, and may change, what goes into a module or comes out of it."""
    if module._forward_pre_hooks or _has_any_global_hook():
        return True
    # transformers leaves behind hooks that only record, once hidden states or attentions were asked for
    hooks = module._forward_hooks
    return bool(hooks) and any(getattr(hook, "__module__", "") != _RECORDING for hook in hooks.values())


def is_whole(module: nn.Module, device: torch.device) -> bool:
    """Whether a read's parameters are all here: not sharded, not offloaded, not another device's."""
    # a shard is a subclass of Tensor, or empty while its module does not run; a walk through modules takes its time
    parameters = module.parameters() if module._modules else module._parameters.values()
    for parameter in parameters:
        if parameter is not None and (
            type(parameter) not in (nn.Parameter, Tensor) or parameter.device != device or parameter.shape.numel() == 0
        ):
            return False
    return True
