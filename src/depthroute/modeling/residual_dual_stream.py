# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Dual attention residuals (DAR, arXiv 2607.18730): two streams, each of which helps the other to choose its depths.

The papers' summaries state neither the inputs of the gates nor their initial values: those here are this project's choice.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .depth_backend import MergeInput, PhaseInput, choose_backend
from .depth_ops import depth_mix, statistics_dtype
from .depth_schedule import history_sources, read_name, read_sources, source_labels, unit_sublayers
from .residual_base import Reading, Residual, ResidualState, RoutingRecord, RoutingWeights


ROUTES = {
    "cross_key": ((1, 0), (0, 1)),
    "self": ((0, 0), (1, 1)),
    "cross_value": ((0, 1), (1, 0)),
    "fixed": ((0, 1), (0, 1)),
}
"""`dual_routing` → for target stream 0 and 1, which stream's entries are (keys, values)."""

GATES = ("alpha", "rho", "beta_0", "beta_1")


class DualReadParameters(NamedTuple):
    """What a `DualRead` hands to the arithmetic, in float32 (float64 for a float64 stream).

    Attributes:
        query: γ^j ⊙ q^j [2, D], or None where the read has no choice.
        gate_logits: a, r, c_0, c_1 [4]; of the final read a [1].
        gate_proj: [4, 2D], or [1, 2D]; None where gates are static.
    """

    query: Tensor | None
    gate_logits: Tensor
    gate_proj: Tensor | None


class PreparedDualRead(NamedTuple):
    """What a phase has computed for one read; lists and the first dimension are by stream.

    Attributes:
        backend: what has computed it.
        parameters: the read's.
        queries: scaled [2, D].
        results: the mix m^j, or the phase's part of it where the read has private entries.
        logits: of the entries that the phase has seen.
        gap: where anchored, Σ^0 − Σ^1 of those entries [B, T, D].
        size: how many of them.
    """

    backend: Any
    parameters: DualReadParameters
    queries: Tensor
    results: list[Any]
    logits: list[Tensor]
    gap: Tensor | None
    size: int


class StaticWrite(NamedTuple):
    """The gates ρ, β^0 / 2 and β^1 / 2 of one write, where no token has its own: numbers, float32 (float64)."""

    rho: Tensor
    half_0: Tensor
    half_1: Tensor

    def write(self, update: Tensor, partial: Sequence[Tensor]) -> Sequence[Tensor]:
        """P^0, P^1 [B, T, D] after the write of u; before it there are none at a block's start."""
        rho, half_0, half_1 = self
        wide = update.to(rho.dtype)
        if partial:
            first, second = (tensor.to(rho.dtype) for tensor in partial)
            one = torch.lerp(second, first, rho).addcmul_(half_0, wide, value=2)
            other = torch.lerp(first, second, rho).addcmul_(half_1, wide, value=2)
        else:
            one, other = wide * (2 * half_0), wide * (2 * half_1)
        return one.to(update.dtype), other.to(update.dtype)


class InferenceDualRead(NamedTuple):
    """One read without gradients, whose entries are looked at as they come.

    Attributes:
        shared: the backend's `InferenceReads`, by all reads that were prepared together; its groups are the two streams.
        parameters: the read's.
        place: its query among theirs.
        alpha: α, a number, and
        write: the gates of the write behind it; None where gates are dynamic, and the second after the final read.
    """

    shared: Any
    parameters: DualReadParameters
    place: int
    alpha: Tensor | None
    write: StaticWrite | None


