# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Run a model over tokens and keep what every depth read attended to."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..modeling.residual_base import RoutingWeights
from .observe import Observer, observe


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RecordedRead(NamedTuple):
    """What one read attended to, over N tokens.

    Attributes:
        sources: S labels, as in `depth_schedule.source_labels`.
        routes: weights [S, N, H], float32 on the CPU, by route: `main`, and `value` where attention's values have a route of
            their own; of two streams `stream 0` and `stream 1`. H is 1 where there are no depth heads.
    """

    sources: list[str]
    routes: dict[str, Tensor]


def split_routes(read: RoutingWeights, streams: bool, heads: bool) -> dict[str, Tensor]:
    """An entry of `out.routing` as weights [S, B, T, H] by route, named as in `RecordedRead`.

    Args:
        streams: whether the weights have a leading axis of streams.
        heads: whether they have a trailing axis of heads.
    """
    weights = read.weights if heads else read.weights.unsqueeze(-1)
    if streams:
        return {f"stream {j}": stream for j, stream in enumerate(weights)}
    if read.value_weights is None:
        return {"main": weights}
    return {"main": weights, "value": read.value_weights if heads else read.value_weights.unsqueeze(-1)}


class RoutingRecorder(Observer):
    """Keeps the weights of every forward pass."""

    def __init__(self, config: Any):
        self.streams = config.residual_type == "dual_stream"
        self.heads = config.depth_num_heads > 1
        self.sources: dict[str, list[str]] = {}
        self.parts: dict[str, dict[str, list[Tensor]]] = {}

    def begin(self, keep: Tensor) -> None:
        self.keep = keep

    def end(self, routing: dict[str, RoutingWeights]) -> None:
        for name, read in routing.items():
            self.sources[name] = read.sources
            for route, weights in split_routes(read, self.streams, self.heads).items():
                tokens = weights[:, self.keep].float().cpu()
                self.parts.setdefault(name, {}).setdefault(route, []).append(tokens)

    def result(self) -> dict[str, RecordedRead]:
        return {
            name: RecordedRead(
                self.sources[name], {route: torch.cat(tokens, dim=1) for route, tokens in routes.items()}
            )
            for name, routes in self.parts.items()
        }


def record_routing(model: "PreTrainedModel", batches: Iterable[dict[str, Any]]) -> dict[str, RecordedRead]:
    """Every live read's weights over all tokens of the batches, padding left out.

    Runs in evaluation mode and leaves the model in the mode it was in. Takes 4·S·N·H bytes per route on the CPU.

    Args:
        model: any DepthRoute model, with or without a head.
        batches: as `observe.observe`.

    Returns:
        By module path (`model.layers.3.attn_read`), in order of depth; N tokens of all batches one after the other. Empty
        for a residual without depth reads.

    Raises:
        ValueError: no batches.
    """
    recorder = RoutingRecorder(model.config)
    observe(model, batches, [recorder])
    return recorder.result()


def _windows(token_ids: Sequence[int], max_length: int) -> list[list[int]]:
    return [list(token_ids[i : i + max_length]) for i in range(0, len(token_ids), max_length)]


def _padded(windows: Sequence[Sequence[int]], length: int) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, int64 [B, T]; windows longer than T lose their end."""
    ids = torch.zeros(len(windows), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, window in enumerate(windows):
        count = min(len(window), length)
        ids[row, :count] = torch.tensor(window[:count])
        mask[row, :count] = 1
    return {"input_ids": ids, "attention_mask": mask}


def token_batches(token_ids: Sequence[int], max_length: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """A running text as batches: windows of `max_length` tokens, `batch_size` of them at a time; the last window is padded
    and its padding masked.

    Yields:
        `input_ids` and `attention_mask`, int64 [B, T].
    """
    windows = _windows(token_ids, max_length)
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        yield _padded(batch, max(map(len, batch)))


def token_pairs(
    token_ids: Sequence[int], max_length: int, batch_size: int
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """`token_batches`, each with another one of the same shape: the window that follows, after the last one the first.
    Nothing where there is one window only."""
    windows = _windows(token_ids, max_length)
    if len(windows) < 2:
        return
    following = windows[1:] + windows[:1]
    for start in range(0, len(windows), batch_size):
        batch, other = (rows[start : start + batch_size] for rows in (windows, following))
        length = max(map(len, batch))
        yield _padded(batch, length), _padded(other, length)
