# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Single-stream depth routing: AttnRes (arXiv 2603.15031), Delta AttnRes (arXiv 2605.18855), RD-AttnRes
(arXiv 2608.01075) and WAV (arXiv 2606.06564v1).

Independent choices, one config field each: what a source is (`depth_source`, `depth_block_size`, `depth_detail_bases`),
what the mix does to the stream (`depth_combine`), whether the read starts as the identity (`depth_anchored`), and what
attention's values read (`depth_value_route`). `depth_schedule` counts the sources; `depth_ops` does the arithmetic; this
file keeps the tensors.
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .depth_backend import MergeInput, PhaseInput, choose_backend
from .depth_ops import depth_read, statistics_dtype
from .depth_schedule import history_sources, read_name, read_sources, unit_sublayers
from .residual_base import Reading, Residual, ResidualState, RoutingRecord, RoutingWeights


class ReadParameters(NamedTuple):
    """What a `DepthRead` hands to the arithmetic, in float32 (float64 for a float64 stream).

    Attributes:
        query: γ ⊙ q [D].
        value_query: γ ⊙ q^V [D], where attention's values have a route of their own.
        null: one more source [D], where there is one.
        value_proj: [D, D] applied to the mix of values, where there is one.
        bias: b [S], where sources have biases.
        prior_bias: b⁰ [S], the same at initialisation, where that is needed.
    """

    query: Tensor
    value_query: Tensor | None = None
    bias: Tensor | None = None
    prior_bias: Tensor | None = None
    null: Tensor | None = None
    value_proj: Tensor | None = None


def fold(query: Tensor, key_norm: Tensor | None, dtype: torch.dtype) -> Tensor:
    """γ ⊙ q [D] in `dtype`."""
    # a tensor of its own also without γ: products round by the alignment of what was loaded
    return query.to(dtype, copy=True) if key_norm is None else query.to(dtype) * key_norm.to(dtype)


class PreparedRead(NamedTuple):
    """What a phase has computed for one read.

    Attributes:
        backend: what has computed it.
        parameters: the read's.
        routes: (query, bias) of each of its softmaxes.
        results: of each, the mix (or the phase's part of it, where the read has private sources) and the logits.
        size: how many sources the phase has seen.
        start: the standard stream at that time [B, T, D], where that was at a block's start; else None.
    """

    backend: Any
    parameters: ReadParameters
    routes: list[tuple[Tensor, Tensor | None]]
    results: list[tuple[Any, Tensor]]
    size: int
    start: Tensor | None


class InferenceRead(NamedTuple):
    """One read without gradients, whose sources are looked at as they come.

    Attributes:
        shared: the backend's `InferenceReads`, by all reads that were prepared together.
        parameters: the read's.
        first, routes: which of their queries are its own.
        ahead: how many queries behind them read the same sources.
        bias: b [count, S], where sources have biases.
    """

    shared: Any
    parameters: ReadParameters
    first: int
    routes: int
    ahead: int
    bias: Tensor | None


