# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the states themselves look like over depth: how alike a read's sources are, how alike two streams, how long the
vectors."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..modeling.depth_schedule import source_labels
from ..modeling.residual_base import Residual, ResidualState, RoutingWeights
from .metrics import HsicSum
from .observe import Observer, observe, offered_sources, stream_states


@dataclass(frozen=True)
class SourceSimilarity:
    """How alike the S sources of one read are. The Delta paper's cause of routing collapse: states share their prefix, and a
    softmax over sources that are alike is uniform.

    Attributes:
        sources: S labels.
        cosine: [S, S], mean over tokens of the cosine of sources i and j; ones on the diagonal.
        mean: of the pairs i < j.
        adjacent: of the pairs (i, i + 1).
    """

    sources: list[str]
    cosine: list[list[float]]
    mean: float
    adjacent: float


class SimilarityObserver(Observer):
    """Sums cosines over tokens. A pair of completed sources is the same in every later read and is computed once."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: dict[str, dict[int, Tensor]] = {}
        self.config: Any = None

    def begin(self, keep: Tensor) -> None:
        self.keep = keep
        self.tokens += int(keep.sum())
        self.known: dict[tuple[int, int], float] = {}
        self.held: dict[int, Tensor] = {}

    def read(self, residual: Residual, state: ResidualState, s: int, x: Tensor) -> None:
        self.config = residual.config
        self.held.update((id(tensor), tensor) for tensor in state.history)  # held, an id stays one tensor's
        for stream, tensors in offered_sources(residual, state, s).items():
            total = torch.zeros(len(tensors), len(tensors), dtype=torch.float64)
            for i, first in enumerate(tensors):
                for j, second in enumerate(tensors[: i + 1]):
                    pair = (id(first), id(second))
                    value = self.known[pair] if pair in self.known else self._sum(first, second)
                    if self.held.keys() >= set(pair):
                        self.known[pair] = value
                    total[i, j] = total[j, i] = value
            sums = self.sums.setdefault(stream, {})
            sums[s] = sums[s] + total if s in sums else total

    def end(self, routing: dict[str, RoutingWeights]) -> None:
        self.names = list(routing)  # of the same reads, in the same order
        self.known, self.held = {}, {}

    def _sum(self, first: Tensor, second: Tensor) -> float:
        cosine = torch.cosine_similarity(first.float(), second.float(), dim=-1)
        return cosine[self.keep].double().sum().item()

    def result(self) -> dict[str, dict[str, SourceSimilarity]]:
        return {
            stream: {
                name: _similarity(source_labels(self.config, s), total / self.tokens)
                for name, (s, total) in zip(self.names, sums.items())
            }
            for stream, sums in self.sums.items()
        }


def _similarity(labels: list[str], cosine: Tensor) -> SourceSimilarity:
    count = len(labels)
    above = cosine[torch.ones(count, count).triu(1).bool()]
    return SourceSimilarity(labels, cosine.tolist(), above.mean().item(), cosine.diagonal(1).mean().item())


def source_similarity(model: Any, batches: Iterable[dict[str, Any]]) -> dict[str, dict[str, SourceSimilarity]]:
    """Pairwise cosine similarity of every live read's sources, padding left out.

    Args:
        model, batches: as `observe.observe`.

    Returns:
        By stream (`main`; of two streams `stream 0` and `stream 1`, each with its own entries, whichever of keys and values
        they serve as), then by module path (`model.layers.3.attn_read`). A learned null source is left out. Empty where
        there are no depth reads.
    """
    observer = SimilarityObserver()
    observe(model, batches, [observer])
    return observer.result()


@dataclass(frozen=True)
class StreamCKA:
    """Linear CKA between the streams of one model for all pairs of depths.

    The state of DAR's stream j at depth s is what read s newly sees of it: its partial P^j_s inside a block (where the partial
    is a source), at a block's start the entry of H^j just completed, at s = 0 the embedding, which both streams share. Of mHC
    it is the stream X_j before sublayer s. Depth 2L is what the final read sees.

    Attributes:
        sublayers: the depths, P of them, as sublayers s.
        pairs: per pair of streams i < j: `streams` [i, j]; `cka` [P, P], row: depth of stream i, column: depth of stream j;
            `same_depth`, the mean of the diagonal, and `other_depths`, of all else, both without s = 0.
    """

    sublayers: list[int]
    pairs: list[dict[str, Any]]


class CKAObserver(Observer):
    """Keeps the streams' states of one forward pass: 4·P·n·N·D bytes for n streams of N tokens."""

    def __init__(self) -> None:
        self.hsic = HsicSum()
        self.sublayers: list[int] = []

    def begin(self, keep: Tensor) -> None:
        self.keep = keep
        self.states: dict[int, list[Tensor]] = {}

    def read(self, residual: Residual, state: ResidualState, s: int, x: Tensor) -> None:
        states = [stream[self.keep].float() for stream in stream_states(residual, state, s)]
        if states:
            self.states[s] = states

    def end(self, routing: dict[str, RoutingWeights]) -> None:
        self.sublayers = list(self.states)
        by_stream = [tensor for stream in zip(*self.states.values()) for tensor in stream]
        self.states = {}
        if by_stream:
            self.hsic.add(by_stream)

    def result(self) -> StreamCKA | None:
        similarity = self.hsic.cka()
        if similarity is None:
            return None
        count = len(self.sublayers)
        later = [index for index, s in enumerate(self.sublayers) if s]  # at s = 0 all streams are the embedding
        pairs = []
        for i, j in combinations(range(similarity.shape[0] // count), 2):
            block = similarity[i * count : (i + 1) * count, j * count : (j + 1) * count]
            inner = block[later][:, later]
            off = inner[~torch.eye(len(later), dtype=torch.bool)]
            pairs.append(
                {
                    "streams": [i, j],
                    "cka": block.tolist(),
                    "same_depth": inner.diagonal().nanmean().item(),
                    "other_depths": off.nanmean().item(),
                }
            )
        return StreamCKA(self.sublayers, pairs)


def stream_cka(model: Any, batches: Iterable[dict[str, Any]]) -> StreamCKA | None:
    """Linear CKA (`metrics.linear_cka`) between the streams of a `dar` or `mhc` model over depth, padding left out.

    Args:
        model, batches: as `observe.observe`. A batch with fewer than four tokens is left out.

    Returns:
        None where the model has one stream, or no batch has four tokens.
    """
    observer = CKAObserver()
    observe(model, batches, [observer])
    return observer.result()


@dataclass(frozen=True)
class NormGrowth:
    """L2 norms over depth: means over tokens, and of the stream the median too, which a few tokens with massive
    activations do not move.

    Attributes:
        stream: ‖h_s‖ of the standard stream before sublayer s = 0 … 2L; 2L + 1 numbers.
        stream_median: its median over tokens.
        read: ‖x_s‖ of what sublayer s reads, last of all what the final norm reads; 2L + 1 numbers.
        update: ‖u_s‖ of what sublayer s writes; 2L numbers.
        streams: of mHC, ‖X_j‖ per stream before each sublayer; n lists of 2L + 1 numbers. Otherwise empty.
        growth: stream at 2L over stream at 0.
    """

    stream: list[float]
    stream_median: list[float]
    read: list[float]
    update: list[float]
    streams: list[list[float]]
    growth: float


class NormObserver(Observer):
    def __init__(self) -> None:
        self.norms: dict[tuple[str, int], list[Tensor]] = {}

    def begin(self, keep: Tensor) -> None:
        self.keep = keep

    def _note(self, kind: str, s: int, tensor: Tensor) -> None:
        norm = torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32)[self.keep]
        self.norms.setdefault((kind, s), []).append(norm.cpu())

    def read(self, residual: Residual, state: ResidualState, s: int, x: Tensor) -> None:
        self._note("stream", s, state.stream)
        self._note("read", s, x)
        if residual.config.residual_type == "hyper_connection":
            for index, stream in enumerate(stream_states(residual, state, s)):
                self._note(f"stream {index:04d}", s, stream)

    def write(self, s: int, update: Tensor) -> None:
        self._note("update", s, update)

    def result(self) -> NormGrowth:
        tokens: dict[str, list[Tensor]] = {}
        for (kind, _), parts in sorted(self.norms.items()):
            tokens.setdefault(kind, []).append(torch.cat(parts).double())
        mean = {kind: [norm.mean().item() for norm in norms] for kind, norms in tokens.items()}
        return NormGrowth(
            stream=mean["stream"],
            stream_median=[norm.median().item() for norm in tokens["stream"]],
            read=mean["read"],
            update=mean["update"],
            streams=[mean[kind] for kind in mean if kind.startswith("stream ")],
            growth=mean["stream"][-1] / mean["stream"][0],
        )


def norm_growth(model: Any, batches: Iterable[dict[str, Any]]) -> NormGrowth:
    """Norms of the hidden states over depth, padding left out. Every residual has them.

    Args:
        model, batches: as `observe.observe`.
    """
    observer = NormObserver()
    observe(model, batches, [observer])
    return observer.result()
