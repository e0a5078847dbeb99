# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Rescue gain: how much of a model's output each of its streams carries by itself."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from ..modeling.depth_schedule import read_sources
from ..modeling.residual_base import Reading, Residual, ResidualState, RoutingRecord
from .observe import ResidualProxy, exchanged_residual, find_decoder, on_device, token_mask


@dataclass(frozen=True)
class RescueGain:
    """Per stream j, G_j = 1 − ‖y_j − y‖ / ‖y_∅ − y‖: 0 where the stream alone brings nothing back, 1 where it brings
    everything back. Below 0 it does harm.

    Attributes:
        hidden: G_j on the final hidden states (normed, what the head reads), with the Euclidean norm over all tokens.
        loss: G_j on the language-modelling loss, with |·|; None without a language-modelling head, or token ids.
        losses: the losses themselves, nats per token: `own` (y), `replaced` (y_∅) and `rescued` (y_j, a list); None
            as above.
    """

    hidden: list[float]
    loss: list[float] | None
    losses: dict[str, Any] | None


class _ReplacedStreams(ResidualProxy):
    """The batch is [own; other]. Reads of the first half see the other half's streams in place of those that are not kept;
    the second half is left alone. Writes go to the run's own state, so a stream that is kept is what this run makes of it.

    DAR: entries and partials are replaced. The standard stream h, which anchored reads start from, is
    ½ (Σ^0 + Σ^1) and a rest (zero while the write gates sum to 2): the other batch's, in which the half of a kept stream's
    sum of entries is its own again. A read without a choice (the first) reads e, of which both streams consist: it is
    replaced where no stream is kept.
    """

    def __init__(self, inner: Residual, kept: Collection[int]):
        super().__init__(inner)
        self.kept = kept

    def seen(self, state: ResidualState, s: int) -> ResidualState:
        """The state that read `s` is shown."""
        if self.config.residual_type == "hyper_connection":
            stream, streams = state.carry
            own, other = streams.chunk(2)
            shown = [own if j in self.kept else other for j in range(streams.shape[-2])]
            mixed = torch.stack([source[..., j, :] for j, source in enumerate(shown)], dim=-2)
            return ResidualState((stream, torch.cat([mixed, other])), state.history)
        if len(self.kept) == 2:
            return state
        if self.kept and len(read_sources(self.config, s)) < 2:
            return state
        first, *partials = state.carry
        history = [self._of(j % 2, tensor) for j, tensor in enumerate(state.history)]
        partials = [self._of(j, tensor) for j, tensor in enumerate(partials)]
        return ResidualState((self._base(first, state, s), *partials), tuple(history))

    def _of(self, stream: int, tensor: Tensor) -> Tensor:
        return tensor if stream in self.kept else torch.cat([tensor.chunk(2)[1]] * 2)

    def _base(self, base: Tensor, state: ResidualState, s: int) -> Tensor:
        other = base.chunk(2)[1]
        if not self.kept:
            return torch.cat([other, other])
        (kept,) = self.kept
        entries = self.inner.streams(state, s)[kept]  # type: ignore[attr-defined]
        own_sum, other_sum = sum(entry.float() for entry in entries).chunk(2)
        mixed = other.float() + (own_sum - other_sum) / 2
        return torch.cat([mixed.to(base.dtype), other])

    def read(
        self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None, prepared: Any = None
    ) -> Reading:
        return super().read(self.seen(state, s), s, module, record)

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        return super().finish(self.seen(state, self.final), module, record)


def stream_count(config: Any) -> int:
    """Streams of a residual: two of DAR, n of mHC, otherwise one."""
    return {"dual_stream": 2, "hyper_connection": config.hyper_num_streams}.get(config.residual_type, 1)


