# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One read and one write of each residual of the preset table, step by step in float64, for `parity` to compare with.

Only what a preset can be under measurement: routes of values are shared or decoupled, gates static, keys of two streams taken
across. What a model carries in its own dtype (sums, states of streams) is taken as it is; all else is computed anew.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthroute import DepthRouteConfig
from depthroute.modeling.depth_schedule import source_labels, unit_sublayers
from depthroute.modeling.residual_base import ResidualState


class Step(NamedTuple):
    """What read `s` saw: the state before it, and e, u_0 … u_{s-1} that were written until then."""

    config: DepthRouteConfig
    s: int
    state: ResidualState
    written: list[Tensor]
    module: Any

    @property
    def is_final(self) -> bool:
        return self.s == 2 * self.config.num_hidden_layers

    def total(self, start: int, stop: int, sign: Callable[[int], int] = lambda s: 1) -> Tensor:
        """The signed sum of what sublayers `start` to `stop` wrote, in the model's dtype and order; -1 is e."""
        return reduce(torch.add, [sign(s) * self.written[s + 1] for s in range(start, stop)]).double()


def softmax_weights(step: Step, keys: Tensor, query: Tensor, bias: Tensor) -> Tensor:
    """p [S, B, T, H] of a folded query [D] over keys [S, B, T, D]."""
    config = step.config
    normalised = keys / torch.sqrt(keys.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    logits = config.depth_logit_scale * (normalised * query).unflatten(-1, (config.depth_num_heads, -1)).sum(-1)
    return torch.softmax(logits + bias.view(-1, 1, 1, 1), 0)


def mix(weights: Tensor, values: Tensor) -> Tensor:
    """Σ w v [B, T, D] of weights [S, B, T, H] and values [S, B, T, D]."""
    return (weights.unsqueeze(-1) * values.unflatten(-1, (weights.shape[-1], -1))).sum(0).flatten(-2)


def depth_attention(step: Step) -> list[Tensor]:
    """x, or x^QK and x^V where attention's values have their own route."""
    config, module = step.config, step.module
    unit = unit_sublayers(config)
    half = unit // 2

    def detail(basis: str, start: int, stop: int) -> Tensor:
        sign = (lambda s: 1 - 2 * (s % 2)) if basis == "phase" else (lambda s: 1 if s % unit < half else -1)
        summary, difference = step.total(start, stop), step.total(start, stop, sign)
        squares = (tensor.square().mean(-1, keepdim=True) + config.rms_norm_eps for tensor in (summary, difference))
        return difference * torch.sqrt(next(squares) / next(squares)).clamp(max=config.depth_detail_max_scale)

    def source(label: str) -> Tensor:
        kind, _, place = label.partition(" ")
        index, _, basis = place.partition(" ")
        if kind == "embedding":
            return step.written[0].double()
        if kind == "state":
            return step.total(-1, int(place))
        if kind == "layer":
            return step.written[1 + 2 * int(index) + (basis == "mlp")].double()
        start, stop = (
            (step.s // unit * unit, step.s) if kind == "partial" else (int(index) * unit, (int(index) + 1) * unit)
        )
        basis = place if kind == "partial" else basis
        return detail(basis, start, stop) if basis else step.total(start, stop)

    labels = source_labels(config, step.s)
    values = torch.stack([source(label) for label in labels])
    bases = [config.depth_detail_bases.index(end) if (end := label.split()[-1]) in config.depth_detail_bases else -1
             for label in labels]  # fmt: skip
    bias, prior = (
        torch.stack([torch.zeros((), dtype=torch.float64) if basis < 0 else of(basis) for basis in bases])
        for of in (
            lambda basis: module.detail_bias[basis].double(),
            lambda basis: torch.tensor(config.depth_detail_bias, dtype=module.detail_bias.dtype).double(),
        )
    )
    replaces = config.depth_combine == "replace"
    gain = torch.exp(prior).sum() if config.depth_anchored and replaces and config.depth_source == "output" else 1
    base = step.total(-1, step.s) if config.depth_anchored or not replaces else 0
    start = torch.softmax(prior, 0).view(-1, 1, 1, 1) if config.depth_anchored else 0
    queries = [query for query in (module.query, module.value_query) if query is not None]
    return [
        base
        + gain * mix(softmax_weights(step, values, query.double() * module.key_norm.double(), bias) - start, values)
        for query in queries
    ]


def dual_stream(step: Step) -> list[Tensor]:
    """x, and P^0, P^1 after the write."""
    config, module, state = step.config, step.module, step.state
    entries = [[tensor.double() for tensor in state.history[j::2]] for j in (0, 1)]
    begun = step.s % unit_sublayers(config) > 0
    partial = [tensor.double() for tensor in state.carry[1:]] if begun else [torch.zeros(())] * 2
    if begun:
        entries = [[*entries[j], partial[j]] for j in (0, 1)]
    streams = [torch.stack(entry) for entry in entries]
    alpha, *gates = torch.sigmoid(module.gate_logits.double())
    count, stream = len(entries[0]), step.total(-1, step.s)
    x = stream
    if count > 1:
        weights = [
            softmax_weights(
                step, streams[1 - j], module.query[j].double() * module.key_norm[j].double(), torch.zeros(count)
            )
            for j in (0, 1)
        ]
        if config.depth_anchored:
            first, second = (mix(weights[j] - 1 / count, streams[j]) for j in (0, 1))
            x = stream + (alpha - 0.5) * (streams[0].sum(0) - streams[1].sum(0))
            x = x + count * (alpha * first + (1 - alpha) * second)
        else:
            x = alpha * mix(weights[0], streams[0]) + (1 - alpha) * mix(weights[1], streams[1])
    if step.is_final:
        return [x]
    rho, *beta = gates
    update = step.written[step.s + 1].double()
    return [x, *(rho * partial[j] + (1 - rho) * partial[1 - j] + 2 * beta[j] * update for j in (0, 1))]


def hyper_connection(step: Step) -> list[Tensor]:
    """x, and the streams [B, T, n, D] after the write."""
    module, streams, eps = step.module, step.state.carry[1].double(), 1e-6
    n = streams.shape[-2]
    flat = streams.flatten(-2)
    flat = flat / torch.sqrt(flat.square().mean(-1, keepdim=True) + step.config.rms_norm_eps)
    sizes = (n,) if step.is_final else (n, n, n * n)
    projected = (flat @ module.gate_proj.double().T).split(sizes, -1)
    logits = [
        scale * part + bias
        for scale, part, bias in zip(module.gate_scale.double(), projected, module.gate_bias.double().split(sizes))
    ]
    x = torch.einsum("btn,btnd->btd", torch.sigmoid(logits[0]) + eps, streams)
    if step.is_final:
        return [x]
    matrix = torch.softmax(logits[2].unflatten(-1, (n, n)), -1) + eps
    for axis in (-2, *(-1, -2) * 19):
        matrix = matrix / (matrix.sum(axis, keepdim=True) + eps)
    update = step.written[step.s + 1].double()
    after = torch.einsum("btnm,btnd->btmd", matrix, streams)
    return [x, after + 2 * torch.sigmoid(logits[1]).unsqueeze(-1) * update.unsqueeze(-2)]


def scaled(step: Step) -> list[Tensor]:
    """x, and h after the write."""
    stream = step.state.stream.double()
    return [stream] if step.is_final else [stream, stream + step.module.double() * step.written[step.s + 1].double()]


EQUATIONS: dict[str, Callable[[Step], list[Tensor]]] = {
    "depth_attention": depth_attention,
    "dual_stream": dual_stream,
    "hyper_connection": hyper_connection,
    "rezero": scaled,
    "layerscale": scaled,
}
"""`residual_type` → what a read gives, and what its write makes of the state's own tensors."""


def parameters_of(module: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    """The parameters around a sublayer, which `create_read` may give as one bare parameter."""
    return [module] if isinstance(module, nn.Parameter) else list(module.parameters())
