# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Perplexity of a causal language model on texts, for `evaluate.load` without a network.

`evaluate` copies this file elsewhere before it is imported, so it imports nothing of its package.
"""

import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import datasets
import evaluate
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


_DESCRIPTION = (
    "Perplexity of texts under a causal language model: exp of the mean negative log-likelihood of their tokens."
)

_INPUTS = """
Args:
    predictions: the texts.
    model: a folder or hub id of any causal language model, or a model in memory (then with `tokenizer`).
    tokenizer: default: that of the folder.
    batch_size: windows per forward pass; changes nothing but the speed.
    add_start_token: put the beginning-of-text token (or, as lm-eval does, the end-of-text token where there is none) before
        each text, so that its first token counts too. False: the first token is context alone, as in a training loss.
    max_length: tokens of context; default: what the model's configuration allows. A longer text is read in windows, as lm-eval
        reads it: every token is predicted once, and the last window takes all the context that there is room for.
    device: default: the first GPU, otherwise the CPU; a model in memory stays where it is.
    dtype: of a model that is loaded: a name of torch's, or "auto".
    trust_remote_code: load a folder's own code.
Returns:
    perplexity: over all tokens together; loss: its logarithm, in nats; tokens: how many were predicted;
    perplexities: of each text; mean_perplexity: their mean.
"""


class DepthroutePerplexity(evaluate.Metric):
    """The metric."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            module_type="metric",
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def _compute(
        self,
        predictions: list[str],
        model: Any,
        tokenizer: Any = None,
        batch_size: int = 8,
        add_start_token: bool = True,
        max_length: int | None = None,
        device: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
    ) -> dict[str, Any]:
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, allowed: a number ≥ 1")
        if not len(predictions):
            raise ValueError("predictions: got none, allowed: at least one text")
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype: got {dtype!r}, allowed: auto, float32, bfloat16, float16")
        model, tokenizer = _loaded(model, tokenizer, device, dtype, trust_remote_code)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if max_length is not None and (max_length < 1 or (longest is not None and max_length > longest)):
            raise ValueError(f"max_length: got {max_length}, allowed: 1 to {longest}, max_position_embeddings")
        limit = max_length or longest
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if add_start_token and start is None:
            raise ValueError("add_start_token: got a tokenizer with neither bos_token nor eos_token, allowed: False")
        windows: list[tuple[int, list[int], int]] = []
        for index, text in enumerate(predictions):
            ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
            ids = [start, *ids] if add_start_token else ids
            if len(ids) < 2:
                raise ValueError(f"predictions: text {index} has no token to predict, allowed: a longer text")
            windows += [(index, window, known) for window, known in _windows(ids, limit)]
        sums, counts = [0.0] * len(predictions), [0] * len(predictions)
        windows.sort(key=lambda entry: -len(entry[1]))  # little padding
        for first in range(0, len(windows), batch_size):
            batch = windows[first : first + batch_size]
            values = _negative_log_likelihoods(model, [(window, known) for _, window, known in batch])
            for (index, window, known), value in zip(batch, values):
                sums[index] += value
                counts[index] += len(window) - known
        loss = sum(sums) / sum(counts)
        perplexities = [_exp(value / count) for value, count in zip(sums, counts)]
        return {
            "perplexity": _exp(loss),
            "loss": loss,
            "tokens": sum(counts),
            "perplexities": perplexities,
            "mean_perplexity": sum(perplexities) / len(perplexities),
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _loaded(model: Any, tokenizer: Any, device: str | None, dtype: str, trust_remote_code: bool) -> tuple[Any, Any]:
    if not isinstance(model, str):
        if tokenizer is None:
            raise ValueError("tokenizer: got None, allowed: the tokenizer of the model in memory")
        return model.eval(), tokenizer
    if importlib.util.find_spec("depthroute") is not None:
        importlib.import_module("depthroute")  # makes transformers know the family
    options = {"trust_remote_code": trust_remote_code}
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(model, **options)
    loaded = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **options
    )
    return loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval(), tokenizer


def _windows(ids: list[int], limit: int | None) -> Iterator[tuple[list[int], int]]:
    """Pieces of the sequence with at most `limit` inputs and the token behind them, and how many of a piece's first tokens are
    context alone. Each token but the first is predicted by one piece."""
    size = limit or len(ids)
    for first in range(1, len(ids), size):
        end = min(first + size, len(ids))
        begin = max(end - size - 1, 0)
        yield ids[begin:end], first - begin


@torch.no_grad()
def _negative_log_likelihoods(model: Any, windows: list[tuple[list[int], int]]) -> list[float]:
    """Of each window, summed over its tokens behind those that are context alone."""
    longest = max(len(ids) for ids, _ in windows) - 1
    inputs = torch.zeros(len(windows), longest, dtype=torch.long)
    mask = torch.zeros(len(windows), longest, dtype=torch.long)
    targets = torch.full((len(windows), longest), -100)
    for row, (ids, known) in enumerate(windows):  # padding on the right: nothing before it can see it
        inputs[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, known - 1 : len(ids) - 1] = torch.tensor(ids[known:])
        mask[row, : len(ids) - 1] = 1
    logits = model(input_ids=inputs.to(model.device), attention_mask=mask.to(model.device), use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.to(logits.device).flatten(), reduction="none", ignore_index=-100
    )
    return losses.view(len(windows), longest).double().sum(dim=1).tolist()
