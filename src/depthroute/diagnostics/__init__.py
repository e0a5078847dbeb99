# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Looking at what a model does with its depth: record it over text, measure it, draw it.

`depthroute.inspect` and `compare` work on folders and write a report; `diagnose` does all of it for a model in memory; below
it each diagnostic is a function on a model and batches.
"""

from .diagnose import Diagnosis, diagnose, route_divergence, routing_statistics
from .geometry import (
    NormGrowth,
    SourceSimilarity,
    StreamCKA,
    norm_growth,
    source_similarity,
    stream_cka,
)
from .inspect import compare
from .metrics import ReadStatistics, SourceUsage, jensen_shannon, linear_cka, read_statistics, source_usage
from .record import RecordedRead, record_routing
from .rescue import RescueGain, rescue_gain


__all__ = [
    "Diagnosis",
    "NormGrowth",
    "ReadStatistics",
    "RecordedRead",
    "RescueGain",
    "SourceSimilarity",
    "SourceUsage",
    "StreamCKA",
    "compare",
    "diagnose",
    "jensen_shannon",
    "linear_cka",
    "norm_growth",
    "read_statistics",
    "record_routing",
    "rescue_gain",
    "route_divergence",
    "routing_statistics",
    "source_similarity",
    "source_usage",
    "stream_cka",
]