class DualRead(nn.Module):
    """The parameters of one DAR read and of the write behind it: `query` [2, D] (zero at the start), `key_norm` γ [2, D]
    (one), `gate_logits` [4]: a = 0, r = `dual_transport_init`, c_j from `dual_write_asymmetry` (the final read, which no
    write follows: [1], a), `gate_proj` [4, 2D] (zero) where gates are dynamic. The first sublayer has no choice and keeps
    the gates of its write only.

    A module that is called, like `DepthRead`. Initial values are set in `DepthRoutePreTrainedModel._init_weights`.
    """

    def __init__(self, config: Any, s: int):
        super().__init__()
        width = config.hidden_size
        has_choice = len(read_sources(config, s)) > 1
        gates = 1 if s == 2 * config.num_hidden_layers else len(GATES)
        self.is_attention = s % 2 == 0
        self.transport_init = config.dual_transport_init
        self.write_asymmetry = config.dual_write_asymmetry
        self.query = nn.Parameter(torch.empty(2, width)) if has_choice else None
        learned = has_choice and config.depth_key_norm == "learned"
        self.key_norm = nn.Parameter(torch.empty(2, width)) if learned else None
        self.gate_logits = nn.Parameter(torch.empty(gates))
        dynamic = has_choice and config.dual_gates == "dynamic"
        self.gate_proj = nn.Parameter(torch.empty(gates, 2 * width)) if dynamic else None

    def initial_gate_logits(self) -> list[float]:
        """a, r, c_0, c_1 at the start: β^0, β^1 = 1 ± asymmetry for attention, and the other way round for the MLP."""
        beta = 1 + self.write_asymmetry if self.is_attention else 1 - self.write_asymmetry
        c_0 = float(torch.logit(torch.tensor(beta / 2, dtype=torch.float64)))
        return [0.0, self.transport_init, c_0, -c_0][: self.gate_logits.shape[0]]

    def forward(self, stream: Tensor) -> DualReadParameters:
        """The folded parameters; `stream` [B, T, D] gives the dtype and is used for nothing else."""
        dtype = statistics_dtype(stream)
        query = None
        if self.query is not None:
            query = self.query.to(dtype) if self.key_norm is None else self.query.to(dtype) * self.key_norm.to(dtype)
        gate_proj = None if self.gate_proj is None else self.gate_proj.to(dtype)
        return DualReadParameters(query, self.gate_logits.to(dtype), gate_proj)

    def extra_repr(self) -> str:
        return f"query={'none' if self.query is None else tuple(self.query.shape)}, gates={self.gate_logits.shape[0]}"


