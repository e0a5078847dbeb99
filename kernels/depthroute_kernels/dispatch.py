# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One call, one table: `depth_read` runs the implementation that its caller names.

An implementation is a function with the arguments and the meaning of `depthroute.modeling.depth_ops.depth_read`, and joins
by one row of `IMPLEMENTATIONS`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from depthroute.modeling import depth_ops


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"reference": depth_ops.depth_read}
"""Implementations by name. `"auto"` is not among them: it stands for the choice that `depth_read` makes."""


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
    other tensor argument receives gradients, twice if asked; sources are not stacked, and saved for backward as they are.

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
        implementation: "auto" or a name of `IMPLEMENTATIONS`. "auto" is "reference", the only one there is.

    Returns:
        x [..., D], or [M, ..., D], in the dtype of the first value; with `return_weights` a pair of x and p: [S, ...], or
        [M, S, ...] for M queries, with a trailing H where H > 1.

    Raises:
        ValueError: unknown implementation; no source, keys that differ in number from the values, or H that does not
            divide D.
    """
    name = "reference" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: got {implementation!r}, allowed: {', '.join(['auto', *IMPLEMENTATIONS])}")
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
