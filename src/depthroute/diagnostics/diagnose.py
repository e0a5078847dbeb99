# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""All diagnostics of one model over the same tokens, in one pass and, for the rescue gain, its interventions."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from .geometry import CKAObserver, NormGrowth, NormObserver, SimilarityObserver, SourceSimilarity, StreamCKA
from .metrics import ReadStatistics, SourceUsage, jensen_shannon, read_statistics, source_usage
from .observe import Observer, observe
from .record import RecordedRead, RoutingRecorder
from .rescue import RescueGain, rescue_gain, stream_count


Reads = dict[str, dict[str, ReadStatistics]]
"""Statistics by route (`main`, `value`, `stream 0`, `stream 1`), then by the read's module path, in order of depth."""


def routing_statistics(recorded: Mapping[str, RecordedRead]) -> Reads:
    """Statistics of every route of every read that `record_routing` recorded."""
    reads: Reads = {}
    for name, read in recorded.items():
        for route, weights in read.routes.items():
            reads.setdefault(route, {})[name] = read_statistics(read.sources, weights)
    return reads


def route_divergence(recorded: Mapping[str, RecordedRead]) -> dict[str, float]:
    """Jensen–Shannon divergence of the QK and the V route of every attention read that has both (RD-AttnRes,
    arXiv 2608.01075): mean over tokens and heads, nats, 0 to ln 2, by module path."""
    return {
        name: jensen_shannon(read.routes["main"], read.routes["value"]).mean().item()
        for name, read in recorded.items()
        if "value" in read.routes
    }


@dataclass
class Diagnosis:
    """What was found out about one model. Parts without meaning for its residual are empty, and `absent` says why.

    Attributes:
        layers: L.
        tokens: how many were seen.
        reads: statistics of the routing weights, by route and read.
        source_usage: by route.
        source_similarity: by stream and read.
        route_divergence: Jensen–Shannon divergence of the QK and the V route, nats, by attention read.
        stream_cka: between streams.
        rescue_gain: by stream.
        norm_growth: of every model.
        absent: name of a part → the reason why it is not there.
    """

    layers: int
    tokens: int
    reads: Reads
    source_usage: dict[str, SourceUsage]
    source_similarity: dict[str, dict[str, SourceSimilarity]]
    route_divergence: dict[str, float]
    stream_cka: StreamCKA | None
    rescue_gain: RescueGain | None
    norm_growth: NormGrowth
    absent: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the parts that are there, `summary`, and `absent`. `reads`, `source_usage`, `source_similarity` and
        `route_divergence` are lists whose entries name their `route` (or `stream`) and read (`name`)."""
        first_route: dict[str, ReadStatistics] = next(iter(self.reads.values()), {})  # it has all reads
        order = {name: index for index, name in enumerate(first_route)}
        parts: dict[str, Any] = {
            "reads": sorted(
                (
                    {"name": name, "route": route, **asdict(read)}
                    for route, reads in self.reads.items()
                    for name, read in reads.items()
                ),
                key=lambda entry: order[entry["name"]],
            ),
            "source_usage": [{"route": route, **asdict(usage)} for route, usage in self.source_usage.items()],
            "source_similarity": [
                {"name": name, "stream": stream, **asdict(similarity)}
                for stream, similarities in self.source_similarity.items()
                for name, similarity in similarities.items()
            ],
            "route_divergence": [
                {"name": name, "jensen_shannon": value} for name, value in self.route_divergence.items()
            ],
            "stream_cka": self.stream_cka and asdict(self.stream_cka),
            "rescue_gain": self.rescue_gain and asdict(self.rescue_gain),
            "norm_growth": asdict(self.norm_growth),
        }
        present = {name: part for name, part in parts.items() if name not in self.absent}
        return {"layers": self.layers, "summary": self.summary(), **present, "absent": self.absent}

    def summary(self) -> dict[str, float]:
        """One number per part, and route or stream where there are several: means over reads, and of CKA over pairs of
        streams."""
        numbers: dict[str, float] = {}
        for route, reads in self.reads.items():
            where = "" if route == "main" else f", {route}"
            numbers[f"max weight{where}"] = fmean(read.max_weight for read in reads.values())
            numbers[f"entropy / ln S{where}"] = fmean(read.entropy_normalized for read in reads.values())
        for stream, similarities in self.source_similarity.items():
            where = "" if stream == "main" else f", {stream}"
            numbers[f"cosine of sources{where}"] = fmean(one.mean for one in similarities.values())
        if self.route_divergence:
            numbers["JS of QK and V routes (nats)"] = fmean(self.route_divergence.values())
        if self.stream_cka:
            for where in ("same_depth", "other_depths"):
                values = [pair[where] for pair in self.stream_cka.pairs]
                numbers[f"CKA of streams, {where.replace('_', ' ')}"] = fmean(values)
        if self.rescue_gain:
            for what, gains in (("hidden states", self.rescue_gain.hidden), ("loss", self.rescue_gain.loss or [])):
                numbers |= {f"rescue gain on the {what}, stream {j}": gain for j, gain in enumerate(gains)}
        numbers["norm growth of the stream (last / first)"] = self.norm_growth.growth
        return numbers


class _TokenCount(Observer):
    tokens = 0

    def begin(self, keep: Any) -> None:
        self.tokens += int(keep.sum())


def diagnose(
    model: Any,
    batches: Iterable[dict[str, Any]],
    pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]] = (),
) -> Diagnosis:
    """Every diagnostic that has a meaning for a model, padding left out everywhere.

    Args:
        model: any DepthRoute model, with or without a head.
        batches: as `observe.observe`.
        pairs: as `rescue.rescue_gain`, for models with several streams; without them there is no rescue gain.

    Raises:
        ValueError: no batches.
    """
    config = model.config
    recorder, similarity, cka, norms, count = (
        RoutingRecorder(config),
        SimilarityObserver(),
        CKAObserver(),
        NormObserver(),
        _TokenCount(),
    )
    observe(model, batches, [recorder, similarity, cka, norms, count])
    recorded = recorder.result()
    reads = routing_statistics(recorded)
    pairs = list(pairs)
    streams = stream_count(config)
    absent: dict[str, str] = {}
    if not reads:
        reason = f"a residual of type {config.residual_type!r} has no depth reads"
        absent |= dict.fromkeys(["reads", "source_usage", "source_similarity"], reason)
    divergence = route_divergence(recorded)
    if not divergence:
        absent["route_divergence"] = (
            f"depth_value_route is {config.depth_value_route!r}: attention's values read what its queries and keys read"
            if config.residual_type == "depth_attention"
            else f"a residual of type {config.residual_type!r} has no value route"
        )
    if streams == 1:
        absent |= dict.fromkeys(["stream_cka", "rescue_gain"], "the residual has one stream")
    similarity_of_streams = cka.result()
    if streams > 1 and similarity_of_streams is None:
        absent["stream_cka"] = "no batch has four tokens"
    if streams > 1 and not pairs:
        absent["rescue_gain"] = (
            "there is no second batch: the text fills one window, and the streams of another are needed"
        )
    return Diagnosis(
        layers=config.num_hidden_layers,
        tokens=count.tokens,
        reads=reads,
        source_usage={route: source_usage(of_route, config) for route, of_route in reads.items()},
        source_similarity=similarity.result(),
        route_divergence=divergence,
        stream_cka=similarity_of_streams,
        rescue_gain=rescue_gain(model, pairs) if streams > 1 and pairs else None,
        norm_growth=norms.result(),
        absent=absent,
    )
