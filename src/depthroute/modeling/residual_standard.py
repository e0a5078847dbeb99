# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The standard residual, h_{s+1} = h_s + u_s: one implementation of the protocol, bit for bit stock Qwen3."""

from typing import Any

from torch import Tensor

from .residual_base import Reading, Residual, ResidualState, RoutingRecord


class StandardResidual(Residual):
    """Every branch reads the stream and adds to it (He et al. 2015, arXiv 1512.03385). No parameters, no routing."""

    def create_read(self, s: int) -> None:
        return None

    def carry_size(self, s: int) -> int:
        return 1

    def start(self, embedding: Tensor) -> ResidualState:
        return ResidualState((embedding,))

    def read(
        self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None, prepared: Any = None
    ) -> Reading:
        return Reading(state.stream)

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        return ResidualState((state.stream + update,))

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        return state.stream
