# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Single-stream depth routing: AttnRes (arXiv 2603.15031), Delta AttnRes (arXiv 2605.18855), RD-AttnRes
(arXiv 2608.01075) and WAV (arXiv 2606.06564v1).

Independent choices, one config field each: what a source is (`depth_source`, `depth_block_size`, `depth_detail_bases`),
what the mix does to the stream (`depth_combine`), whether the read starts as the identity (`depth_anchored`), and what
attention's values read (`depth_value_route`). `depth_schedule` counts the sources; `depth_ops` does the arithmetic; this
file keeps the tensors.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .depth_ops import depth_read, statistics_dtype
from .depth_schedule import history_sources, read_name, read_sources, unit_sublayers
from .residual_base import Reading, Residual, ResidualState, RoutingRecord, RoutingWeights


class ReadParameters(NamedTuple):
    """What a `DepthRead` hands to the arithmetic, in float32 (float64 for a float64 stream).

    Attributes:
        query: γ ⊙ q [D].
        value_query: γ ⊙ q^V [D], where attention's values have a route of their own.
        null: one more source [D], where there is one.
        value_proj: [D, D] applied to the mix of values, where there is one.
        bias: b [S], where sources have biases.
        prior_bias: b⁰ [S], the same at initialisation.
    """

    query: Tensor
    value_query: Tensor | None
    bias: Tensor | None
    prior_bias: Tensor | None
    null: Tensor | None
    value_proj: Tensor | None


class DepthRead(nn.Module):
    """The parameters of one depth read: `query` [D] (zero at the start), `key_norm` γ [D] (one), `value_query` q^V [D]
    (zero; RD-AttnRes), `detail_bias` [bases] (`depth_detail_bias`; WAV), `value_proj` [D, D] (identity; DAR's SepV control)
    and `null` [D] (zero; released Delta code).

    A module that is called, not a bag of parameters: PEFT, FSDP and hooks see every use. Initial values are set in
    `DepthRoutePreTrainedModel._init_weights`.

    Args:
        config: `hidden_size` is D.
        s: the read; 2L is the final one.
    """

    def __init__(self, config: Any, s: int):
        super().__init__()
        width = config.hidden_size
        bases = config.depth_detail_bases
        self.bases = [bases.index(source.basis) if source.basis else -1 for source in read_sources(config, s)]
        self.bases += [-1] * config.depth_null_source
        self.initial_detail_bias = config.depth_detail_bias
        has_details = any(basis >= 0 for basis in self.bases)
        is_attention = s % 2 == 0 and s < 2 * config.num_hidden_layers
        routes_values = is_attention and config.depth_value_route in ("decoupled", "average")
        self.query = nn.Parameter(torch.empty(width))
        self.key_norm = nn.Parameter(torch.empty(width)) if config.depth_key_norm == "learned" else None
        self.value_query = nn.Parameter(torch.empty(width)) if routes_values else None
        self.detail_bias = nn.Parameter(torch.empty(len(config.depth_detail_bases))) if has_details else None
        self.value_proj = nn.Parameter(torch.empty(width, width)) if config.depth_value_projection else None
        self.null = nn.Parameter(torch.empty(width)) if config.depth_null_source else None

    def forward(self, stream: Tensor) -> ReadParameters:
        """The folded parameters; `stream` [B, T, D] gives device and dtype and is used for nothing else."""
        dtype = statistics_dtype(stream)

        def fold(query: Tensor) -> Tensor:
            return query.to(dtype) if self.key_norm is None else query.to(dtype) * self.key_norm.to(dtype)

        bias = prior_bias = None
        if self.detail_bias is not None:
            basis = torch.tensor(self.bases, device=stream.device)
            is_detail = basis >= 0
            learned = self.detail_bias.to(dtype)[basis.clamp(min=0)]
            # rounded like the parameter: the start must be exactly the parameter's start
            initial = torch.full_like(self.detail_bias, self.initial_detail_bias).to(dtype)[basis.clamp(min=0)]
            bias = torch.where(is_detail, learned, torch.zeros_like(learned))
            prior_bias = torch.where(is_detail, initial, torch.zeros_like(initial))
        value_query = None if self.value_query is None else fold(self.value_query)
        return ReadParameters(fold(self.query), value_query, bias, prior_bias, self.null, self.value_proj)

    def extra_repr(self) -> str:
        return f"width={self.query.shape[-1]}, key_norm={'learned' if self.key_norm is not None else 'none'}"


