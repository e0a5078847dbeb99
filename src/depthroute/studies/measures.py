# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a study measures of a trained model: the loss of every validation window, and what its depth does."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ..diagnostics.diagnose import Diagnosis, diagnose
from ..diagnostics.metrics import read_sublayer
from .paired import DEEPEST


Batch = dict[str, Tensor]


@torch.no_grad()
def window_losses(model: Any, windows: Tensor, batch_size: int) -> list[float]:
    """Mean next-token loss of each window [N, T], in nats per token."""
    was_training = model.training
    model.eval()
    losses: list[float] = []
    for ids in windows.split(batch_size):
        ids = ids.to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits.float()
        each = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        losses += each.double().mean(1).tolist()
    model.train(was_training)
    return losses


def diagnosis_of(model: Any, windows: Tensor, tokens: int, batch_size: int) -> dict[str, Any]:
    """`measures` and `by_depth` of a DepthRoute model over the first `tokens` tokens of windows [N, T].

    Returns:
        `measures`: one number by name, of the diagnostics' summary and, of the deepest third of each route's reads, max weight,
        what it would be were routing uniform (mean 1/S), and the sources' cosine. `by_depth`: one entry per read and route.
    """
    kept = windows[: max(2, tokens // windows.shape[1])]
    pairs = list(_pairs(kept, batch_size)) if len(kept) > 1 else []
    found = diagnose(model, _batches(kept, batch_size), pairs)
    measures = dict(found.summary()) | _deepest(found)
    return {"measures": measures, "by_depth": _by_depth(found)}


def _batches(windows: Tensor, batch_size: int) -> Iterator[Batch]:
    for ids in windows.split(batch_size):
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pairs(windows: Tensor, batch_size: int) -> Iterator[tuple[Batch, Batch]]:
    yield from zip(_batches(windows, batch_size), _batches(windows.roll(-1, 0), batch_size))


def _by_depth(found: Diagnosis) -> list[dict[str, Any]]:
    rows = []
    for route, reads in found.reads.items():
        similarities = found.source_similarity.get(route) or found.source_similarity.get("main", {})
        for name, read in reads.items():
            similarity = similarities.get(name)
            rows.append(
                {
                    "name": name,
                    "route": route,
                    "sublayer": read_sublayer(name, found.layers),
                    "sources": len(read.sources),
                    "max_weight": read.max_weight,
                    "entropy_normalized": read.entropy_normalized,
                    "cosine": None if similarity is None else similarity.mean,
                }
            )
    return rows


def _deepest(found: Diagnosis) -> dict[str, float]:
    rows = _by_depth(found)
    measures: dict[str, float] = {}
    for route in found.reads:
        of_route = [row for row in rows if row["route"] == route]
        deep = of_route[-max(1, len(of_route) // DEEPEST) :]
        where = "" if route == "main" else f", {route}"
        measures[f"max weight, deepest third{where}"] = fmean(row["max_weight"] for row in deep)
        measures[f"uniform weight, deepest third{where}"] = fmean(1 / row["sources"] for row in deep)
        cosines = [row["cosine"] for row in deep if row["cosine"] is not None]
        if cosines:
            measures[f"cosine of sources, deepest third{where}"] = fmean(cosines)
    return measures
