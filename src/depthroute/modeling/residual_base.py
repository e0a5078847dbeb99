# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The residual protocol: how branches read from, and write to, the memory that runs through the depth of the model.

Dimension letters, used everywhere in this package:
    B batch   T tokens   D width   L layers   S sources of a read   H depth heads (H divides D)
    s sublayer, 0 … 2L-1 (even: attention, odd: MLP); 2L stands for the final read

              e [B, T, D]                                    token embedding
                  │ start
                  ▼
    ┌──────── state ◄───────────────────────────┐            carry[0] is always the standard stream h_s
    │             │ read(state, s)              │
    │             ▼                             │
    │        x_s [B, T, D]                      │            standard: h_s;  depth attention: a mix of S sources
    │             │ Norm_s, branch f_s          │            Qwen3's own RMSNorm, attention, MLP: unchanged
    │             ▼                             │
    │        u_s [B, T, D] ──── write(state, s, u_s) ── s + 1
    │
    └── after the last sublayer: finish(state) → x_final [B, T, D] → final norm → head
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn


class ResidualState(NamedTuple):
    """What a residual remembers between two sublayers.

    Attributes:
        carry: tensors [B, T, D] that each write replaces; the first is the standard stream h_s.
        history: tensors [B, T, D] that are only ever appended to.
    """

    carry: tuple[Tensor, ...]
    history: tuple[Tensor, ...] = ()

    @property
    def stream(self) -> Tensor:
        """The standard stream h_s [B, T, D], with stock Qwen3's order of additions."""
        return self.carry[0]


class RoutingWeights(NamedTuple):
    """What one depth read attended to.

    Attributes:
        sources: S labels, as in `depth_schedule.source_labels`.
        weights: the softmax p [S, B, T], or [S, B, T, H] for H > 1 heads; float32, detached, also where the read is
            anchored (which mixes with p − p⁰). Two streams: [2, S, B, T(, H)].
        value_weights: the same of attention's value route, where it has one.
    """

    sources: list[str]
    weights: Tensor
    value_weights: Tensor | None = None


class RoutingRecord:
    """Where the reads of one forward note their weights, by module path.

    An object of its own and no dict: what moves a layer's arguments between devices rebuilds dicts, and what was noted in
    the copy would be lost.
    """

    def __init__(self) -> None:
        self.reads: dict[str, RoutingWeights] = {}

    def note(self, name: str, weights: RoutingWeights) -> None:
        self.reads[name] = weights


class Reading(NamedTuple):
    """What a read gives to its branch, and to the write behind it.

    Attributes:
        x: x_s [B, T, D]; with a value route x^QK, which attention's queries and keys are made of.
        value: x^V [B, T, D], which attention's values are made of, where they have a route of their own.
        gates: what the write needs, where writes are gated; its shape is the residual's own affair.
    """

    x: Tensor
    value: Tensor | None = None
    gates: Any = None


class Residual(ABC):
    """One way of connecting branches through depth. Holds the schedule only: parameters live in the read modules, which
    the layers own, and tensors live in the state, which the model's loop owns.

    Attributes:
        routing_learning_rate_factor: default learning rate of the routing parameters, as a multiple of the base rate.
        starts_exactly: whether an anchored model on a stock model's weights computes what that computes, bit for bit.
        parameter_name: layers hold what `create_read` makes as `attn_` and `mlp_` with this name behind.
    """

    routing_learning_rate_factor: float = 1.0
    starts_exactly: bool = True
    parameter_name: str = "read"

    def __init__(self, config: Any):
        self.config = config

    @abstractmethod
    def create_read(self, s: int) -> nn.Module | nn.Parameter | None:
        """The parameters around sublayer `s` (2L: the final read), as a module; None where there is nothing to learn."""

    @abstractmethod
    def carry_size(self, s: int) -> int:
        """How many tensors the carry holds before sublayer `s`."""

    @abstractmethod
    def start(self, embedding: Tensor) -> ResidualState:
        """State before sublayer 0, from e [B, T, D]."""

    def group_size(self, state: ResidualState) -> int:
        """How many layers' reads are to be prepared at once from here on; 0 where that does not pay."""
        return 0

    def prepare(self, state: ResidualState, modules: dict[int, Any]) -> dict[int, Any]:
        """What can be computed at once for the reads `modules`, before the first of them: by s, for `read`. A read that is
        left out does all its work itself."""
        return {}

    @abstractmethod
    def read(
        self, state: ResidualState, s: int, module: Any, record: RoutingRecord | None, prepared: Any = None
    ) -> Reading:
        """What branch `s` reads. A routed read notes its weights in `record`, where one is given. `prepared` is this read's
        entry of `prepare`, where that was called."""

    @abstractmethod
    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        """State after branch `s`, which was given `reading`, wrote u_s [B, T, D]."""

    @abstractmethod
    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        """x_final [B, T, D], what the final norm reads. `prepared` is the final read's entry of `prepare`, where there is one."""

    # Layers take and return flat tensors: nested ones lose their gradients under reentrant checkpointing.

    def unpack(self, tensors: Sequence[Tensor], s: int) -> ResidualState:
        """The state before sublayer `s` out of a layer's positional arguments (carry, then history)."""
        size = self.carry_size(s)
        return ResidualState(tuple(tensors[:size]), tuple(tensors[size:]))

    def pack(self, state: ResidualState) -> tuple[Tensor, ...]:
        """The inverse of `unpack`."""
        return (*state.carry, *state.history)

    def changes(self, before: ResidualState, after: ResidualState) -> tuple[Tensor, ...]:
        """What a layer returns: the new carry, and only those history entries that it added."""
        return (*after.carry, *after.history[len(before.history) :])

    def history_size(self, s: int) -> int:
        """How many tensors the history holds before sublayer `s`."""
        return 0

    def advance(self, before: ResidualState, changes: Sequence[Tensor], s: int) -> ResidualState:
        """The state before sublayer `s` out of the previous state and a layer's `changes`.

        Raises:
            ValueError: another number of tensors than the layer has to return, as after a hook that returns the stream alone.
        """
        size = self.carry_size(s)
        expected = size + self.history_size(s) - len(before.history)
        if len(changes) != expected:
            raise ValueError(
                f"layer {s // 2 - 1}: returned {len(changes)} tensors, allowed: {expected}, the stream first and then what "
                "later reads need (a forward hook has to keep them)"
            )
        return ResidualState(tuple(changes[:size]), (*before.history, *changes[size:]))
