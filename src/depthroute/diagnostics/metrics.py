# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The numbers, on plain tensors: statistics of routing weights, and similarity of representations."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log, nan
from typing import Any

import torch
from torch import Tensor

from ..modeling.depth_schedule import unit_sublayers


@dataclass(frozen=True)
class ReadStatistics:
    """One route of one read over N tokens; with several heads, the mean over heads.

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


def read_statistics(sources: Sequence[str], weights: Tensor) -> ReadStatistics:
    """Statistics of one route.

    Args:
        sources: S labels, S ≥ 2.
        weights: [S, N] or [S, N, H] (any number of axes behind S), without padding.

    Raises:
        ValueError: no tokens, fewer than two sources, or labels that do not fit.
    """
    count = weights.shape[0]
    if count < 2 or weights.numel() == 0 or count != len(sources):
        raise ValueError(
            f"weights: got shape {tuple(weights.shape)} for {len(sources)} labels, allowed: two sources or more, one "
            "token or more"
        )
    weights = weights.double()
    entropy = torch.special.entr(weights).sum(0).mean().item()
    return ReadStatistics(
        sources=list(sources),
        max_weight=weights.amax(0).mean().item(),
        entropy=entropy,
        entropy_normalized=entropy / log(count),
        mean_weights=weights.flatten(1).mean(1).tolist(),
    )


def jensen_shannon(first: Tensor, second: Tensor) -> Tensor:
    """Jensen–Shannon divergence over the first axis, H((p+q)/2) − (H(p)+H(q))/2 in nats: 0 where equal, ln 2 where
    disjoint.

    Args:
        first, second: [S, ...], summing to 1 over S.

    Returns:
        [...], float64.
    """
    first, second = first.double(), second.double()

    def entropy(weights: Tensor) -> Tensor:
        return torch.special.entr(weights).sum(0)

    divergence = entropy((first + second) / 2) - (entropy(first) + entropy(second)) / 2
    return divergence.clamp(min=0)  # rounding may leave −1e-17


@dataclass(frozen=True)
class SourceUsage:
    """Where the routing mass of one route goes, over R reads.

    Attributes:
        by_source: per source, in order of depth: `source`; `share`, its part of all mass, Σ p / R (the shares sum to 1);
            `mean`, its mean weight in the reads that have it; `uniform`, what that would be under uniform routing; `reads`,
            how many have it.
        by_distance: per distance between the read and the place where the source was complete, nearest first: `sublayers`
            (0: the running block or the newest state); `share`; `uniform`. A null source is nowhere, so the shares sum to
            1 without it.
    """

    by_source: list[dict[str, Any]]
    by_distance: list[dict[str, Any]]


def read_sublayer(name: str, layers: int) -> int:
    """Sublayer of a read's module path, 2L of the final read."""
    found = re.search(r"layers\.(\d+)\.(attn|mlp)_read$", name)
    return 2 * int(found[1]) + (found[2] == "mlp") if found else 2 * layers


def source_sublayer(label: str, s: int, unit: int) -> int | None:
    """The sublayer before which a source was complete: 0 for the embedding, `s` for what is still running at read `s`;
    None for the null source, which is nowhere."""
    kind, *rest = label.split()
    if kind == "embedding":
        return 0
    if kind == "partial":
        return s
    if kind == "null":
        return None
    index = int(rest[0])
    return {"layer": 2 * index + (2 if label.endswith("mlp") else 1), "block": (index + 1) * unit, "state": index}[kind]


def source_order(label: str) -> tuple[int, int, str]:
    """Sorts source labels by depth: `embedding` first, `partial` last, details behind their block."""
    kind, *rest = label.split()
    if kind == "embedding":
        return (0, 0, "")
    if kind in ("partial", "null"):
        return (2 if kind == "partial" else 3, 0, " ".join(rest))
    return (1, 2 * int(rest[0]) + (rest[-1] == "mlp"), " ".join(rest[1:]))


