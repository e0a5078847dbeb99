# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Optimizer groups: routing parameters apart from the rest, with their own learning rate and no weight decay."""

import logging
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..modeling.depth_schedule import read_count
from ..modeling.modeling_depthroute import build_residual
from .routing_state import routed_model, routing_parameters


logger = logging.getLogger(__name__)

ROUTING_GROUP = "routing"
"""The entry `name` of the routing parameters' group."""


def default_routing_learning_rate(config: Any, learning_rate: float) -> float:
    """The routing parameters' learning rate where none is given: 10 times the base rate where the mix is added to the
    stream, 2 times where it replaces it or mixes two streams, the base rate for the baselines.

    Args:
        config: a model's configuration.
        learning_rate: the base rate.
    """
    return build_residual(config).routing_learning_rate_factor * learning_rate


def fast_routing_warning(config: Any, routing_learning_rate: float) -> str | None:
    """One line where one Adam step moves a routing logit by more than about 1, else None. Each of the D entries of a query moves
    by about the learning rate, all in the direction of the same normalised key. Baselines have no queries, and no such line."""
    if not read_count(config):
        return None
    step = routing_learning_rate * config.hidden_size * config.depth_logit_scale
    if step <= 1:
        return None
    return (
        f"routing_learning_rate: got {routing_learning_rate:g}, with which a routing logit moves by up to about {step:.1f} in one "
        f"step (rate times width {config.hidden_size}); above 1 the loss may spike, at or below "
        f"{routing_learning_rate / step:.1g} it should not"
    )


def routing_group(
    model: nn.Module, learning_rate: float, routing_learning_rate: float | None = None
) -> dict[str, Any] | None:
    """The optimizer group of the trainable routing parameters, or None where there are none.

    Args:
        model: a model, wrapped or not.
        learning_rate: the base rate.
        routing_learning_rate: default: `default_routing_learning_rate`.
    """
    routing = [parameter for parameter in routing_parameters(model).values() if parameter.requires_grad]
    if not routing:
        return None
    config = routed_model(model).config
    rate = (
        default_routing_learning_rate(config, learning_rate) if routing_learning_rate is None else routing_learning_rate
    )
    if warning := fast_routing_warning(config, rate):
        logger.warning(warning)
    return {"name": ROUTING_GROUP, "params": routing, "lr": rate, "weight_decay": 0.0}


def without_routing(groups: list[dict[str, Any]], routing: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The groups without the parameters of the routing group; those that have none left are dropped."""
    taken = {id(parameter) for parameter in routing["params"]} if routing else set()
    kept = [{**group, "params": [p for p in group["params"] if id(p) not in taken]} for group in groups]
    return [group for group in kept if group["params"]]


def optimizer_groups(
    model: nn.Module, learning_rate: float, weight_decay: float, routing_learning_rate: float | None = None
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer: the trainable parameters with and without weight decay, divided as
    transformers' Trainer divides them, and the routing parameters.

    Args:
        model: a model, wrapped or not; one without routing has no third group.
        learning_rate: the base rate.
        weight_decay: of the first group; norms, biases and routing have none.
        routing_learning_rate: default: `default_routing_learning_rate`. A rate with which logits move by more than 1 in
            one step is warned of.

    Returns:
        Dicts with `params`, `lr` and `weight_decay`; the routing's comes last and has the entry `name` = "routing". None
        is empty.
    """
    # the method uses nothing of the instance
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for n, p in trainable if n in decayed], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for n, p in trainable if n not in decayed], "lr": learning_rate, "weight_decay": 0.0},
    ]
    routing = routing_group(model, learning_rate, routing_learning_rate)
    return without_routing(groups, routing) + ([routing] if routing else [])


def separate_routing(optimizer: torch.optim.Optimizer, routing: dict[str, Any] | None) -> None:
    """Move the routing parameters of a fresh optimizer into their own group, in place.

    Raises:
        ValueError: the optimizer does not hold them in its groups.
    """
    if routing is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not all(id(parameter) in held for parameter in routing["params"]):
        raise ValueError(
            f"optim: got {type(optimizer).__name__}, allowed: an optimizer whose groups hold the model's parameters, "
            "the routing needs a learning rate of its own"
        )
    optimizer.param_groups[:] = without_routing(optimizer.param_groups, routing)
    optimizer.add_param_group(dict(routing))
