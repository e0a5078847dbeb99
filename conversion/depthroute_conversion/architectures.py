# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Which of transformers' classes are converted, to which of ours, and what they compute that must stay equal."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MistralModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeModel,
)

from depthroute import (
    DepthRouteForCausalLM,
    DepthRouteForSequenceClassification,
    DepthRouteModel,
    DepthRoutePreTrainedModel,
)

from .keys import KeyRules, Rename


@dataclass(frozen=True)
class Architecture:
    """One class of transformers and ours in its place.

    Attributes:
        model_type: the configuration's.
        stock: transformers' class.
        ours: the class that takes over its tensors.
        output: the entry of its output that a conversion must keep.
        head: the part of the name of its head's tensors, None where it has none.
    """

    model_type: str
    stock: type[PreTrainedModel]
    ours: type[DepthRoutePreTrainedModel]
    output: str
    head: str | None

    @property
    def name(self) -> str:
        """As it stands in a configuration's `architectures`."""
        return self.stock.__name__

    @property
    def has_language_head(self) -> bool:
        """Whether its output are logits over a vocabulary, of a head that may be tied to the embedding."""
        return self.head == "lm_head"

    def rules(self, keys: Collection[str]) -> KeyRules:
        """How a checkpoint with these keys is named against ours: a model with a head may have been saved without the prefix
        `model.`, one without a head with it."""
        prefixed = any(key.startswith("model.") for key in keys)
        renames: tuple[Rename, ...] = ()
        if self.head is not None and not prefixed:
            same = f"{self.head}.{{rest}}"
            renames = (Rename(same, same), Rename("{rest}", "model.{rest}"))
        elif self.head is None and prefixed:
            renames = (Rename("model.{rest}", "{rest}"),)
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if self.has_language_head else {}
        return KeyRules(renames, DERIVED, tied)

    @torch.no_grad()
    def evaluate(self, model: PreTrainedModel, input_ids: Tensor, last: int = 0) -> Tensor:
        """What must be equal, of the stock model or of ours: logits [B, T, V] or hidden states [B, T, D] of the `last` positions
        (0: all), or a classifier's scores [B, labels]. A classifier without a padding token takes one sequence at a time."""
        options = {"logits_to_keep": last} if self.has_language_head else {}
        rows = input_ids.split(1) if self.head == "score" else (input_ids,)
        computed = torch.cat([getattr(model(input_ids=row, use_cache=False, **options), self.output) for row in rows])
        return computed[:, -last:] if self.head is None else computed


# checkpoints of old releases hold one copy of the rotary frequencies per layer
DERIVED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq")
"""Source keys that are no weights, as regular expressions."""

_FAMILIES: dict[str, tuple[type[PreTrainedModel], ...]] = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Model, Qwen3ForSequenceClassification),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeModel, Qwen3MoeForSequenceClassification),
    "llama": (LlamaForCausalLM, LlamaModel, LlamaForSequenceClassification),
    "mistral": (MistralForCausalLM, MistralModel, MistralForSequenceClassification),
    "qwen2": (Qwen2ForCausalLM, Qwen2Model, Qwen2ForSequenceClassification),
}
_KINDS: tuple[tuple[type[DepthRoutePreTrainedModel], str, str | None], ...] = (
    (DepthRouteForCausalLM, "logits", "lm_head"),
    (DepthRouteModel, "last_hidden_state", None),
    (DepthRouteForSequenceClassification, "logits", "score"),
)

ARCHITECTURES: dict[str, Architecture] = {
    stock.__name__: Architecture(model_type, stock, *kind)
    for model_type, classes in _FAMILIES.items()
    for stock, kind in zip(classes, _KINDS, strict=True)
}
"""By the stock class's name. A model type's first one is its language model."""


def architectures_of(model_type: str | None) -> list[Architecture]:
    """A model type's architectures, its language model first; none where it is not hosted."""
    return [item for item in ARCHITECTURES.values() if item.model_type == model_type]


def language_models() -> str:
    """The language models among them, for messages."""
    return " or ".join(item.name for item in ARCHITECTURES.values() if item.has_language_head)


def choose_architecture(
    model_type: str, declared: str | None, keys: Collection[str]
) -> tuple[Architecture, str | None]:
    """The architecture of a checkpoint, and a line that says what was decided where its configuration and its keys disagree.

    The keys decide about a language head: published embedding models name the language model in `architectures`, and hold none
    of its head and no prefix `model.`. A language model whose keys do have the prefix is one, tied or not: whether its head is
    missing is then seen from its keys.

    Args:
        model_type: a hosted one.
        declared: the one name in `architectures`, None where there is none.
        keys: the checkpoint's.
    """
    language, base, classifier = architectures_of(model_type)
    if "score.weight" in keys:
        found: Architecture | None = classifier
    elif "lm_head.weight" in keys:
        found = language
    else:
        found = base if "embed_tokens.weight" in keys else None
    if declared is None:
        chosen = found or language
        return chosen, f"architectures: none given, {chosen.name} by its keys"
    chosen = ARCHITECTURES[declared]
    if found is None or found is chosen or classifier in (found, chosen):
        return chosen, None  # what a classifier lacks or has too much is named when its keys are matched
    reason = "a language head" if found is language else "no language head and no prefix model."
    return found, f"architectures: got {declared}, taken as {found.name}: its keys have {reason}"
