# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What must hold before a case is measured: the time of a wrong result is worth nothing."""

from functools import reduce
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from depthroute import DepthRouteConfig, DepthRouteForCausalLM
from depthroute.errors import CheckFailed
from depthroute.modeling.depth_schedule import source_labels, unit_sublayers
from depthroute.modeling.modeling_depthroute import build_residual


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest difference of a read from its float64 value, as a fraction of the largest value: one rounding of the result, and in
float32 the order of a sum over sources and width."""


def check_anchored_start(model: DepthRouteForCausalLM, stock: Qwen3ForCausalLM, token_ids: Tensor, name: str) -> None:
    """An anchored (or standard) model on the stock weights gives the stock logits.

    Raises:
        CheckFailed: one of them differs.
    """
    with torch.no_grad():
        logits, expected = (m(input_ids=token_ids, use_cache=False).logits for m in (model, stock))
    if not torch.equal(logits, expected):
        gap = (logits.double() - expected.double()).abs().max().item()
        raise CheckFailed(
            f"{name}: anchored logits differ from stock Qwen3 by {gap:.3g}, allowed: 0; nothing was measured"
        )


def check_reads(config: DepthRouteConfig, token_ids: Tensor, dtype: torch.dtype, name: str) -> float:
    """Every read of the residual, over random outputs [B, T, D] and with random queries, against the equation in float64 on
    stacked sources.

    Returns:
        The largest difference, as a fraction of the largest value.

    Raises:
        CheckFailed: it is above `TOLERANCE`.
    """
    generator = torch.Generator().manual_seed(1)
    residual = build_residual(config)
    shape, final = (*token_ids.shape, config.hidden_size), 2 * config.num_hidden_layers
    outputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(final + 1)]
    state, worst = residual.start(outputs[0]), 0.0
    for s in range(final + 1):
        module = residual.create_read(s)
        if module is not None:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
                read = residual.finish(state, module, None) if s == final else residual.read(state, s, module, None)
                expected = naive_read(config, s, outputs[: s + 1], module)
            worst = max(worst, ((read.double() - expected).abs().max() / expected.abs().max()).item())
        if s < final:
            state = residual.write(state, s, outputs[s + 1])
    if not worst <= TOLERANCE[dtype]:
        raise CheckFailed(f"{name}: a read differs by {worst:.3g} from float64, allowed: {TOLERANCE[dtype]:.3g}")
    return worst


def naive_read(config: DepthRouteConfig, s: int, written: list[Tensor], module: Any) -> Tensor:
    """The equation of read `s`, step by step in float64. `written` is e, u_0 … u_{s-1}; only their sums, which the model
    carries, are in its own dtype."""

    def total(start: int, stop: int) -> Tensor:
        return reduce(torch.add, written[start:stop]).double()

    unit, labels, stream = unit_sublayers(config), source_labels(config, s), total(0, s + 1)
    sources = []
    for label in labels:
        kind, _, place = label.partition(" ")
        if kind == "embedding":
            sources.append(written[0].double())
        elif kind == "partial":
            sources.append(total(1 + s // unit * unit, s + 1))
        elif kind == "state":
            sources.append(total(0, 1 + int(place)))
        elif kind == "block":
            sources.append(total(1 + int(place) * unit, 1 + (int(place) + 1) * unit))
        else:
            layer, branch = place.split()
            sources.append(written[1 + 2 * int(layer) + (branch == "mlp")].double())
    values = torch.stack(sources)
    keys = values / torch.sqrt(values.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    query = module.query.double() * (1 if module.key_norm is None else module.key_norm.double())
    logits = config.depth_logit_scale * (keys * query).unflatten(-1, (config.depth_num_heads, -1)).sum(-1)
    weights = torch.softmax(logits, 0) - (1 / len(labels) if config.depth_anchored else 0)
    mix = (weights.unsqueeze(-1) * values.unflatten(-1, (config.depth_num_heads, -1))).sum(0).flatten(-2)
    replaces = config.depth_combine == "replace"
    gain = len(labels) if config.depth_anchored and replaces and config.depth_source == "output" else 1
    return gain * mix + (stream if config.depth_anchored or not replaces else 0)