class DepthRead(nn.Module):
    """The parameters of one depth read: `query` [D] (zero at the start), `key_norm` γ [D] (one), `value_query` q^V [D]
    (zero; RD-AttnRes), `detail_bias` [bases] (`depth_detail_bias`; WAV), `value_proj` [D, D] (identity; DAR's SepV control)
    and `null` [D] (zero; released Delta code).

    A module that is called, not a bag of parameters: PEFT, FSDP and hooks see every use. Initial values are set in
    `DepthRoutePreTrainedModel._init_weights`.

    Args:
        config: `hidden_size` is D.
        s: the read; 2L is the final one.
    """

    def __init__(self, config: Any, s: int):
        super().__init__()
        width = config.hidden_size
        bases = config.depth_detail_bases
        self.bases = [bases.index(source.basis) if source.basis else -1 for source in read_sources(config, s)]
        self.bases += [-1] * config.depth_null_source
        self.initial_detail_bias = config.depth_detail_bias
        self.needs_prior = config.depth_anchored or config.depth_value_route == "uniform"
        has_details = any(basis >= 0 for basis in self.bases)
        is_attention = s % 2 == 0 and s < 2 * config.num_hidden_layers
        routes_values = is_attention and config.depth_value_route in ("decoupled", "average")
        self.query = nn.Parameter(torch.empty(width))
        self.key_norm = nn.Parameter(torch.empty(width)) if config.depth_key_norm == "learned" else None
        self.value_query = nn.Parameter(torch.empty(width)) if routes_values else None
        self.detail_bias = nn.Parameter(torch.empty(len(config.depth_detail_bases))) if has_details else None
        self.value_proj = nn.Parameter(torch.empty(width, width)) if config.depth_value_projection else None
        self.null = nn.Parameter(torch.empty(width)) if config.depth_null_source else None
        # a module is slow to ask for what it has not
        self.is_plain = all(
            parameter is None for parameter in (self.value_query, self.detail_bias, self.value_proj, self.null)
        )

    def forward(self, stream: Tensor) -> ReadParameters:
        """The folded parameters; `stream` [B, T, D] gives device and dtype and is used for nothing else."""
        dtype, key_norm = statistics_dtype(stream), self.key_norm
        query = fold(self.query, key_norm, dtype)
        if self.is_plain:
            return ReadParameters(query)
        bias = prior_bias = None
        if self.detail_bias is not None:
            # what is no detail has no bias: its index, −1, finds the zero behind the learned ones
            learned = nn.functional.pad(self.detail_bias.to(dtype), (0, 1))
            bias = learned[torch.tensor(self.bases, device=stream.device)]
            if self.needs_prior:
                # rounded like the parameter: the start must be exactly the parameter's start
                initial = torch.full((), self.initial_detail_bias, dtype=self.detail_bias.dtype, device=stream.device)
                is_detail = [float(basis >= 0) for basis in self.bases]
                prior_bias = initial.to(dtype) * torch.tensor(is_detail, dtype=dtype, device=stream.device)
        value_query = None if self.value_query is None else fold(self.value_query, key_norm, dtype)
        return ReadParameters(query, value_query, bias, prior_bias, self.null, self.value_proj)

    def extra_repr(self) -> str:
        return f"width={self.query.shape[-1]}, key_norm={'learned' if self.key_norm is not None else 'none'}"


def match_rms(summary: Tensor, details: Sequence[Tensor], max_scale: float, eps: float) -> list[Tensor]:
    """WAV's detached RMS matching: D · min(`max_scale`, rms(C) / rms(D)) per token.

    Args:
        summary, details: C and the Ds, [B, T, D].

    Returns:
        [B, T, D] each, in the dtype of the detail; the ratio is computed in float32 (float64) and has no gradient.
    """
    dtype = statistics_dtype(summary)
    with torch.no_grad():
        # sqrt(D · (mean(x²) + eps))
        floor = torch.full((), (summary.shape[-1] * eps) ** 0.5, dtype=dtype, device=summary.device)
        of_summary, *of_details = (
            torch.hypot(torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=dtype), floor)
            for tensor in (summary, *details)
        )
        ratios = [(of_summary / norm).clamp(max=max_scale) for norm in of_details]
    return [(detail * ratio).to(detail.dtype) for detail, ratio in zip(details, ratios)]


