# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a read's weights say about it, as numbers."""

from dataclasses import dataclass
from math import log

import torch

from ..modeling.residual_base import RoutingWeights


@dataclass(frozen=True)
class ReadStatistics:
    """One read over N tokens; with several heads, the mean over heads.

    Attributes:
        sources: S labels.
        max_weight: mean over tokens of max_i p_i: 1/S where routing is uniform, 1 where one source takes all.
        entropy: mean over tokens of −Σ p_i ln p_i, in nats: ln S where uniform, 0 where one source takes all.
        entropy_normalized: entropy / ln S, 0 to 1.
        mean_weights: mean over tokens of each p_i; S numbers that sum to 1.
    """

    sources: list[str]
    max_weight: float
    entropy: float
    entropy_normalized: float
    mean_weights: list[float]


def read_statistics(routing: RoutingWeights) -> ReadStatistics:
    """Statistics of one read.

    Args:
        routing: weights [S, N] or [S, N, H] as `record_routing` returns them (or [S, B, T], [S, B, T, H] as the model
            does, where no position is padding), S ≥ 2.

    Raises:
        ValueError: no tokens, or fewer than two sources.
    """
    weights = routing.weights.double()
    count = weights.shape[0]
    if count < 2 or weights.numel() == 0:
        raise ValueError(f"weights: got shape {tuple(weights.shape)}, allowed: two sources or more, one token or more")
    entropy = torch.special.entr(weights).sum(0).mean().item()
    return ReadStatistics(
        sources=list(routing.sources),
        max_weight=weights.amax(0).mean().item(),
        entropy=entropy,
        entropy_normalized=entropy / log(count),
        mean_weights=weights.flatten(1).mean(1).tolist(),
    )
