# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Single-stream depth routing: AttnRes (arXiv 2603.15031) and Delta AttnRes (arXiv 2605.18855).

Three independent choices, one config field each: what a source is (`depth_source`, `depth_block_size`), what the mix does
to the stream (`depth_combine`), and whether the read starts as the identity (`depth_anchored`). `depth_schedule` counts
the sources; `depth_ops` does the arithmetic; this file keeps the tensors.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .depth_ops import depth_read, statistics_dtype
from .depth_schedule import read_name, source_labels, unit_sublayers
from .residual_base import Residual, ResidualState, RoutingRecord, RoutingWeights


class DepthRead(nn.Module):
    """The parameters of one depth read: `query` [D] (zero at the start) and `key_norm` γ [D] (one at the start).

    A module that is called, not a bag of parameters: PEFT, FSDP and hooks see every use. Initial values are set in
    `DepthRoutePreTrainedModel._init_weights`.

    Args:
        config: `hidden_size` is D; `depth_key_norm` = "none" leaves `key_norm` away.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.query = nn.Parameter(torch.empty(config.hidden_size))
        self.key_norm = nn.Parameter(torch.empty(config.hidden_size)) if config.depth_key_norm == "learned" else None

    def forward(self, stream: Tensor) -> Tensor:
        """The folded query γ ⊙ q [D], float32 (float64 for a float64 `stream` [B, T, D], which is used for nothing else)."""
        dtype = statistics_dtype(stream)
        return self.query.to(dtype) if self.key_norm is None else self.query.to(dtype) * self.key_norm.to(dtype)

    def extra_repr(self) -> str:
        return f"width={self.query.shape[-1]}, key_norm={'learned' if self.key_norm is not None else 'none'}"


class DepthAttentionResidual(Residual):
    """Every branch reads a learned mix over depth; writes are plain.

        sources    outputs            e, u_0 … u_{s-1}            (`attnres`, `delta`)
                   outputs by block   e, C_0 … C_{b-1}, PC        (`attnres-block`, `delta-block`: without PC)
                   states             h_0 … h_s                   (`attnres-states`)
        x_s        replace, plain     Σ p_i v_i                   (AttnRes)
                   replace, anchored  h_s + S · Σ (p_i − p⁰_i) v_i   over outputs: S times the plain read where Σ v_i = h_s;
                                      over states the factor is 1
                   add, plain         h_s + Σ p_i v_i             (Delta AttnRes)
                   add, anchored      h_s + Σ (p_i − p⁰_i) v_i
        x_final    replace            one more read               add: the stream

    The state's carry is (h_s, PC) while a block over outputs is running and (h_s,) otherwise; the history holds the
    completed sources.
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
        return DepthRead(self.config) if len(source_labels(self.config, s)) > 1 else None

    def carry_size(self, s: int) -> int:
        return 1 if self.over_states or s % self.unit == 0 else 2

    def start(self, embedding: Tensor) -> ResidualState:
        return ResidualState((embedding,), (embedding,))

    def sources(self, state: ResidualState, s: int) -> tuple[Tensor, ...]:
        """The tensors that read `s` chooses from, in the order of `source_labels`."""
        if s % self.unit == 0:
            return state.history
        if self.over_states:
            return (*state.history, state.stream)
        return (*state.history, state.carry[1]) if self.replaces else state.history

    def read(self, state: ResidualState, s: int, module: nn.Module | None, record: RoutingRecord | None) -> Tensor:
        if module is None:
            return state.stream
        config = self.config
        sources = self.sources(state, s)
        keeps_stream = config.depth_anchored or not self.replaces
        # the plain replace read over outputs is h_s / S at q = 0: the gain makes the anchored one S times it
        gain = len(sources) if config.depth_anchored and self.replaces and not self.over_states else 1
        read, weights = depth_read(
            sources,
            module(state.stream),
            base=state.stream if keeps_stream else None,
            gain=float(gain),
            scale=config.depth_logit_scale,
            eps=config.rms_norm_eps,
            num_heads=config.depth_num_heads,
            anchored=config.depth_anchored,
            return_weights=True,
        )
        if record is not None:
            record[read_name(config, s)] = RoutingWeights(source_labels(config, s), weights.detach())
        return read

    def write(self, state: ResidualState, s: int, update: Tensor) -> ResidualState:
        stream = state.stream + update
        completes_unit = (s + 1) % self.unit == 0
        if self.over_states:
            return ResidualState((stream,), (*state.history, stream) if completes_unit else state.history)
        running = state.carry[1] + update if s % self.unit else update
        if completes_unit:
            return ResidualState((stream,), (*state.history, running))
        return ResidualState((stream, running), state.history)

    def finish(self, state: ResidualState, module: nn.Module | None, record: RoutingRecord | None) -> Tensor:
        if not self.replaces:
            return state.stream
        return self.read(state, 2 * self.config.num_hidden_layers, module, record)
