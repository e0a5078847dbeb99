# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Watching a model's depth without a copy of its loop: a residual that stands in front of the model's own.

The loop and its layers talk to their residual through one protocol. Here that residual is exchanged for the time of a
measurement, by one that sees every state, read and write on the way and passes them on unchanged (`observe`), or changes
what the reads see (`rescue`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..modeling.depth_schedule import read_count, read_sources
from ..modeling.residual_base import Reading, Residual, ResidualState, RoutingRecord, RoutingWeights


class ResidualProxy(Residual):
    """A residual that does what another one does."""

    def __init__(self, inner: Residual):
        super().__init__(inner.config)
        self.inner = inner
        self.final = 2 * inner.config.num_hidden_layers

    def create_read(self, s: int) -> nn.Module | nn.Parameter | None:
        return self.inner.create_read(s)

    def carry_size(self, s: int) -> int:
        return self.inner.carry_size(s)

    def start(self, embedding: Tensor) -> ResidualState:
        return self.inner.start(embedding)

    def read(
        self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None, prepared: Any = None
    ) -> Reading:
        return self.inner.read(state, s, module, record)

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        return self.inner.write(state, s, update, reading)

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        return self.inner.finish(state, module, record)

    def unpack(self, tensors: Sequence[Tensor], s: int) -> ResidualState:
        return self.inner.unpack(tensors, s)

    def pack(self, state: ResidualState) -> tuple[Tensor, ...]:
        return self.inner.pack(state)

    def changes(self, before: ResidualState, after: ResidualState) -> tuple[Tensor, ...]:
        return self.inner.changes(before, after)

    def advance(self, before: ResidualState, changes: Sequence[Tensor], s: int) -> ResidualState:
        return self.inner.advance(before, changes, s)


class Observer:
    """What is told of every forward pass. Each method does nothing unless overridden."""

    def begin(self, keep: Tensor) -> None:
        """A forward pass begins; `keep` [B, T] is True where there is a token and False at padding."""

    def read(self, residual: Residual, state: ResidualState, s: int, x: Tensor) -> None:
        """Sublayer `s` (2L: the final norm) reads x_s [B, T, D] out of `state`."""

    def write(self, s: int, update: Tensor) -> None:
        """Sublayer `s` writes u_s [B, T, D]."""

    def end(self, routing: dict[str, RoutingWeights]) -> None:
        """The forward pass is over; `routing` is the model's `out.routing`."""


class _ObservedResidual(ResidualProxy):
    def __init__(self, inner: Residual, observers: Sequence[Observer]):
        super().__init__(inner)
        self.observers = observers

    # nothing is changed on the way, so that reads can be prepared as they are without observers

    def group_size(self, state: ResidualState) -> int:
        return self.inner.group_size(state)

    def prepare(self, state: ResidualState, modules: dict[int, Any]) -> dict[int, Any]:
        return self.inner.prepare(state, modules)

    def read(
        self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None, prepared: Any = None
    ) -> Reading:
        reading = self.inner.read(state, s, module, record, prepared)
        for observer in self.observers:
            observer.read(self.inner, state, s, reading.x)
        return reading

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        for observer in self.observers:
            observer.write(s, update)
        return super().write(state, s, update, reading)

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        x = self.inner.finish(state, module, record, prepared)
        for observer in self.observers:
            observer.read(self.inner, state, self.final, x)
        return x


def find_decoder(model: nn.Module) -> Any:
    """The `DepthRouteModel` in a model, whatever is wrapped around it, or the model itself.

    Raises:
        ValueError: there is none.
    """
    for module in model.modules():
        if hasattr(module, "final_read"):
            return module
    raise ValueError(f"model: got {type(model).__name__}, allowed: a DepthRoute model")


@contextmanager
def exchanged_residual(decoder: Any, wrap: Callable[[Residual], Residual]) -> Iterator[None]:
    """Inside the block, the loop's residual and every layer's is `wrap` of its own."""
    owners = [decoder, *decoder.layers]
    own = [owner.residual for owner in owners]
    try:
        for owner, residual in zip(owners, own):
            owner.residual = wrap(residual)
        yield
    finally:
        for owner, residual in zip(owners, own):
            owner.residual = residual


def on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on `device`."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def token_mask(batch: dict[str, Any]) -> Tensor:
    """[B, T], True where there is a token and False at padding.

    Raises:
        ValueError: an attention mask that is not [B, T], which does not say what padding is.
    """
    tokens = batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"][..., 0]
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask: got {shape}, allowed: {tuple(tokens.shape)}, 0 at padding")
    return mask.bool()


@torch.no_grad()
def observe(model: Any, batches: Iterable[dict[str, Any]], observers: Sequence[Observer]) -> None:
    """Run a model over batches and tell the observers. In evaluation mode; the model is left in the mode it was in.

    Args:
        model: any DepthRoute model, with or without a head.
        batches: arguments of the forward, on any device: `input_ids` [B, T] (or `inputs_embeds`) and, where there is
            padding, `attention_mask` [B, T], 0 at padding.

    Raises:
        ValueError: no batches, or no DepthRoute model.
    """
    any_batch = False
    training = model.training
    model.eval()
    try:
        with exchanged_residual(find_decoder(model), lambda inner: _ObservedResidual(inner, observers)):
            for batch in batches:
                any_batch = True
                inputs = on_device(batch, model.device)
                keep = token_mask(inputs)
                for observer in observers:
                    observer.begin(keep)
                routing = model(**inputs, output_routing=True, use_cache=False).routing
                for observer in observers:
                    observer.end(routing)
    finally:
        model.train(training)
    if not any_batch:
        raise ValueError("batches: got none, allowed: one or more")


def offered_sources(residual: Any, state: ResidualState, s: int) -> dict[str, Sequence[Tensor]]:
    """The tensors that read `s` chooses from, in the order of `read_sources`: of a single stream under `main`, of two
    streams the entries of each under `stream 0` and `stream 1`. A learned null source is left out, which is no state of
    the model. Empty where there is nothing to choose."""
    config = residual.config
    if s >= read_count(config) or len(read_sources(config, s)) < 2:
        return {}
    if config.residual_type == "dual_stream":
        return {f"stream {j}": entries for j, entries in enumerate(residual.streams(state, s))}
    return {"main": residual.sources(state, s)}


def stream_states(residual: Any, state: ResidualState, s: int) -> list[Tensor]:
    """What each stream of a residual with several has that is new to read `s`, [B, T, D] each. DAR: the newest entry,
    which is the partial P^j inside a block (where it is a source) and at a block's start the entry just completed. mHC: the
    stream itself. Empty where there is one stream, or no new entry."""
    config = residual.config
    if config.residual_type == "hyper_connection":
        return list(state.carry[1].unbind(-2))
    if config.residual_type != "dual_stream":
        return []
    entries = residual.streams(state, s)
    completed = len(state.history) // 2
    at_block_start = s % residual.unit == 0
    return [stream[-1] for stream in entries] if at_block_start or len(entries[0]) > completed else []