class DepthAttentionResidual(Residual):
    """Every branch reads a learned mix over depth; writes are plain.

        sources    outputs            e, u_0 … u_{s-1}            (`attnres`, `delta`)
                   outputs by block   e, C_0 … C_{b-1}, PC        (`attnres-block`, `delta-block`: without PC)
                   with details       and D̃^phase, D̃^split behind each C and PC (`wav`)
                   states             h_0 … h_s                   (`attnres-states`)
        x_s        replace, plain     Σ p_i v_i                   (AttnRes)
                   replace, anchored  h_s + g Σ (p_i − p⁰_i) v_i  over outputs: g = 1 / p⁰_main, that is S without details,
                                      which is g times the plain read where Σ v_i = h_s; over states g = 1
                   add, plain         h_s + Σ p_i v_i             (Delta AttnRes)
                   add, anchored      h_s + Σ (p_i − p⁰_i) v_i
        x^V        decoupled          the same with the query q^V (RD-AttnRes); uniform: with p = p⁰ (Frozen-V)
                   average            half the sum of both routes feeds queries, keys and values
        x_final    replace            one more read, without details          add: the stream

    Details of a block with updates u_i: D^phase = Σ ±u_i, + attention, − MLP; D^split = Σ ±u_i, + the first K updates.

    The state's carry is (h_s, PC, running details) while a block over outputs is running and (h_s,) otherwise; the history
    holds the completed sources.
    """

    def __init__(self, config: Any):
        super().__init__(config)
        self.final = 2 * config.num_hidden_layers
        self.unit = unit_sublayers(config)
        self.over_states = config.depth_source == "state"
        self.replaces = config.depth_combine == "replace"
        self.bases: list[str] = config.depth_detail_bases
        self.uniform_values = config.depth_value_route == "uniform"
        self.averages_routes = config.depth_value_route == "average"
        self.scale = config.depth_logit_scale
        self.max_scale = config.depth_detail_max_scale
        self.options = {
            "eps": config.rms_norm_eps,
            "num_heads": config.depth_num_heads,
            "anchored": config.depth_anchored,
        }
        # counted once: a configuration is slow to ask
        self.history_sizes = [len(history_sources(config, s)) for s in range(self.final + 1)]
        reads = [read_sources(config, s) for s in range(self.final + 1)]
        self.source_counts = [len(sources) + config.depth_null_source for sources in reads]
        self.gains = [1.0] * len(reads)
        if config.depth_anchored and self.replaces and not self.over_states:
            # 1 / p⁰ of a source that is no detail: with it the read is `gain` times the plain one
            details = [sum(source.basis is not None for source in sources) for sources in reads]
            prior = math.exp(config.depth_detail_bias)
            self.gains = [count - n + n * prior for count, n in zip(self.source_counts, details)]
        # a replacing read is the branch's whole input, and anchored it is multiplied by the number of sources; the papers'
        # hundredfold rates cause loss spikes
        self.routing_learning_rate_factor = 2.0 if self.replaces else 10.0
        block = config.depth_block_size or 3
        # where the sources since the phase are not just what the stream has gained since: one block
        one_block = self.bases or (not self.replaces and config.depth_block_size)
        self.layers_per_group = block if one_block else block * max(1, 3 // block)

    def create_read(self, s: int) -> DepthRead | None:
        if s == self.final and not self.replaces:
            return None
        return DepthRead(self.config, s) if len(read_sources(self.config, s)) > 1 else None

    def carry_size(self, s: int) -> int:
        return 1 if self.over_states or s % self.unit == 0 else 2 + len(self.bases)

    def history_size(self, s: int) -> int:
        return self.history_sizes[s]

    def start(self, embedding: Tensor) -> ResidualState:
        return ResidualState((embedding,), (embedding,))

    def sources(self, state: ResidualState, s: int) -> Sequence[Tensor]:
        """The tensors that read `s` chooses from, in the order of `read_sources`."""
        history = state.history
        if s == self.final and self.bases:
            kept = zip(history, history_sources(self.config, s))
            history = tuple(tensor for tensor, source in kept if source.basis is None)
        if s % self.unit == 0:
            return history
        if self.over_states:
            return (*history, state.stream)
        if not self.replaces:
            return history
        partial, *details = state.carry[1:]
        if s == self.final:
            return (*history, partial)
        return (*history, partial, *self.scaled(details, partial))

    def scaled(self, details: Sequence[Tensor], summary: Tensor) -> list[Tensor]:
        if not details:
            return []
        # details that are one tensor so far stay one
        names = {id(detail): detail for detail in details}
        kept = self.max_scale >= 1  # the ratio of equal norms is one
        others = [detail for detail in names.values() if not (kept and detail is summary)]
        if others:
            matched = match_rms(summary, others, self.max_scale, self.options["eps"])
            names |= {id(detail): found for detail, found in zip(others, matched)}
        return [names[id(detail)] for detail in details]

    def group_size(self, state: ResidualState) -> int:
        backend = choose_backend(self.config, state.stream)
        if backend is None:
            return 0
        return self.final // 2 if backend.of_inference(state.stream) else self.layers_per_group

    def prepare(self, state: ResidualState, modules: dict[int, Any]) -> dict[int, Any]:
        """All queries of the reads `modules`, over the sources completed so far (`PreparedRead`), or without gradients over
        every source as it comes (`InferenceRead`)."""
        backend: Any = choose_backend(self.config, state.stream)
        inference = backend.of_inference(state.stream)
        # without details the final read's sources are not those of the reads before it
        end = self.final + (inference and not self.bases)
        reads = {s: module for s, module in modules.items() if module is not None and s < end}
        if not reads:
            return {}
        prepare = self.prepare_inference if inference else self.prepare_phase
        return prepare(backend, state, reads)

    def prepare_inference(self, backend: Any, state: ResidualState, reads: dict[int, Any]) -> dict[int, InferenceRead]:
        parameters: dict[int, ReadParameters] = {s: module(state.stream) for s, module in reads.items()}
        routes = {s: self.routes(s, parameters[s]) for s in reads}
        queries = torch.stack([query for s in reads for query, _ in routes[s]])
        capacity = max(self.source_counts[s] for s in reads)
        shared = backend.InferenceReads(queries.unsqueeze(0), state.stream, capacity=capacity, **self.options)
        prepared: dict[int, InferenceRead] = {}
        first, ahead = len(queries), 0
        for s in sorted(reads, reverse=True):
            # what a block's reads share, the first of them can make for all
            following = prepared.get(s + 1)
            shares = following is not None and self.has_same_sources(s)
            ahead = following.routes + following.ahead if shares else 0  # type: ignore[union-attr]
            first -= len(routes[s])
            biases = [bias for _, bias in routes[s] if bias is not None]
            bias = torch.stack(biases) if biases else None
            prepared[s] = InferenceRead(shared, parameters[s], first, len(routes[s]), ahead, bias)
        return prepared

    def has_same_sources(self, s: int) -> bool:
        """Whether the read behind `s` has the sources of `s` and both have none that are not complete."""
        return (
            self.source_counts[s] == self.source_counts[s + 1] == self.history_sizes[s] == self.history_sizes[s + 1]
            and not self.bases
        )

    def prepare_phase(self, backend: Any, state: ResidualState, reads: dict[int, Any]) -> dict[int, PreparedRead]:
        parameters: dict[int, ReadParameters] = {s: module(state.stream) for s, module in reads.items()}
        shared = state.history
        routes = {s: self.routes(s, parameters[s]) for s in reads}
        queries, biases = zip(*(route for s in reads for route in routes[s]))
        whole = [s for s in reads if self.source_counts[s] == len(shared)]
        bias, prior_bias = None, parameters[min(reads)].prior_bias
        if biases[0] is not None:
            bias = torch.stack([bias[: len(shared)] for bias in biases])
        if prior_bias is not None:
            prior_bias = prior_bias[: len(shared)]
        (phase,) = backend.phase(
            [PhaseInput(shared, torch.stack(queries), bias=bias)],
            complete=sum(len(routes[s]) for s in whole),
            prior_bias=prior_bias,
            gain=self.gains[whole[0]] if whole else 1.0,
            **self.options,
        )
        results = zip((*phase.complete, *phase.partial), phase.logits)
        # inside a block the partial source also holds what was written before: the stream has gained less than that since
        start = state.stream if min(reads) % self.unit == 0 else None
        return {
            s: PreparedRead(backend, parameters[s], routes[s], list(islice(results, len(routes[s]))), len(shared), start)
            for s in reads
        }  # fmt: skip

    def read(
        self,
        state: ResidualState,
        s: int,
        module: Any,
        record: RoutingRecord | None,
        prepared: PreparedRead | InferenceRead | None = None,
    ) -> Reading:
        if module is None:
            return Reading(state.carry[0])
        parameters: ReadParameters = prepared.parameters if prepared else module(state.stream)
        sources = self.sources(state, s)
        if parameters.null is not None:
            sources = (*sources, parameters.null.to(state.stream.dtype).expand_as(state.stream))
        base = state.stream if self.options["anchored"] or not self.replaces else None
        # linear: one projection of the mix is the mix of projected values
        mix_base = base if parameters.value_proj is None else None
        if isinstance(prepared, InferenceRead):
            mixes = self.read_inference(prepared, s, state.history, sources, mix_base, record is not None)
        elif prepared:
            mixes = [
                self.finish_prepared(prepared, index, s, sources, mix_base, record is not None)
                for index in range(len(prepared.routes))
            ]
        else:
            mixes = self.read_alone(s, parameters, sources, mix_base, record is not None)
        reads = [read for read, _ in mixes]
        if parameters.value_proj is not None:
            reads = [nn.functional.linear(read, parameters.value_proj.to(read.dtype)) for read in reads]
            reads = reads if base is None else [base + read for read in reads]
        if record is not None:
            labels = [source.label for source in read_sources(self.config, s)]
            labels += ["null"] * (self.source_counts[s] - len(labels))
            weights = [weights.detach() for _, weights in mixes]
            record.note(read_name(self.config, s), RoutingWeights(labels, *weights))
        if len(reads) == 2 and self.averages_routes:
            return Reading((reads[0] + reads[1]) / 2)
        return Reading(*reads)

    def read_alone(
        self, s: int, parameters: ReadParameters, sources: Sequence[Tensor], base: Tensor | None, weigh: bool
    ) -> list[tuple[Tensor, Any]]:
        """x [B, T, D], and p [S, B, T(, H)] if `weigh`, of each route of a read that was not prepared."""
        routes, options = self.routes(s, parameters), {**self.options, "gain": self.gains[s]}
        backend = choose_backend(self.config, sources[0])
        if backend is None:
            options |= {"prior_bias": parameters.prior_bias, "base": base, "return_weights": True}
            return [depth_read(sources, query, bias=bias, **options) for query, bias in routes]
        (query, bias), *others = routes
        queries, bias = query.unsqueeze(0), None if bias is None else bias.unsqueeze(0)
        if others:
            queries = torch.stack([query for query, _ in routes])
            bias = None if bias is None else torch.stack([bias for _, bias in routes if bias is not None])
        inputs = [PhaseInput(sources, queries, bias=bias, base=base)]
        (phase,) = backend.phase(inputs, complete=len(routes), prior_bias=parameters.prior_bias, **options)
        weights = [self.weights(logits) for logits in phase.logits] if weigh else [None] * len(routes)
        return [(x.to(sources[0].dtype), weight) for x, weight in zip(phase.complete, weights)]

    def weights(self, logits: Tensor) -> Tensor:
        """p [S, B, T(, H)] of logits [S, B, T, H]."""
        weights = torch.softmax(logits, 0)
        return weights.squeeze(-1) if self.options["num_heads"] == 1 else weights

    def read_inference(
        self,
        prepared: InferenceRead,
        s: int,
        history: Sequence[Tensor],
        sources: Sequence[Tensor],
        base: Tensor | None,
        weigh: bool,
    ) -> list[tuple[Tensor, Any]]:
        """x [B, T, D], and p [S, B, T(, H)] if `weigh`, of each route of a read without gradients."""
        shared, parameters, first, routes, ahead, bias = prepared
        completed = len(history)
        if shared.count < completed:
            shared.add((sources[shared.count : completed],))
        private = (sources[completed:],) if len(sources) > completed else None
        ahead = 0 if weigh else ahead
        prior_bias, gain = parameters.prior_bias, self.gains[s]
        mixes, logits = shared.read(first, routes, ahead, private, bias=bias, prior_bias=prior_bias, gain=gain)
        reads = mixes if base is None else [base + mix for mix in mixes]
        if (dtype := sources[0].dtype) != reads[0].dtype:
            reads = [read.to(dtype) for read in reads]
        if not weigh:
            return [(read, None) for read in reads]
        weights = shared.weights(logits)[0]
        return list(zip(reads, weights.squeeze(-1) if self.options["num_heads"] == 1 else weights))

    def finish_prepared(
        self, prepared: PreparedRead, index: int, s: int, sources: Sequence[Tensor], base: Tensor | None, weigh: bool
    ) -> tuple[Tensor, Any]:
        """x [B, T, D], and p [S, B, T(, H)] if `weigh`, of one route of a prepared read."""
        parameters, count = prepared.parameters, prepared.size
        (query, bias), (part, logits) = prepared.routes[index], prepared.results[index]
        private = sources[count:]
        if not private:
            x = part if base is None else base + part
            x = x.to(sources[0].dtype)
        else:
            summands = 0
            if base is not None and prepared.start is not None and not self.over_states:
                summands = len(private) - (parameters.null is not None)
                summands = min(summands, 1) if self.bases else summands
            one = MergeInput(
                part,
                private,
                query,
                bias=None if bias is None else bias[count:],
                base=base,
                start=prepared.start if summands else None,
                summands=summands,
            )
            prior_bias = None if parameters.prior_bias is None else parameters.prior_bias[count:]
            # under autocast updates are narrower than the embedding, whose dtype a read has
            cast = private[0].dtype == sources[0].dtype
            (merged,) = prepared.backend.merge(
                [one], prior_bias=prior_bias, gain=self.gains[s], cast=cast, **self.options
            )
            x = merged.x.to(sources[0].dtype)
            if weigh:
                logits = torch.cat([logits, merged.logits])
        return x, self.weights(logits) if weigh else None

    def routes(self, s: int, parameters: ReadParameters) -> list[tuple[Tensor, Tensor | None]]:
        """(query [D], bias [S] or None) of each softmax of read `s`: that of x, and of attention's values where they have
        their own. Queries are scaled."""
        routes = [(parameters.query, parameters.bias)]
        if parameters.value_query is not None:
            routes.append((parameters.value_query, parameters.bias))
        elif self.uniform_values and s % 2 == 0 and s < self.final:
            routes.append((torch.zeros_like(parameters.query), parameters.prior_bias))
        return routes if self.scale == 1 else [(self.scale * query, bias) for query, bias in routes]

    def write(self, state: ResidualState, s: int, update: Tensor, reading: Reading) -> ResidualState:
        stream = state.stream + update
        completes_unit = (s + 1) % self.unit == 0
        if self.over_states:
            return ResidualState((stream,), (*state.history, stream) if completes_unit else state.history)
        running = self.accumulate(state.carry[1:], s, update)
        if not completes_unit:
            return ResidualState((stream, *running), state.history)
        block, *details = running
        return ResidualState((stream,), (*state.history, block, *self.scaled(details, block)))

    def accumulate(self, before: Sequence[Tensor], s: int, update: Tensor) -> list[Tensor]:
        """The running block and its details with one more update; `before` is empty at a block's start."""
        if not self.bases:
            return [before[0] + update if before else update]
        signs = [1, *(self.sign(basis, s) for basis in self.bases)]
        # details that have had the same signs so far are one tensor, which is then kept for the gradient only once
        if not before:
            sums: dict[Any, Tensor] = {sign: update if sign > 0 else -update for sign in signs}
            return [sums[sign] for sign in signs]
        pairs = [(id(old), sign) for old, sign in zip(before, signs)]
        sums = {pair: old + update if pair[1] > 0 else old - update for pair, old in dict(zip(pairs, before)).items()}
        return [sums[pair] for pair in pairs]

    def sign(self, basis: str, s: int) -> int:
        """±1 of update `s` in a detail: "phase" + attention, − MLP; "split" + the first half of a whole block, −
        after."""
        first = s % 2 == 0 if basis == "phase" else s % self.unit < self.unit // 2
        return 1 if first else -1

    def finish(self, state: ResidualState, module: Any, record: RoutingRecord | None, prepared: Any = None) -> Tensor:
        return self.read(state, self.final, module, record, prepared).x if self.replaces else state.stream
