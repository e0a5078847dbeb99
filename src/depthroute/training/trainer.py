# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with a group of its own for the routing, and perplexity beside every validation loss."""

import logging
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from ..errors import Refused
from .health import RoutingHealthCallback
from .lora import check_adapters
from .optimizer import ROUTING_GROUP, routing_group, separate_routing
from .precision import low_precision_warning
from .routing_state import freeze_base, routing_parameters


logger = logging.getLogger(__name__)

# these update weights inside the backward pass, with one learning rate for all
_WITHOUT_GROUPS = ("lomo", "adalomo")


class _OwnSteps(TrainerCallback):
    """Remembers how many steps this call of `train` did, and the learning rate with which the routing was last updated, before
    the schedule moves on."""

    def __init__(self) -> None:
        self.count = 0
        self.routing_rate: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count = 0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.count += 1
        groups = optimizer.param_groups if optimizer is not None else []
        self.routing_rate = next((float(group["lr"]) for group in groups if group.get("name") == ROUTING_GROUP), None)


class DepthRouteTrainer(Trainer):
    """transformers' Trainer for DepthRoute models, wrapped by PEFT or not. A model without routing trains as in Trainer.

    Routing parameters get their own optimizer group: no weight decay, and `args.routing_learning_rate` (default:
    `default_routing_learning_rate`). It is logged beside `learning_rate`;
    `eval_perplexity` beside `eval_loss`, its exponential: exact per token where every example has as many labels, as
    packed blocks have. `args.freeze_base` trains the routing alone. The arguments may be plain TrainingArguments.

    `args.routing_health_steps` adds a `RoutingHealthCallback`. Trainable parameters of 16 bits are warned of, with the fraction of them that cannot move at this learning rate.

    Resumed from a checkpoint of the last step it trains no step; Trainer would do one more, except at the end of an epoch.

    Other trainers get the same by inheriting from both: `class RoutedSFTTrainer(DepthRouteTrainer, SFTTrainer): pass`.

    Raises:
        Refused: `freeze_base` on a model without routing parameters, an `optim` without parameter groups, or active adapters
            that freeze or drop the routing (`check_adapter_config`).
    """

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any):
        optim = getattr(args, "optim", None)
        if optim in _WITHOUT_GROUPS:
            raise Refused(f"optim: got {getattr(optim, 'value', optim)!s}, allowed: an optimizer with parameter groups")
        if model is not None and getattr(args, "freeze_base", False):
            freeze_base(model)
        super().__init__(model=model, args=args, **kwargs)
        check_adapters(self.model)
        if warning := low_precision_warning(self.model, self.args.learning_rate):
            logger.warning(warning)
        routing = routing_parameters(self.model)
        if routing and not any(parameter.requires_grad for parameter in routing.values()):
            logger.warning("the routing is not trained: none of its %d parameters requires a gradient", len(routing))
        self._own_steps = _OwnSteps()
        self.add_callback(self._own_steps)
        if (steps := getattr(self.args, "routing_health_steps", None)) is not None:
            self.add_callback(RoutingHealthCallback(self, steps))

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        if getattr(self.args, "freeze_base", False):
            freeze_base(model)
        return model

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that `args.optim` names, with the routing in its last group; one that was given is left as it is."""
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        if not given:
            rate = getattr(self.args, "routing_learning_rate", None)
            group = routing_group(self.model if model is None else model, self.args.learning_rate, rate)
            separate_routing(optimizer, group)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As Trainer's; adds `routing_learning_rate` and perplexities to `logs`, and takes the mean of no losses out of them."""
        if "learning_rate" in logs and self._own_steps.routing_rate is not None:
            logs["routing_learning_rate"] = self._own_steps.routing_rate
        if not self._own_steps.count:
            logs.pop("train_loss", None)
        for name in [name for name in logs if name.startswith("eval") and name.endswith("_loss")]:
            # a tensor's exponential overflows to infinity, math.exp raises
            logs[f"{name.removesuffix('_loss')}_perplexity"] = (
                torch.tensor(logs[name], dtype=torch.float64).exp().item()
            )
        super().log(logs, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # Trainer looks for the last step only behind a step
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)
        else:
            self.control.should_training_stop = True
