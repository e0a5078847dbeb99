# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The standard residual, h_{s+1} = h_s + u_s: one implementation of the protocol, bit for bit stock Qwen3."""

from torch import Tensor, nn

from .residual_base import Residual, ResidualState, RoutingRecord


class StandardResidual(Residual):
    """Every branch reads the stream and adds to it (He et al. 2015, arXiv 1512.03385). No parameters, no routing."""

    def create_read(self, s: int) -> nn.Module | None:
        return None

    def carry_size(self, s: int) -> int:
        return 1

    def start(self, embedding: Tensor) -> ResidualState:
        return ResidualState((embedding,))

    def read(self, state: ResidualState, s: int, module: nn.Module | None, record: RoutingRecord | None) -> Tensor:
        return state.stream

    def write(self, state: ResidualState, s: int, update: Tensor) -> ResidualState:
        return ResidualState((state.stream + update,))

    def finish(self, state: ResidualState, module: nn.Module | None, record: RoutingRecord | None) -> Tensor:
        return state.stream
