# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a run starts from: a saved model, an ordinary checkpoint that is given routing as it is loaded, or a new model."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from ..errors import Refused, one_line
from ..files import check_model, download, is_hub_id
from ..modeling.configuration_depthroute import DepthRouteConfig
from ..modeling.modeling_depthroute import DepthRouteForCausalLM
from .arguments import RunArguments
from .characters import character_tokenizer
from .routing_state import routed_model


CHARACTERS = "characters"
"""The value of `tokenizer` that makes one out of the training documents."""

ALPHABET_DOCUMENTS = 10_000
"""How many documents of a stream are read for its characters."""


def check_start(run: RunArguments) -> None:
    """Refuse what no model can be had from, before data are read.

    Raises:
        Refused: neither or both of `model` and `from_scratch`, `fields` without a preset, a model that does not exist, a preset for a model that has
            routing, or a new model without `preset` or `tokenizer`.
    """
    if run.fields and run.model and run.preset is None:
        raise Refused("fields: got some for a model without preset, allowed: with preset, or from_scratch")
    if run.model and run.from_scratch:
        raise Refused(f"model, from_scratch: got both ({run.model}), allowed: one of the two")
    if not run.model and not run.from_scratch:
        raise Refused("model: got none, allowed: --model with a folder or hub id, or from_scratch")
    if run.from_scratch:
        if run.routing:
            raise Refused("routing: got a file for a model from scratch, allowed: with model")
        if not run.tokenizer:
            raise Refused("tokenizer: got none for a model from scratch, allowed: a folder, a hub id, or characters")
        model_config(run, vocab_size=None)
    else:
        check_model(str(run.model))
    needed = not (run.forecast_only and told_without_tokenizer(run))
    if needed and run.tokenizer and run.tokenizer != CHARACTERS and is_hub_id(run.tokenizer):
        download(run.tokenizer, ["tokenizer*", "*.model", "vocab*", "merges.txt", "special_tokens_map.json", "config.json"],
                 field="tokenizer", local="a folder, characters")  # fmt: skip


def told_without_tokenizer(run: RunArguments) -> bool:
    """Whether what a run takes can be told without its tokenizer: the model's fields have the vocabulary's size, and the documents
    of a stream are not counted."""
    return run.stream and isinstance(run.from_scratch, dict) and "vocab_size" in run.from_scratch


def model_config(run: RunArguments, vocab_size: int | None) -> DepthRouteConfig:
    """The configuration of a new model.

    Args:
        run: `from_scratch`, and `preset` over it.
        vocab_size: where `from_scratch` has none.

    Raises:
        Refused: no preset, or a field or value that the configuration refuses.
    """
    fields: dict[str, Any] = dict(run.from_scratch) if isinstance(run.from_scratch, dict) else {}
    fields |= own_fields(run)
    preset = fields.pop("preset", None)
    preset = run.preset or preset
    if preset is None:
        raise Refused("from_scratch: got no preset, allowed: one of `depthroute presets`, there or as --preset")
    if vocab_size is not None:
        fields.setdefault("vocab_size", vocab_size)
    try:
        return DepthRouteConfig.from_preset(preset, **fields)
    except (ValueError, TypeError) as error:
        raise Refused(f"from_scratch: {one_line(error)}") from error


def load_tokenizer(run: RunArguments, texts: Iterable[str]) -> Any:
    """The run's tokenizer; `texts` are those of the training documents, for one that is made of their characters."""
    if run.tokenizer == CHARACTERS:
        return character_tokenizer(islice(texts, ALPHABET_DOCUMENTS) if run.stream else texts)
    return AutoTokenizer.from_pretrained(run.tokenizer or run.model)


def load_model(run: RunArguments, tokenizer: Any = None, seed: int = 42) -> Any:
    """The model to train, in `run.dtype`: float32 masters by default.

    Args:
        run: what to start from.
        tokenizer: of a new model.
        seed: of a new model. The same seed gives the same base weights under every preset.

    Raises:
        Refused: the checkpoint lacks weights other than the routing's, which then starts at its initial values; or `preset`
            is given and the checkpoint is a DepthRoute model.
    """
    options = {"attn_implementation": run.attn_implementation} if run.attn_implementation else {}
    dtype = getattr(torch, run.dtype)
    if run.from_scratch:
        config = new_config(run, tokenizer)
        set_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    loading: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, **options}
    if run.preset is None:
        model, info = AutoModelForCausalLM.from_pretrained(run.model, **loading)
    else:
        config = routed_config(run)
        model, info = DepthRouteForCausalLM.from_pretrained(run.model, config=config, **loading)
    owner = routed_model(model)
    routing = owner.routing_parameters() if owner is not None else {}
    if missing := sorted(set(info["missing_keys"]) - set(routing)):
        raise Refused(f"{run.model}: missing weights: {', '.join(missing)}")
    if run.preset is not None and (unknown := sorted(info["unexpected_keys"])):
        raise Refused(
            f"{run.model}: weights without a place: {', '.join(unknown)}; allowed: depthroute convert tells more"
        )
    return model


def new_config(run: RunArguments, tokenizer: Any) -> DepthRouteConfig:
    """The configuration of a new model for this tokenizer.

    Raises:
        Refused: as `model_config`, or the tokenizer has more tokens than `vocab_size`.
    """
    config = model_config(run, len(tokenizer))
    if len(tokenizer) > config.vocab_size:
        raise Refused(
            f"vocab_size: got {config.vocab_size}, allowed: at least {len(tokenizer)}, tokens of the tokenizer"
        )
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return config


def routed_config(run: RunArguments) -> DepthRouteConfig:
    """The configuration of an ordinary checkpoint with `preset`'s routing, anchored unless `fields` say otherwise: it starts as
    what it was.

    Raises:
        Refused: the checkpoint is a DepthRoute model already, or no backbone of the family.
    """
    base = AutoConfig.from_pretrained(run.model)
    if base.model_type == "depthroute":
        raise Refused(
            f"preset: got {run.preset!r}, but {run.model} has routing already ({base.preset_name}); allowed: an ordinary "
            "checkpoint, or no preset"
        )
    anchored = {} if run.preset == "standard" else {"depth_anchored": True}
    try:
        return DepthRouteConfig.from_preset(str(run.preset), base=base, **{**anchored, **own_fields(run)})
    except (ValueError, TypeError) as error:
        raise Refused(one_line(error)) from error


def own_fields(run: RunArguments) -> dict[str, Any]:
    """The configuration fields that the run gives beside its preset."""
    return dict(run.fields) if isinstance(run.fields, dict) else {}