def final_hidden_states(model: Any, batch: dict[str, Any], other: dict[str, Any], kept: Collection[int]) -> Tensor:
    """The normed final hidden states [B, T, D] of `batch` where every read sees `other`'s streams but for the `kept` ones.

    Args:
        model: a DepthRoute model with several streams, in evaluation mode.
        batch, other: `input_ids` (or `inputs_embeds`), and `attention_mask` where there is padding; same shapes.
    """
    decoder = find_decoder(model)
    inputs = {}
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if batch.get(name) is not None:
            inputs[name] = torch.cat([batch[name], other[name]])
    inputs["attention_mask"] = torch.cat([token_mask(batch), token_mask(other)]).long()
    with exchanged_residual(decoder, lambda inner: _ReplacedStreams(inner, kept)):
        return decoder(**inputs, use_cache=False).last_hidden_state.chunk(2)[0]


def _loss_sum(head: nn.Module, hidden: Tensor, ids: Tensor, keep: Tensor) -> float:
    """Sum of next-token losses, one row of the batch at a time: logits are the largest tensor here."""
    total = 0.0
    for row_hidden, row_ids, row_keep in zip(hidden, ids, keep):
        labels = torch.where(row_keep[1:] & row_keep[:-1], row_ids[1:], -100)
        logits = head(row_hidden[:-1]).float()
        total += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    return total


@torch.no_grad()
def rescue_gain(model: Any, pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> RescueGain:
    """Rescue gain of each stream (DAR, arXiv 2607.18730): y is the clean output; y_∅ the output when every read sees both
    streams' histories of another batch; y_j when stream j has its own back. Positions that are padding in either batch
    are left out.

    Runs in evaluation mode and leaves the model in the mode it was in; 2 + n forward passes of doubled batches.

    Args:
        model: a `dar` or `mhc` model, with or without a head.
        pairs: batches, each with another one of the same shape: `input_ids` [B, T] (or `inputs_embeds`) and, where there is
            padding, `attention_mask` [B, T], 0 at padding.

    Returns:
        Gains of all pairs together; NaN where the other batches change nothing.

    Raises:
        ValueError: a model with one stream, no pairs, or a pair of different shapes.
    """
    count = stream_count(model.config)
    if count < 2:
        raise ValueError(f"residual_type: got {model.config.residual_type!r}, allowed: dual_stream, hyper_connection")
    head = model.get_output_embeddings()
    kept_sets: list[tuple[int, ...]] = [tuple(range(count)), (), *((j,) for j in range(count))]
    squares = [0.0] * len(kept_sets)
    losses = [0.0] * len(kept_sets)
    any_pair, has_loss, labels = False, head is not None, 0
    training = model.training
    model.eval()
    try:
        for batch, other in pairs:
            any_pair = True
            batch, other = on_device(batch, model.device), on_device(other, model.device)
            if token_mask(batch).shape != token_mask(other).shape:
                raise ValueError(
                    f"pairs: got {tuple(token_mask(batch).shape)} and {tuple(token_mask(other).shape)}, allowed: one shape"
                )
            keep = token_mask(batch) & token_mask(other)
            ids: Tensor | None = batch.get("input_ids")
            has_loss = has_loss and ids is not None
            labels += int((keep[:, 1:] & keep[:, :-1]).sum())
            own: Tensor | None = None
            for index, kept in enumerate(kept_sets):
                hidden = final_hidden_states(model, batch, other, kept)
                own = hidden if own is None else own
                squares[index] += (hidden.double() - own.double())[keep].square().sum().item()
                if head is not None and ids is not None:
                    losses[index] += _loss_sum(head, hidden, ids, keep)
    finally:
        model.train(training)
    if not any_pair:
        raise ValueError("pairs: got none, allowed: one or more")

    def gain(rescued: float, replaced: float) -> float:
        return 1 - rescued / replaced if replaced else nan

    hidden_gain = [gain(square**0.5, squares[1] ** 0.5) for square in squares[2:]]
    if not has_loss or not labels:
        return RescueGain(hidden_gain, None, None)
    clean, replaced, *rescued = (loss / labels for loss in losses)
    loss_gain = [gain(abs(loss - clean), abs(replaced - clean)) for loss in rescued]
    return RescueGain(hidden_gain, loss_gain, {"own": clean, "replaced": replaced, "rescued": rescued})
