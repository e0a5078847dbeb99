# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the papers compare with: ReZero (arXiv 2003.04887), LayerScale (arXiv 2103.17239) and manifold-constrained
hyper-connections (mHC, arXiv 2512.24880)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .depth_ops import statistics_dtype
from .residual_base import Reading, Residual, ResidualState, RoutingRecord


class ScaledResidual(Residual):
    """h ← h + a · u with a learned a: a scalar per sublayer (ReZero, zero at the start) or a vector [D] (LayerScale, 0.1,
    10⁻⁵ beyond 18 layers, 10⁻⁶ beyond 24). `depth_anchored`, as in a conversion, starts both at one: the standard
    function."""

    parameter_name = "scale"

    def create_read(self, s: int) -> nn.Parameter | None:
        if s == 2 * self.config.num_hidden_layers:
            return None
        return nn.Parameter(torch.empty(1 if self.config.residual_type == "rezero" else self.config.hidden_size))

    def initial_scale(self) -> float:
        """The value that every entry of a scale starts at."""
        if self.config.depth_anchored:
            return 1.0
        if self.config.residual_type == "rezero":
            return 0.0
        layers = self.config.num_hidden_layers
        return 0.1 if layers <= 18 else 1e-5 if layers <= 24 else 1e-6

    def carry_size(self, s: int) -> int:
        return 1

    def start(self, embedding: Tensor) -> ResidualState:
        return ResidualState((embedding,))

    def read(
        self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None, prepared: Any = None
    ) -> Reading:
        return Reading(state.stream, gates=module)

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        return ResidualState((state.stream + reading.gates.to(update.dtype) * update,))

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        return state.stream


SINKHORN_ITERATIONS = 20
HYPER_EPS = 1e-6


class HyperGates(NamedTuple):
    """mHC's weights, float32 (float64): `collapse` H^pre [B, T, n], and, but for the final read, `expand` H^post
    [B, T, n] and `mix` H^res [B, T, n, n], doubly stochastic."""

    collapse: Tensor
    expand: Tensor | None = None
    mix: Tensor | None = None


class HyperRead(nn.Module):
    """The parameters of one mHC connection: `gate_proj` [n(n+2), nD] (zero at the start), `gate_bias` [n(n+2)] and
    `gate_scale` [3] (0.01); of the final read, which only collapses, [n, nD], [n] and [1].

    Gates see the RMS-normalised concatenation of the streams. At the start H^post is 1, H^res nearly the identity, and
    H^pre sums to 1 with its largest entry at stream s mod n, so that streams come apart: the standard function up to mHC's
    own eps of 10⁻⁶. Initial values are set in `DepthRoutePreTrainedModel._init_weights`.
    """

    def __init__(self, config: Any, s: int):
        super().__init__()
        self.streams = config.hyper_num_streams
        self.favourite = s % self.streams
        self.eps = config.rms_norm_eps
        self.is_final = s == 2 * config.num_hidden_layers
        gates = self.streams if self.is_final else self.streams * (self.streams + 2)
        self.gate_proj = nn.Parameter(torch.empty(gates, self.streams * config.hidden_size))
        self.gate_bias = nn.Parameter(torch.empty(gates))
        self.gate_scale = nn.Parameter(torch.empty(1 if self.is_final else 3))

    def initial_gate_bias(self) -> Tensor:
        """[gates] of float32: logits of H^pre, of H^post (zero: 2 σ(0) = 1) and of H^res (3 on the diagonal)."""
        n, dtype = (
            self.streams,
            torch.float32,
        )  # whatever the default dtype: a bfloat16 model's is rounded once, at the end
        collapse = torch.full((n,), 1 / n if self.is_final else 1 / (2 * n), dtype=dtype)
        if not self.is_final:
            collapse[self.favourite] = (n + 1) / (2 * n)
        collapse = torch.logit(collapse - HYPER_EPS)
        if self.is_final:
            return collapse
        return torch.cat([collapse, torch.zeros(n, dtype=dtype), 3 * torch.eye(n, dtype=dtype).flatten()])

    def forward(self, streams: Tensor) -> HyperGates:
        """The gates for `streams` [B, T, n, D]."""
        n, dtype = self.streams, statistics_dtype(streams)
        flat = streams.flatten(-2).to(dtype)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.eps)
        projected = nn.functional.linear(flat, self.gate_proj.to(dtype))
        scale, bias = self.gate_scale.to(dtype), self.gate_bias.to(dtype)
        collapse = torch.sigmoid(projected[..., :n] * scale[0] + bias[:n]) + HYPER_EPS
        if self.is_final:
            return HyperGates(collapse)
        expand = 2 * torch.sigmoid(projected[..., n : 2 * n] * scale[1] + bias[n : 2 * n])
        mix = (projected[..., 2 * n :] * scale[2] + bias[2 * n :]).unflatten(-1, (n, n))
        mix = torch.softmax(mix, dim=-1) + HYPER_EPS
        mix = mix / (mix.sum(-2, keepdim=True) + HYPER_EPS)
        for _ in range(SINKHORN_ITERATIONS - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + HYPER_EPS)
            mix = mix / (mix.sum(-2, keepdim=True) + HYPER_EPS)
        return HyperGates(collapse, expand, mix)


class HyperConnectionResidual(Residual):
    """n streams X [B, T, n, D]:  x = H^pre X,  X ← (H^res)ᵀ X + H^post ⊗ u,  x_final = H^pre X of a last read.

    The carry is (h, X): the standard stream beside the streams, for `hidden_states`.
    """

    starts_exactly = False  # the eps of the published gates

    def create_read(self, s: int) -> HyperRead:
        return HyperRead(self.config, s)

    def carry_size(self, s: int) -> int:
        return 2

    def start(self, embedding: Tensor) -> ResidualState:
        streams = embedding.unsqueeze(-2).expand(*embedding.shape[:-1], self.config.hyper_num_streams, -1)
        return ResidualState((embedding, streams.contiguous()))

    def read(
        self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None, prepared: Any = None
    ) -> Reading:
        streams = state.carry[1]
        gates: HyperGates = module(streams)
        collapsed = (gates.collapse.unsqueeze(-1) * streams).sum(-2)
        return Reading(collapsed.to(streams.dtype), gates=gates)

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        streams, gates = state.carry[1], reading.gates
        mixed = gates.mix.to(streams.dtype).mT @ streams
        written = gates.expand.to(streams.dtype).unsqueeze(-1) * update.unsqueeze(-2)
        return ResidualState((state.stream + update, written + mixed))

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        return self.read(state, 2 * self.config.num_hidden_layers, module, record).x