class DualStreamResidual(Residual):
    """Two streams j ∈ {0, 1} with histories H^j and partial states P^j.

        keys, values of stream j    cross_key (DAR) H^{1−j}, H^j    self H^j, H^j    cross_value H^j, H^{1−j}    fixed H^0, H^1
        x^j      depth read over the entries of the values (completed blocks, and P once the block has begun)
        x        α x^0 + (1 − α) x^1                                            plain
                 h + (α − ½)(Σ^0 − Σ^1) + n (α m^0 + (1 − α) m^1)               anchored: Σ^j the sum of read j's n value
                 entries, m^j = Σ_i (p_i − p⁰_i) v^j_i
        P        ← [[ρ, 1−ρ], [1−ρ, ρ]] P + (β^0, β^1) u     α = σ(a), ρ = σ(r), β^j = 2 σ(c_j)
        dynamic  (a, r, c_0, c_1) += W · rms-normalised concatenation of the plain mixes Σ_i p_i v^0_i, Σ_i p_i v^1_i

    Crossed values are crossed keys by other names: read j of one is read 1 − j of the other, α its 1 − α. Both are here since the
    DAR paper compares them; from the same start they train alike up to rounding.

    At a block's end P^j becomes an entry of H^j and restarts at zero. The state's carry is (h, P^0, P^1) inside a block and
    (h,) between blocks; the history holds the two streams' entries in turn.
    """

    routing_learning_rate_factor = 2.0

    def __init__(self, config: Any):
        super().__init__(config)
        self.final = 2 * config.num_hidden_layers
        self.unit = unit_sublayers(config)
        self.scale = config.depth_logit_scale
        self.options = {
            "eps": config.rms_norm_eps,
            "num_heads": config.depth_num_heads,
            "anchored": config.depth_anchored,
        }
        # counted once: a configuration is slow to ask
        self.history_sizes = [2 * len(history_sources(config, s)) for s in range(self.final + 1)]
        self.source_counts = [len(read_sources(config, s)) for s in range(self.final + 1)]
        self.layers_per_group = config.depth_block_size * max(1, 3 // config.depth_block_size)
        self.routes = ROUTES[config.dual_routing]
        # each stream's keys are the other's values, or others that are neither's
        self.is_crossed = self.routes in (ROUTES["cross_key"], ROUTES["cross_value"])
        self.has_keys = self.routes == ROUTES["fixed"]

    def create_read(self, s: int) -> DualRead:
        return DualRead(self.config, s)

    def carry_size(self, s: int) -> int:
        return 1 if s % self.unit == 0 else 3

    def history_size(self, s: int) -> int:
        return self.history_sizes[s]

    def start(self, embedding: Tensor) -> ResidualState:
        # a view for the second stream: torch.compile refuses one tensor that is both a key and a value
        return ResidualState((embedding,), (embedding, embedding.view_as(embedding)))

    def streams(self, state: ResidualState, s: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The entries of both streams that read `s` chooses from, in the order of `read_sources`."""
        first, second = state.history[0::2], state.history[1::2]
        if self.source_counts[s] > len(first):
            return (*first, state.carry[1]), (*second, state.carry[2])
        return first, second

    def group_size(self, state: ResidualState) -> int:
        backend = choose_backend(self.config, state.stream)
        if backend is None:
            return 0
        return self.final // 2 if backend.of_inference(state.stream) else self.layers_per_group

    def prepare(self, state: ResidualState, modules: dict[int, Any]) -> dict[int, Any]:
        """All queries of the reads `modules`, over the entries of both streams completed so far (`PreparedDualRead`), or
        without gradients over every entry as it comes (`InferenceDualRead`)."""
        backend: Any = choose_backend(self.config, state.stream)
        inference = backend.of_inference(state.stream)
        end = self.final + inference
        parameters: dict[int, DualReadParameters] = {
            s: module(state.stream) for s, module in modules.items() if self.source_counts[s] > 1 and s < end
        }
        if not parameters:
            return {}
        if inference:
            return self.prepare_inference(backend, state, parameters)
        return self.prepare_with(parameters, (state.history[0::2], state.history[1::2]))

    def prepare_inference(
        self, backend: Any, state: ResidualState, parameters: dict[int, DualReadParameters]
    ) -> dict[int, InferenceDualRead]:
        queries = torch.stack([read.query for read in parameters.values() if read.query is not None], 1)
        queries = queries if self.scale == 1 else queries * self.scale
        capacity = max(self.source_counts[s] for s in parameters)
        shared = backend.InferenceReads(
            queries, state.stream, capacity=capacity, crossed=self.is_crossed, **self.options
        )
        # α, ρ, β^0 / 2 and β^1 / 2 of all reads, number by number
        is_static = self.config.dual_gates == "static"
        gates = iter(torch.sigmoid(torch.cat([read.gate_logits for read in parameters.values()])).unbind())
        prepared = {}
        for place, (s, read) in enumerate(parameters.items()):
            alpha, *of_write = islice(gates, len(read.gate_logits))
            write = StaticWrite(*of_write) if of_write and is_static else None
            prepared[s] = InferenceDualRead(shared, read, place, alpha if is_static else None, write)
        return prepared

    def prepare_with(
        self, parameters: dict[int, DualReadParameters], entries: tuple[Sequence[Tensor], Sequence[Tensor]]
    ) -> dict[int, PreparedDualRead]:
        """One phase of two streams: the queries of `parameters` over `entries`."""
        backend: Any = choose_backend(self.config, entries[0][0])
        count = len(entries[0])
        queries = torch.stack([read.query for read in parameters.values() if read.query is not None], 1)
        queries = queries if self.scale == 1 else queries * self.scale
        phases = backend.phase(
            [
                PhaseInput(entries[value], queries[stream], keys=entries[key] if key != value else None)
                for stream, (key, value) in enumerate(self.routes)
            ],
            complete=sum(self.source_counts[s] == count for s in parameters),
            **self.options,
        )
        gap = None
        if self.options["anchored"]:
            first, second = self.totals(entries, queries.dtype)
            gap = first - second
        return {
            s: PreparedDualRead(
                backend,
                parameters[s],
                queries[:, index],
                [(*phase.complete, *phase.partial)[index] for phase in phases],
                [phase.logits[index] for phase in phases],
                gap,
                count,
            )
            for index, s in enumerate(parameters)
        }

    def totals(self, entries: tuple[Sequence[Tensor], Sequence[Tensor]], dtype: torch.dtype) -> list[Tensor]:
        """Σ^0 and Σ^1 [B, T, D]: sums of the entries that each stream has for values."""
        return [reduce(torch.add, [tensor.to(dtype) for tensor in entries[value]]) for _, value in self.routes]

    def read(
        self,
        state: ResidualState,
        s: int,
        module: Any,
        record: RoutingRecord | None,
        prepared: PreparedDualRead | InferenceDualRead | None = None,
    ) -> Reading:
        parameters: DualReadParameters = prepared.parameters if prepared else module(state.stream)
        if parameters.query is None:
            return Reading(state.stream, gates=parameters.gate_logits)
        if isinstance(prepared, InferenceDualRead):
            return self.read_inference(prepared, state, s, record)
        entries, anchored = self.streams(state, s), self.options["anchored"]
        if prepared is None and choose_backend(self.config, state.stream) is not None:
            prepared = self.prepare_with({s: parameters}, entries)[s]
        mixes, weights = (
            self.finish_prepared(prepared, entries, record is not None)
            if prepared
            else self.mix(parameters.query, entries)
        )
        count, gates = len(entries[0]), parameters.gate_logits
        totals = (
            self.totals(entries, mixes[0].dtype)
            if anchored and (parameters.gate_proj is not None or not prepared)
            else []
        )
        if parameters.gate_proj is not None:
            gates = gates + self.dynamic_gates(parameters.gate_proj, mixes, totals, count)
        alpha = torch.sigmoid(gates[..., :1])
        if prepared:
            options = {"stream": state.stream, "count": count, **self.gap(prepared, entries)} if anchored else {}
            mixed = prepared.backend.combine(alpha, *mixes, **options)
        else:
            mixed = alpha * mixes[0] + (1 - alpha) * mixes[1]
            if anchored:
                mixed = state.stream + ((alpha - 0.5) * (totals[0] - totals[1]) + count * mixed)
        if record is not None:
            self.note(record, s, torch.stack([weight.detach() for weight in weights]))
        return Reading(mixed.to(state.stream.dtype), gates=gates)

    def read_inference(
        self, prepared: InferenceDualRead, state: ResidualState, s: int, record: RoutingRecord | None
    ) -> Reading:
        shared, parameters, place, alpha, write = prepared
        completed, count, gates = len(state.history) // 2, self.source_counts[s], parameters.gate_logits
        if shared.count < completed:
            new = state.history[2 * shared.count :]
            shared.add(*self.routed(new[0::2], new[1::2]))
        private = self.routed(*([partial] for partial in state.carry[1:])) if count > completed else (None, None)
        mixes, logits = shared.read(place, 1, 0, *private)
        totals = shared.totals(private[0]) if self.options["anchored"] else []
        if parameters.gate_proj is not None:
            gates = gates + self.dynamic_gates(parameters.gate_proj, mixes, totals, count)
        if alpha is None:
            alpha = torch.sigmoid(gates[..., :1])
        mixed = torch.lerp(mixes[1], mixes[0], alpha)
        if totals:
            mixed = state.stream + torch.addcmul(count * mixed, alpha - 0.5, totals[0] - totals[1])
        if record is not None:
            self.note(record, s, shared.weights(logits).squeeze(1))
        return Reading(mixed.to(state.stream.dtype), gates=write or gates)

    def routed(self, first: Any, second: Any) -> tuple[list[Any], list[Any] | None]:
        """By target stream: its values and, where those are nobody's values, its keys, of what belongs to stream 0 and to
        stream 1."""
        of_stream = (first, second)
        keys = [of_stream[key] for key, _ in self.routes] if self.has_keys else None
        return [of_stream[value] for _, value in self.routes], keys

    def dynamic_gates(
        self, projection: Tensor, mixes: Sequence[Tensor], totals: Sequence[Tensor], count: int
    ) -> Tensor:
        """What each token adds to the gates' logits, [B, T, 4] ([B, T, 1] at the final read). The plain mixes are m^j + Σ^j / n
        where `totals` are given: anchored."""
        plain = [mix + total / count for mix, total in zip(mixes, totals)] if totals else mixes
        both = torch.cat(list(plain), dim=-1)
        normalised = both * torch.rsqrt(both.square().mean(-1, keepdim=True) + self.options["eps"])
        return nn.functional.linear(normalised, projection)

    def note(self, record: RoutingRecord, s: int, weights: Tensor) -> None:
        """`weights` p [2, S, B, T, H]."""
        weights = weights.squeeze(-1) if self.options["num_heads"] == 1 else weights
        record.note(read_name(self.config, s), RoutingWeights(source_labels(self.config, s), weights))

    def mix(
        self, queries: Tensor, entries: tuple[Sequence[Tensor], Sequence[Tensor]]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """By stream: the mix m^j and the weights p, by the reference."""
        pairs = [
            depth_mix(
                entries[value], query, keys=entries[key] if key != value else None, scale=self.scale, **self.options
            )
            for (key, value), query in zip(self.routes, queries)
        ]
        return [mix for mix, _ in pairs], [weights for _, weights in pairs]

    def finish_prepared(
        self, prepared: PreparedDualRead, entries: tuple[Sequence[Tensor], Sequence[Tensor]], weigh: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """By stream: the mix m^j and, if `weigh`, the weights p, of a prepared read."""
        private = [entry[prepared.size :] for entry in entries]
        mixes, logits = prepared.results, prepared.logits
        if private[0]:
            inputs = [
                MergeInput(part, private[value], query, keys=private[key] if key != value else None)
                for (key, value), part, query in zip(self.routes, prepared.results, prepared.queries)
            ]
            merges = prepared.backend.merge(inputs, cast=False, **self.options)
            mixes = [merged.x for merged in merges]
            if weigh:
                logits = [torch.cat([shared, merged.logits]) for shared, merged in zip(logits, merges)]
        return mixes, [torch.softmax(one, 0) for one in logits] if weigh else []

    def gap(self, prepared: PreparedDualRead, entries: tuple[Sequence[Tensor], Sequence[Tensor]]) -> dict[str, Any]:
        """Σ^0 − Σ^1 of a prepared read, as tensors to add and to subtract: of the private entries those themselves."""
        first, second = (entries[value][prepared.size :] for _, value in self.routes)
        return {"plus": [prepared.gap, *first], "minus": second}

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        stream = state.stream + update
        if isinstance(reading.gates, StaticWrite):
            partial = reading.gates.write(update, state.carry[1:])
        else:
            backend = choose_backend(self.config, update)
            write = self.write_streams if backend is None else backend.write_streams
            partial = write(reading.gates, update, state.carry[1:])
        if (s + 1) % self.unit:
            return ResidualState((stream, *partial), state.history)
        return ResidualState((stream,), (*state.history, *partial))

    def write_streams(self, gates: Tensor, update: Tensor, partial: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """P^0, P^1 [B, T, D] after the write of u; before it there are none at a block's start."""
        _, transport, *write_logits = gates.split(1, dim=-1)
        written = [2 * torch.sigmoid(logit) * update for logit in write_logits]
        if partial:
            rho = torch.sigmoid(transport)
            first, second = partial
            written[0] = rho * first + (1 - rho) * second + written[0]
            written[1] = (1 - rho) * first + rho * second + written[1]
        first, second = (tensor.to(update.dtype) for tensor in written)
        return first, second

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        return self.read(state, self.final, module, record, prepared).x
