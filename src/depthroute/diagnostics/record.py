# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Run a model over tokens and keep what every depth read attended to."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..modeling.residual_base import RoutingRecord, RoutingWeights


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def token_batches(token_ids: Sequence[int], max_length: int, batch_size: int) -> Iterator[dict[str, Tensor]]:
    """A running text as batches: windows of `max_length` tokens, `batch_size` of them at a time; the last window is padded
    and its padding masked.

    Yields:
        `input_ids` and `attention_mask`, int64 [B, T].
    """
    windows = [list(token_ids[i : i + max_length]) for i in range(0, len(token_ids), max_length)]
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        length = max(len(window) for window in batch)
        ids = torch.zeros(len(batch), length, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, window in enumerate(batch):
            ids[row, : len(window)] = torch.tensor(window)
            mask[row, : len(window)] = 1
        yield {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def record_routing(model: "PreTrainedModel", batches: Iterable[dict[str, Any]]) -> RoutingRecord:
    """Every live read's weights over all tokens of the batches, padding left out.

    Runs in evaluation mode and leaves the model in the mode it was in. Takes 4·S·N·H bytes per read on the CPU.

    Args:
        model: any DepthRoute model, with or without a head.
        batches: arguments of the forward, on any device: `input_ids` [B, T] (or `inputs_embeds`) and, where there is padding,
            `attention_mask` [B, T], 0 at padding.

    Returns:
        By module path (`model.layers.3.attn_read`), in order of depth, `RoutingWeights` whose weights are [S, N], or
        [S, N, H] for H > 1 heads: float32, N tokens of all batches one after the other. Empty for a standard residual.

    Raises:
        ValueError: no batches.
    """
    parts: dict[str, list[Tensor]] = {}
    sources: dict[str, list[str]] = {}
    any_batch = False
    training = model.training
    model.eval()
    try:
        for batch in batches:
            any_batch = True
            inputs = {
                name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()
            }
            mask = inputs.get("attention_mask")
            output = model(**inputs, output_routing=True, use_cache=False)
            for name, (labels, weights) in output.routing.items():
                tokens = weights.flatten(1, 2) if mask is None else weights[:, mask.bool()]
                parts.setdefault(name, []).append(tokens.float().cpu())
                sources[name] = labels
    finally:
        model.train(training)
    if not any_batch:
        raise ValueError("batches: got none, allowed: one or more")
    return {name: RoutingWeights(sources[name], torch.cat(tokens, dim=1)) for name, tokens in parts.items()}