def source_usage(reads: Mapping[str, ReadStatistics], config: Any) -> SourceUsage:
    """Usage by source and by distance of one route's reads, given by module path."""
    unit, layers = unit_sublayers(config), config.num_hidden_layers
    weights: dict[str, list[tuple[float, float]]] = {}
    distances: dict[int, list[tuple[float, float]]] = {}
    for name, read in reads.items():
        s = read_sublayer(name, layers)
        for label, weight in zip(read.sources, read.mean_weights):
            pair = (weight, 1 / len(read.sources))
            weights.setdefault(label, []).append(pair)
            depth = source_sublayer(label, s, unit)
            if depth is not None:
                distances.setdefault(s - depth, []).append(pair)
    by_source = []
    for label in sorted(weights, key=source_order):
        total, uniform = (sum(column) for column in zip(*weights[label]))
        count = len(weights[label])
        by_source.append(
            {
                "source": label,
                "share": total / len(reads),
                "mean": total / count,
                "uniform": uniform / count,
                "reads": count,
            }
        )
    by_distance = []
    for distance in sorted(distances):
        share, uniform = (sum(column) / len(reads) for column in zip(*distances[distance]))
        by_distance.append({"sublayers": distance, "share": share, "uniform": uniform})
    return SourceUsage(by_source, by_distance)


_CKA_TOKENS = 256


class HsicSum:
    """Accumulates, over minibatches of tokens, the unbiased Hilbert–Schmidt independence criterion of every pair of
    representations (linear kernel): the estimator of Song et al. 2012, averaged over minibatches as Nguyen et al. 2021 do
    (arXiv 2010.15327). The usual, biased estimator does not go to zero for independent representations unless tokens are
    many more than the width."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, representations: Sequence[Tensor]) -> None:
        """Representations [N, D] (D may differ) of the same N tokens, cut into equal minibatches of at most 256. Fewer than
        four tokens have no unbiased estimate and are left out."""
        tokens = representations[0].shape[0]
        if tokens < 4:
            return
        for part in torch.arange(tokens).tensor_split(-(-tokens // _CKA_TOKENS)):
            count = len(part)
            centred = []
            for representation in representations:
                features = representation[part.to(representation.device)].cpu().double()
                features = features - features.mean(0)
                gram = (features @ features.T).fill_diagonal_(0)
                rows = gram.sum(0)
                gram -= (rows[:, None] + rows[None, :] - rows.sum() / (count - 1)) / (count - 2)
                centred.append(gram.fill_diagonal_(0).flatten())
            stacked = torch.stack(centred)
            hsic = stacked @ stacked.T / (count * (count - 3))
            self.total = hsic * count if self.total is None else self.total + hsic * count

    def cka(self) -> Tensor | None:
        """HSIC(i, j) / sqrt(HSIC(i, i) · HSIC(j, j)), float64 [P, P]; NaN where a representation does not vary; None where
        there were too few tokens."""
        if self.total is None:
            return None
        own = self.total.diagonal()
        own = torch.where(own > 0, own, torch.full_like(own, nan))
        return self.total / torch.sqrt(own[:, None] * own[None, :])


def linear_cka(first: Tensor, second: Tensor) -> float:
    """Linear centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414) of two representations of the same tokens,
    by the unbiased estimator of `HsicSum`: 1 where they are equal up to rotation and scale, about 0 (on either side) where
    they are independent.

    Args:
        first, second: [N, D] and [N, D'], N ≥ 4, without padding.

    Raises:
        ValueError: different numbers of tokens, or fewer than four.
    """
    if first.shape[0] != second.shape[0] or first.shape[0] < 4:
        raise ValueError(f"tokens: got {first.shape[0]} and {second.shape[0]}, allowed: the same number, at least 4")
    hsic = HsicSum()
    hsic.add([first, second])
    similarity = hsic.cka()
    assert similarity is not None
    return similarity[0, 1].item()
