# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A residual alone, without a model: given branch outputs, and parameters that depend on their names only."""

import zlib
from typing import NamedTuple

import torch
from torch import nn

from depthroute.modeling.modeling_depthroute import build_residual
from depthroute.modeling.residual_base import RoutingRecord, RoutingWeights


class Walk(NamedTuple):
    """One pass through the depth: what every sublayer read, the state before it, and the final read."""

    readings: list
    states: list
    final: torch.Tensor
    record: dict[str, RoutingWeights]


def random_tensor(name: str, *shape: int) -> torch.Tensor:
    """Standard normal float64 numbers that follow from the name."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64)


def random_reads(config) -> list[nn.Module | None]:
    """Every read's module in float64; a parameter of one name has the same values under every configuration."""
    reads = [build_residual(config).create_read(s) for s in range(2 * config.num_hidden_layers + 1)]
    for s, read in enumerate(reads):
        if isinstance(read, nn.Module):
            read.double()
            for name, parameter in read.named_parameters():
                centre = 1.0 if name == "key_norm" else 0.0
                parameter.data = centre + random_tensor(f"{s} {name}", *parameter.shape)
    return reads


def walk(config, reads, tokens: int = 3) -> Walk:
    """Read and write through the whole depth in float64, on the same embedding and branch outputs every time."""
    residual, record = build_residual(config), RoutingRecord()
    state = residual.start(random_tensor("embedding", 2, tokens, config.hidden_size))
    readings, states = [], []
    for s in range(2 * config.num_hidden_layers):
        states.append(state)
        readings.append(residual.read(state, s, reads[s], record))
        update = random_tensor(f"update {s}", 2, tokens, config.hidden_size)
        state = residual.write(state, s, update, readings[-1])
    states.append(state)
    return Walk(readings, states, residual.finish(state, reads[-1], record), record.reads)
