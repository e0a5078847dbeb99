# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What can be measured of the routing inside a training step: statistics of its weights, and norms by read."""

import re
from collections.abc import Mapping
from math import log
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..diagnostics.record import split_routes
from ..modeling.residual_base import RoutingRecord, RoutingWeights


COLLAPSED_WEIGHT = 0.99
"""A token's choice counts as collapsed where one source has at least this weight."""

_PLACE = re.compile(r"layers\.(\d+)\.(?:[\w.]+\.)?(attn|mlp)_(?:read|scale)\b")


def depth_label(name: str) -> str:
    """Where in depth a read, or a parameter of one, is: `03_attn`, `03_mlp`, or `final`. Sorts by depth up to 100 layers."""
    found = _PLACE.search(name)
    return f"{int(found[1]):02d}_{found[2]}" if found else "final"


class RouteStatistics(NamedTuple):
    """One route of one read over the tokens of a batch (means over tokens and heads).

    Attributes:
        max_weight: max_i p_i, from 1/S to 1.
        normalized_entropy: −Σ p_i ln p_i / ln S, 1 where uniform, 0 where one source takes all.
        collapsed: the fraction of choices in which one source has at least `COLLAPSED_WEIGHT`.
        top_source: label of the source with the largest mean weight.
    """

    max_weight: float
    normalized_entropy: float
    collapsed: float
    top_source: str


class StatisticsRecord(RoutingRecord):
    """Reduces the weights of each read where they arise, and keeps a few numbers of them on their device.

    Args:
        config: the model's.
        keep: [B, T], True where there is a token and False at padding; None: everywhere.
    """

    def __init__(self, config: Any, keep: Tensor | None = None):
        super().__init__()
        self.streams = config.residual_type == "dual_stream"
        self.heads = config.depth_num_heads > 1
        self.keep = keep
        self.is_open = True
        self.sums: dict[str, tuple[list[str], Tensor]] = {}

    @torch.no_grad()
    def note(self, name: str, weights: RoutingWeights) -> None:
        if not self.is_open:  # a checkpointed layer runs again in the backward pass
            return
        routes = split_routes(weights, self.streams, self.heads)
        for route, values in routes.items():
            label = depth_label(name)
            if route != "main" or len(routes) > 1:
                label = f"{label}/{route.replace(' ', '_')}"
            self.sums[label] = (weights.sources, self._reduce(values.float()))

    def _reduce(self, weights: Tensor) -> Tensor:
        """[3 + S] from weights [S, B, T, H]: means of the maximum, the normalised entropy, collapse, and each weight."""
        largest = weights.amax(0)
        entropy = torch.special.entr(weights).sum(0) / log(weights.shape[0])
        choices = torch.cat(
            [torch.stack((largest, entropy, (largest >= COLLAPSED_WEIGHT).to(largest.dtype))), weights]
        ).mean(-1)
        if self.keep is None:
            return choices.flatten(1).mean(1)
        keep = self.keep.to(choices.device, choices.dtype)
        return (choices * keep).sum((1, 2)) / keep.sum().clamp(min=1)

    def statistics(self) -> dict[str, RouteStatistics]:
        """By depth, `03_attn`; where a read has several routes, `03_attn/value` or `03_attn/stream_0`."""
        found = {}
        for label, (sources, sums) in self.sums.items():
            largest, entropy, collapsed, *means = sums.tolist()
            found[label] = RouteStatistics(largest, entropy, collapsed, sources[means.index(max(means))])
        return dict(sorted(found.items()))


@torch.no_grad()
def norms_by_depth(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> dict[str, float]:
    """L2 norm, over all tensors of a read, of the whole tensors where `model` is sharded (then every process has to call).

    Args:
        tensors: by parameter name; None counts as zero.
    """
    if not tensors:
        return {}
    device = next(model.parameters()).device
    norms = []
    for tensor in tensors.values():
        norm = torch.zeros(()) if tensor is None else torch.linalg.vector_norm(tensor, dtype=torch.float32)
        # CODEPATH: FSDP2 and tensor parallelism keep DTensors, which add up their own parts
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).to(device))
    squares = torch.stack(norms).double().square()
    # CODEPATH: the first FSDP keeps plain parts of parameters
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        dist.all_reduce(squares)
    totals: dict[str, float] = {}
    for name, square in zip(tensors, squares.tolist()):
        totals[depth_label(name)] = totals.get(depth_label(name), 0.0) + square
    return {label: total**0.5 for label, total in sorted(totals.items())}
