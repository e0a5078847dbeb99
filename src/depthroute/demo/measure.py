# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the demo measures of one model: loss on validation windows, two lm-eval tasks, and a generated sample."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..evaluation import evaluate


CHOICE, RUNNING_TEXT = "depthroute_choice", "depthroute_perplexity"
PROMPT = 'def read_lines(path):\n    """'


@dataclass(frozen=True)
class Metric:
    """One number per item of a model, and how it is shown."""

    key: str
    label: str
    higher_is_better: bool


METRICS = (
    Metric("validation_loss", "validation loss (nats/token)", False),
    Metric("choice_accuracy", f"{CHOICE}, accuracy", True),
    Metric("bits_per_byte", f"{RUNNING_TEXT}, bits per byte", False),
)


@dataclass(frozen=True)
class Measurement:
    """One model.

    Attributes:
        items: by metric, one number per item: mean loss of a window; 1 or 0 per document; bits per document.
        weights: by metric, what the items are divided by: bytes per document.
        sample: the prompt and its greedy continuation.
    """

    items: dict[str, list[float]]
    weights: dict[str, list[float]]
    sample: str

    def value(self, key: str) -> float:
        """The metric over all items."""
        return math.fsum(self.items[key]) / math.fsum(self.weights.get(key, [1.0] * len(self.items[key])))

    @property
    def perplexity(self) -> float:
        """exp of the validation loss."""
        return math.exp(self.value("validation_loss"))


@torch.no_grad()
def window_losses(
    model: Any, windows: Tensor, progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda items: items
) -> list[float]:
    """Mean next-token loss of each window [N, T], in nats per token."""
    model.eval()
    losses = []
    for window in progress(windows):
        ids = window[None].to(model.device)
        losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss.item())
    return losses


@torch.no_grad()
def sample(model: Any, tokenizer: Any, tokens: int) -> str:
    """`PROMPT` and at most `tokens` tokens of its greedy continuation."""
    model.eval()
    inputs = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).to(model.device)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    names = ("input_ids", "attention_mask")
    output = model.generate(
        **{name: inputs[name] for name in names}, max_new_tokens=tokens, do_sample=False, pad_token_id=pad
    )
    return tokenizer.decode(output[0], skip_special_tokens=True)


def measure(
    model: Any,
    tokenizer: Any,
    windows: Tensor,
    documents: int | None,
    sample_tokens: int,
    progress: Callable[[Iterable[Any]], Iterable[Any]] = lambda items: items,
) -> Measurement:
    """Everything about one model in memory, in its own dtype.

    Args:
        windows: validation token ids [N, T].
        documents: of each lm-eval task; None: all.
        progress: wraps the windows, for a progress bar; lm-eval draws its own.
    """
    result = evaluate(model, [CHOICE, RUNNING_TEXT], batch_size=4, limit=documents, tokenizer=tokenizer)
    choice = sorted(result["samples"][CHOICE], key=lambda item: item["doc_id"])
    running = sorted(result["samples"][RUNNING_TEXT], key=lambda item: item["doc_id"])
    totals = [item["bits_per_byte"] for item in running]  # log-likelihood in nats, and bytes
    return Measurement(
        items={
            "validation_loss": window_losses(model, windows, progress),
            "choice_accuracy": [float(item["acc"]) for item in choice],
            "bits_per_byte": [-loglikelihood / math.log(2) for loglikelihood, _ in totals],
        },
        weights={"bits_per_byte": [float(count) for _, count in totals]},
        sample=sample(model, tokenizer, sample_tokens),
    )
