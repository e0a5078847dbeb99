# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Adapters through PEFT: a LoraConfig that trains and keeps the routing, and a check of any other configuration."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import Refused
from ..extras import require
from .routing_state import routed_model, routing_module_names, routing_parameters


if TYPE_CHECKING:
    from peft import LoraConfig

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""Parameters, not modules: one tensor for all experts of a layer."""

TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "Model": "FEATURE_EXTRACTION",
}
"""End of a model class's name → PEFT's name of its task, under which PEFT keeps the head too."""

# what PEFT's adapters on parameters, which experts are, cannot do
_NOT_ON_EXPERTS = ("use_dora", "lora_dropout", "lora_bias")


def lora_config(model: nn.Module, **options: Any) -> "LoraConfig":
    """A LoraConfig for a DepthRoute model: low-rank adapters on the projections of attention and MLP (and on sparse experts),
    and the reads trained whole, each adapter with a copy of its own.

    Args:
        model: a DepthRoute model, with or without a head.
        options: of `peft.LoraConfig`; each that is given wins (`r`, `lora_alpha`, `use_rslora`, `use_dora`, ...). To
            `modules_to_save` the reads are added. By default `target_modules` are the projections, `target_parameters` the
            experts, `task_type` what fits the model's class. DoRA, dropout and biases need `target_parameters=[]` where there
            are experts.

    Raises:
        Refused: peft is not installed; an option freezes or drops the routing (`check_adapter_config`); the model has no
            routing; or an option that PEFT does not have on experts.
    """
    peft = require("peft", "train")
    owner = routed_model(model)
    if owner is None or not routing_parameters(model):
        raise Refused(
            "model: got one without routing, allowed: a model with depth reads (others need only peft.LoraConfig)"
        )
    names = {name.rpartition(".")[2] for name, _ in owner.base_model.layers.named_modules()}
    options.setdefault("target_modules", [name for name in PROJECTIONS if name in names])
    if "experts" in names:
        experts = options.setdefault("target_parameters", list(EXPERTS))
        for name in _NOT_ON_EXPERTS:
            if experts and options.get(name):
                raise Refused(
                    f"{name}: got {options[name]} with adapters on experts, which PEFT does not have; allowed: without, or "
                    "target_parameters=[] to leave the experts as they are"
                )
    task = next(task for end, task in TASKS.items() if type(owner).__name__.endswith(end))
    options.setdefault("task_type", task)
    saved = list(options.pop("modules_to_save", None) or [])
    saved += [name for name in routing_module_names(model) if name not in saved]
    config = peft.LoraConfig(modules_to_save=saved, **options)
    check_adapter_config(model, config)
    return config


def check_adapter_config(model: nn.Module, config: Any) -> None:
    """Check that adapters of a PEFT configuration train the model's routing and keep it when they are saved.

    PEFT freezes what no adapter names, and saves nothing of it. That is so for reads that are not in `modules_to_save`: a
    converted model would then train without its routing, and nothing would tell. To leave a trained routing as it is on
    purpose, train with transformers' own Trainer.

    Args:
        model: a DepthRoute model, adapted already or not; one without routing passes.
        config: any `peft.PeftConfig`.

    Raises:
        Refused: `modules_to_save` lacks a read; `target_modules` or `target_parameters` name one; layers are replicated; or
            the routing is parameters of the layers (`rezero`, `layerscale`), which PEFT cannot save.
    """
    parameters = routing_parameters(model)
    if not parameters:
        return
    needed = routing_module_names(model)  # refuses scales
    owner = routed_model(model)
    # as PEFT sees them: a decoder without a head has no `model.` in front
    paths = [name.removeprefix("model.") if owner.base_model is owner else name for name in parameters]
    modules = list(dict.fromkeys(path.rpartition(".")[0] for path in paths))

    for field, names in (("target_modules", modules), ("target_parameters", paths)):
        target = getattr(config, field, None)
        if target and target != "all-linear" and (hit := next((n for n in names if _targets(target, n)), None)):
            raise Refused(
                f"{field}: got {_shown(target)}, which hits {hit}; allowed: projections, the reads are trained whole "
                f"(modules_to_save={needed})"
            )
    if getattr(config, "layer_replication", None):
        raise Refused(
            f"layer_replication: got {config.layer_replication}, allowed: None, every read belongs to one layer's depth"
        )
    saved = getattr(config, "modules_to_save", None) or []
    # PEFT's own rule: the end of a module's path
    lost = {name.rpartition(".")[2] for name in modules if not any(name.endswith(end) for end in saved)}
    if lost:
        raise Refused(
            f"modules_to_save: got {_shown(saved) if saved else 'none'}, without {', '.join(sorted(lost))} the routing is "
            f"frozen and not saved; allowed: with {needed}, which depthroute.training.lora_config(model) adds"
        )


def check_adapters(model: nn.Module) -> None:
    """`check_adapter_config` for every active adapter of a model; one without adapters passes.

    Raises:
        Refused: as there.
    """
    wrapped: Any = model
    configs = getattr(wrapped, "peft_config", None)
    if not configs:
        return
    active = wrapped.active_adapters  # a property of PEFT's models, a method of transformers' own
    for name in active() if callable(active) else active:
        check_adapter_config(model, configs[name])


def _targets(target: str | Iterable[str], name: str) -> bool:
    """PEFT's rule: a string is a regular expression for the whole path, others are ends of it."""
    if isinstance(target, str):
        return re.fullmatch(target, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in target)


def _shown(names: str | Iterable[str]) -> str:
    return repr(names) if isinstance(names, str) else ", ".join(sorted(names))