def match_rms(detail: Tensor, summary: Tensor, max_scale: float, eps: float) -> Tensor:
    """WAV's detached RMS matching: D · min(`max_scale`, rms(C) / rms(D)) per token.

    Args:
        detail, summary: D and C, [B, T, D].

    Returns:
        [B, T, D] in the dtype of the detail; the ratio is computed in float32 (float64) and has no gradient.
    """
    dtype = statistics_dtype(detail)
    with torch.no_grad():
        square_summary, square_detail = (
            torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=dtype).square() / tensor.shape[-1]
            for tensor in (summary, detail)
        )
        ratio = ((square_summary + eps) / (square_detail + eps)).sqrt().clamp(max=max_scale)
    return (detail * ratio).to(detail.dtype)


class DepthAttentionResidual(Residual):
    """Every branch reads a learned mix over depth; writes are plain.

        sources    outputs            e, u_0 … u_{s-1}            (`attnres`, `delta`)
                   outputs by block   e, C_0 … C_{b-1}, PC        (`attnres-block`, `delta-block`: without PC)
                   with details       and D̃^phase, D̃^split behind each C and PC (`wav`)
                   states             h_0 … h_s                   (`attnres-states`)
        x_s        replace, plain     Σ p_i v_i                   (AttnRes)
                   replace, anchored  h_s + g Σ (p_i − p⁰_i) v_i  over outputs: g = 1 / p⁰_main, that is S without details,
                                      which is g times the plain read where Σ v_i = h_s; over states g = 1
                   add, plain         h_s + Σ p_i v_i             (Delta AttnRes)
                   add, anchored      h_s + Σ (p_i − p⁰_i) v_i
        x^V        decoupled          the same with the query q^V (RD-AttnRes); uniform: with p = p⁰ (Frozen-V)
                   average            half the sum of both routes feeds queries, keys and values
        x_final    replace            one more read, without details          add: the stream

    Details of a block with updates u_i: D^phase = Σ ±u_i, + attention, − MLP; D^split = Σ ±u_i, + the first K updates.

    The state's carry is (h_s, PC, running details) while a block over outputs is running and (h_s,) otherwise; the history
    holds the completed sources.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.unit = unit_sublayers(config)
        self.over_states = config.depth_source == "state"
        self.replaces = config.depth_combine == "replace"
        # a replacing read is the branch's whole input, and anchored it is multiplied by the number of sources; the papers'
        # hundredfold rates cause loss spikes
        self.routing_learning_rate_factor = 2.0 if self.replaces else 10.0

    def create_read(self, s: int) -> DepthRead | None:
        is_final = s == 2 * self.config.num_hidden_layers
        if is_final and not self.replaces:
            return None
        return DepthRead(self.config, s) if len(read_sources(self.config, s)) > 1 else None

    def carry_size(self, s: int) -> int:
        return 1 if self.over_states or s % self.unit == 0 else 2 + len(self.config.depth_detail_bases)

    def history_size(self, s: int) -> int:
        return len(history_sources(self.config, s))

    def start(self, embedding: Tensor) -> ResidualState:
        return ResidualState((embedding,), (embedding,))

    def sources(self, state: ResidualState, s: int) -> Sequence[Tensor]:
        """The tensors that read `s` chooses from, in the order of `read_sources`."""
        history = state.history
        if s == 2 * self.config.num_hidden_layers and self.config.depth_detail_bases:
            kept = zip(history, history_sources(self.config, s))
            history = tuple(tensor for tensor, source in kept if source.basis is None)
        if s % self.unit == 0:
            return history
        if self.over_states:
            return (*history, state.stream)
        if not self.replaces:
            return history
        partial, *details = state.carry[1:]
        if s == 2 * self.config.num_hidden_layers:
            return (*history, partial)
        return (*history, partial, *(self.scaled(detail, partial) for detail in details))

    def scaled(self, detail: Tensor, summary: Tensor) -> Tensor:
        return match_rms(detail, summary, self.config.depth_detail_max_scale, self.config.rms_norm_eps)

    def read(self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None) -> Reading:
        if module is None:
            return Reading(state.stream)
        config = self.config
        sources = self.sources(state, s)
        parameters: ReadParameters = module(state.stream)
        labels = [source.label for source in read_sources(config, s)]
        details = sum(source.basis is not None for source in read_sources(config, s))
        if parameters.null is not None:
            sources = (*sources, parameters.null.to(state.stream.dtype).expand_as(state.stream))
            labels.append("null")

        gain = 1.0
        if config.depth_anchored and self.replaces and not self.over_states:
            # 1 / p⁰ of a source that is no detail: with it the read is `gain` times the plain one
            gain = len(sources) - details + details * math.exp(config.depth_detail_bias)

        base = state.stream if config.depth_anchored or not self.replaces else None

        def mix(query: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
            read, weights = depth_read(
                sources,
                query,
                bias=bias,
                prior_bias=parameters.prior_bias,
                base=base if parameters.value_proj is None else None,
                gain=gain,
                scale=config.depth_logit_scale,
                eps=config.rms_norm_eps,
                num_heads=config.depth_num_heads,
                anchored=config.depth_anchored,
                return_weights=True,
            )
            if parameters.value_proj is not None:  # linear: one projection of the mix is the mix of projected values
                read = nn.functional.linear(read, parameters.value_proj.to(read.dtype))
                read = read if base is None else base + read
            return read, weights

        read, weights = mix(parameters.query, parameters.bias)
        value_read = value_weights = None
        if parameters.value_query is not None:
            value_read, value_weights = mix(parameters.value_query, parameters.bias)
        elif config.depth_value_route == "uniform" and s % 2 == 0 and s < 2 * config.num_hidden_layers:
            value_read, value_weights = mix(torch.zeros_like(parameters.query), parameters.prior_bias)
        if record is not None:
            noted = RoutingWeights(labels, weights.detach(), None if value_weights is None else value_weights.detach())
            record.note(read_name(config, s), noted)
        if config.depth_value_route == "average" and value_read is not None:
            return Reading((read + value_read) / 2)
        return Reading(read, value_read)

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        stream = state.stream + update
        completes_unit = (s + 1) % self.unit == 0
        if self.over_states:
            return ResidualState((stream,), (*state.history, stream) if completes_unit else state.history)
        begins_unit = s % self.unit == 0
        signs = [1, *(self.sign(basis, s) for basis in self.config.depth_detail_bases)]
        if begins_unit:
            running = [update if sign > 0 else -update for sign in signs]
        else:
            running = [old + update if sign > 0 else old - update for sign, old in zip(signs, state.carry[1:])]
        if not completes_unit:
            return ResidualState((stream, *running), state.history)
        block, *details = running
        return ResidualState((stream,), (*state.history, block, *(self.scaled(detail, block) for detail in details)))

    def sign(self, basis: str, s: int) -> int:
        """±1 of update `s` in a detail: "phase" + attention, − MLP; "split" + the first half of a whole block, −
        after."""
        first = s % 2 == 0 if basis == "phase" else s % self.unit < self.unit // 2
        return 1 if first else -1

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None) -> Tensor:
        return self.read(state, 2 * self.config.num_hidden_layers, module, record).x if self.replaces else state.stream
