# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Our implementations of the reads that are measured, each called as a model calls it."""

from types import ModuleType

import torch
from torch import Tensor

from depthroute.modeling import depth_ops
from depthroute.modeling.depth_backend import MergeInput, PhaseInput

from ..dispatch import BACKENDS
from .operator_cases import EPS, OperatorCase, Read, ReadInputs, sources_of
from .settings import DTYPES


def own_read(name: str, case: OperatorCase) -> Read | str:
    """An implementation's reads of a case, or why there are none."""
    if name == "reference":
        return lambda inputs: by_reference(case, inputs)
    backend = BACKENDS[name]
    reason = backend.unavailable(torch.device(case.device), DTYPES[case.dtype], False)
    return reason or (lambda inputs: by_phases(backend, case, inputs))


def by_reference(case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    """A read after the other."""
    return [
        depth_ops.depth_read(
            sources_of(inputs, m),
            inputs.query[m],
            key_norm=inputs.key_norm,
            base=inputs.bases[m] if case.based else None,
            gain=case.gain,
            eps=EPS,
            anchored=case.anchored,
        )
        for m in range(case.queries)
    ]


def by_phases(backend: ModuleType, case: OperatorCase, inputs: ReadInputs) -> list[Tensor]:
    """One phase of all queries, and a merge for each but the first."""
    options = {"eps": EPS, "num_heads": 1, "anchored": case.anchored, "gain": case.gain}
    statistics = depth_ops.statistics_dtype(inputs.values[0])
    queries = inputs.query.to(statistics) * inputs.key_norm.to(statistics)
    bases: list[Tensor | None] = [*inputs.bases] or [None] * case.queries
    (phase,) = backend.phase([PhaseInput(inputs.values, queries, base=bases[0])], complete=1, **options)
    results = [phase.complete[0].to(inputs.values[0].dtype)]
    for part, partial, query, base in zip(phase.partial, inputs.partials, queries[1:], bases[1:]):
        (merged,) = backend.merge([MergeInput(part, [partial], query, base=base)], **options)
        results.append(merged.x)
    return results
