# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Our models without their weights: shapes, the routing's initial values, and what is promised of them."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from depthroute import DepthRouteConfig, DepthRoutePreTrainedModel
from depthroute.errors import Refused, one_line
from depthroute.modeling.configuration_depthroute import read_backbone_config
from depthroute.modeling.modeling_depthroute import RESIDUALS
from depthroute.modeling.residual_standard import StandardResidual


def read_converted_config(folder: Path) -> DepthRouteConfig:
    """The configuration of a folder of ours.

    Raises:
        Refused: it is none.
    """
    try:
        config = read_backbone_config(folder) if folder.is_dir() else None
    except (ValueError, OSError, LookupError, TypeError, AttributeError, StrictDataclassError) as error:
        raise Refused(f"{folder}: {one_line(error)}") from error
    if not isinstance(config, DepthRouteConfig):
        got = "no folder" if config is None else f"model_type {config.model_type!r}"
        raise Refused(f"{folder}: got {got}, allowed: a folder that `depthroute convert` wrote")
    return config


def promises_equality(config: DepthRouteConfig) -> bool:
    """Whether a conversion computes at its start what its source computes, bit for bit: every anchored one whose residual
    can, and the standard residual."""
    residual = RESIDUALS[config.residual_type]
    return residual.starts_exactly and (config.depth_anchored or residual is StandardResidual)


def meta_model(
    config: DepthRouteConfig, ours: type[DepthRoutePreTrainedModel], where: str | Path = "configuration"
) -> DepthRoutePreTrainedModel:
    """The model without memory for its parameters.

    Args:
        config: its configuration.
        ours: its class.
        where: the configuration's file, for messages.

    Raises:
        Refused: a value of the configuration that only building finds out about: an activation or a rope type that there is
            none of, a number of heads that divides nothing; or no context at all, which not even building does.
    """
    if config.max_position_embeddings < 1:
        raise Refused(f"{where}: max_position_embeddings: got {config.max_position_embeddings}, allowed: ≥ 1")
    try:
        with torch.device("meta"):
            return ours(config)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        looked_at = ("hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
        values = ", ".join(f"{name} = {getattr(config, name, None)}" for name in looked_at)
        raise Refused(
            f"{where}: no model can be built of it ({type(error).__name__}: {one_line(error)}), "
            f"got {values}; allowed: values that transformers knows"
        ) from error


def initial_value(model: DepthRoutePreTrainedModel, key: str, dtype: torch.dtype) -> Tensor:
    """The value at which a routing parameter starts, as `_init_weights` sets it. `model` is on the meta device and stays so:
    only the parameters of one read are given memory, and only for a moment."""
    owner = model.get_submodule(key.rpartition(".")[0])
    empty = dict(owner.named_parameters(recurse=False))  # a module that has parameters of the routing has no others
    try:
        for name, parameter in empty.items():
            setattr(owner, name, nn.Parameter(torch.empty_like(parameter, device="cpu", dtype=dtype)))
        model._init_weights(owner)
        return model.get_parameter(key).detach()
    finally:
        for name, parameter in empty.items():
            setattr(owner, name, parameter)


def initial_routing(model: DepthRoutePreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """All of them, by key."""
    return {key: initial_value(model, key, dtype) for key in model.routing_parameters()}


def moved_parameters(
    model: DepthRoutePreTrainedModel, keys: Iterable[str], read: Callable[[str], Tensor], written: torch.dtype
) -> list[str]:
    """Those routing parameters that are not where a freshly initialised model has them. One is in memory at a time.

    Args:
        model: on the meta device.
        keys: the routing parameters to look at.
        read: the value of one.
        written: the type that they were written in at the start: initial values are rounded to it.
    """
    moved = []
    for key in keys:
        value = read(key)
        if not torch.equal(value, initial_value(model, key, written).to(value.dtype)):
            moved.append(key)
    return moved


def moved_routing(model: DepthRoutePreTrainedModel, written: torch.dtype | None = None) -> list[str]:
    """`moved_parameters` of a model with all its weights. `written`: by default the model's type."""
    parameters = model.routing_parameters()
    empty = meta_model(model.config, type(model))
    return moved_parameters(empty, parameters, lambda key: parameters[key].detach(), written or model.dtype)
