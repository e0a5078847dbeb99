# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What must hold before a case is measured: the time of a wrong result is worth nothing."""

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from depthroute import DepthRouteConfig, DepthRouteForCausalLM
from depthroute.errors import CheckFailed
from depthroute.modeling.modeling_depthroute import build_residual
from depthroute.modeling.residual_base import Reading, Residual, ResidualState
from depthroute.modeling.residual_baselines import HyperConnectionResidual, ScaledResidual
from depthroute.modeling.residual_dual_stream import DualStreamResidual

from .equations import EQUATIONS, Step, parameters_of


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest difference of a read from its float64 value, as a fraction of the largest value: one rounding of the result, and in
float32 the order of a sum over sources and width."""


GAP = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of logits from stock, in their standard deviations, where a residual does not start exactly: mHC's eps of
1e-6 in its gates, or one rounding of them, through some tens of sublayers."""


def check_anchored_start(model: DepthRouteForCausalLM, stock: Qwen3ForCausalLM, token_ids: Tensor, name: str) -> None:
    """An anchored (or standard) model on the stock weights gives the stock logits; mHC nearly.

    Raises:
        CheckFailed: one of them differs.
    """
    exact = model.model.residual.starts_exactly
    for gradients in (True, False):  # without gradients reads go a way of their own
        with torch.set_grad_enabled(gradients):
            logits, expected = (m(input_ids=token_ids, use_cache=False).logits.detach() for m in (model, stock))
        gap = (logits.double() - expected.double()).abs().max().item()
        allowed = 0.0 if exact else GAP[logits.dtype] * expected.double().std().item()
        if not gap <= allowed or (exact and not torch.equal(logits, expected)):
            raise CheckFailed(
                f"{name}: anchored logits differ from stock Qwen3 by {gap:.3g}, allowed: {allowed:.3g}; nothing was measured"
            )


def check_reads(config: DepthRouteConfig, token_ids: Tensor, dtype: torch.dtype, name: str) -> float:
    """Every read and write of the residual, over random outputs [B, T, D] and with random parameters, against `equations` in
    float64, on the device of the token ids.

    Returns:
        The largest difference, as a fraction of the largest value.

    Raises:
        CheckFailed: it is above `TOLERANCE`.
    """
    with token_ids.device:
        return _check_reads(config, token_ids, dtype, name)


def _check_reads(config: DepthRouteConfig, token_ids: Tensor, dtype: torch.dtype, name: str) -> float:
    generator = torch.Generator(token_ids.device).manual_seed(1)
    residual = build_residual(config)
    shape, final = (*token_ids.shape, config.hidden_size), 2 * config.num_hidden_layers
    outputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(final + 1)]
    state, worst = residual.start(outputs[0]), 0.0
    for s in range(final + 1):
        module = residual.create_read(s)
        with torch.no_grad():
            for parameter in [] if module is None else parameters_of(module):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if s == final:
                reading, after = Reading(residual.finish(state, module, None)), state
            else:
                reading = residual.read(state, s, module, None)
                after = residual.write(state, s, outputs[s + 1], reading)
            if module is not None:
                got = [reading.x, *([] if reading.value is None else [reading.value]), *written_by(residual, after, s)]
                expected = EQUATIONS[config.residual_type](Step(config, s, state, outputs[: s + 2], module))
                differences = [((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected)]
                worst = max(worst, *differences)
        state = after
    if not worst <= TOLERANCE[dtype]:
        raise CheckFailed(f"{name}: a read differs by {worst:.3g} from float64, allowed: {TOLERANCE[dtype]:.3g}")
    return worst


def written_by(residual: Residual, state: ResidualState, s: int) -> tuple[Tensor, ...]:
    """The tensors that a write of its own rule has made: the streams, or the scaled stream. None where writes are plain sums."""
    if isinstance(residual, DualStreamResidual):
        return state.carry[1:] or state.history[-2:]
    if isinstance(residual, HyperConnectionResidual):
        return state.carry[1:]
    return state.carry if isinstance(residual, ScaledResidual) else ()
