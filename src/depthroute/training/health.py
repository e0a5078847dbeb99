# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Routing health while a model trains: numbers by depth for the Trainer's loggers, and warnings that say what to change."""

import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from ..errors import Refused
from .loss_spikes import SpikeDetector
from .optimizer import ROUTING_GROUP, fast_routing_warning
from .routing_state import routed_model, routing_parameters
from .routing_statistics import RouteStatistics, StatisticsRecord, norms_by_depth


logger = logging.getLogger(__name__)

PATIENCE = 3
"""So many measurements in a row a router has to be without gradient, or without movement, before it is called dead. At the
start of a conversion some parameters have no gradient until others have moved."""


class RoutingHealthCallback(TrainerCallback):
    """Measures the routing of the first batch of every `steps`-th step, in the forward pass that trains on it: no pass of its
    own, no gradient, and a few numbers kept of each read. `trainer.add_callback(RoutingHealthCallback(trainer, steps=50))`;
    DepthRouteTrainer adds it where `routing_health_steps` is given.

    Through `trainer.log`, so to whatever reports: `routing_max_weight/03_attn`, `routing_normalized_entropy/03_attn` (entropy
    / ln S), `routing_gradient_norm/03_attn`, likewise `…/03_mlp`, `…/final`, and `…/03_attn/value`, `…/03_attn/stream_0` where a read
    has several routes; `…/mean` over depth, and the gradient's norm `…/total`. Gradients are as the optimizer sees them,
    accumulated and clipped; DeepSpeed does not show them. Weights are of this process's batch, without its padding.

    Warns, on the main process, once until it is over, of
    - a routing rate with which a logit moves by more than 1 in a step (`optimizer.fast_routing_warning`);
    - dead routers: a gradient of exactly zero, or parameters that do not move though their rate is not zero;
    - collapsed routing: one source has a weight of 0.99 for most tokens, in most reads;
    - loss spikes among the losses that are logged (`SpikeDetector`).

    A model without routing is watched for loss spikes alone. Adapters, checkpointing, DDP and FSDP make no difference.

    Args:
        trainer: the trainer that it is added to.
        steps: at least 1.

    Attributes:
        warnings: what was warned of, in order.

    Raises:
        Refused: `steps` below 1.
    """

    def __init__(self, trainer: Trainer, steps: int):
        if steps < 1:
            raise Refused(f"routing_health_steps: got {steps}, allowed: at least 1")
        self.trainer = trainer
        self.steps = steps
        self.warnings: list[str] = []
        self._hooks: list[Any] = []
        self._armed = False
        self._record: StatisticsRecord | None = None
        self._pending: dict[str, float] = {}
        self._spikes = SpikeDetector()
        self._lasting: set[str] = set()
        self._before: dict[str, Tensor] = {}
        self._groups: list[int] = []
        self._rate = 0.0
        self._without_gradient: Counter[str] = Counter()
        self._without_movement: Counter[str] = Counter()

    # --- what the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        owner = routed_model(self.trainer.model)
        if owner is None:
            return
        decoder = owner.base_model
        self._config = decoder.config
        self._hooks = [
            decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            decoder.register_forward_hook(self._after_forward),
        ]
        routing = self._trainable()
        if routing_parameters(self.trainer.model) and not routing:
            self._warn(
                "dead routers: no routing parameter requires a gradient; with PEFT use depthroute.training.lora_config"
            )
        held = {id(parameter) for parameter in routing.values()}
        groups = optimizer.param_groups
        mine = [index for index, group in enumerate(groups) if any(id(p) in held for p in group["params"])]
        self._groups = mine or list(range(len(groups)))  # some engines' optimizers hold tensors of their own
        # DepthRouteTrainer and `optimizer_groups` name the group, and have warned of its rate when they made it
        if mine and all(group.get("name") != ROUTING_GROUP for group in groups):
            rate = max(float(groups[index].get("initial_lr", groups[index]["lr"])) for index in mine)
            self._warn(fast_routing_warning(self._config, rate))
        self._remember()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._armed = self._measures(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._hooks or not self._measures(state.global_step + 1) or self.trainer.is_deepspeed_enabled:
            return
        gradients = {name: parameter.grad for name, parameter in self._trainable().items()}
        norms = norms_by_depth(self.trainer.model, gradients)
        self._note("routing_gradient_norm", norms)
        if norms:
            self._pending["routing_gradient_norm/total"] = sum(norm**2 for norm in norms.values()) ** 0.5
        dead = self._lasting_zeros(self._without_gradient, norms)
        self._judge(
            "gradient",
            f"dead routers: the gradient of {_named(dead)} was exactly zero {PATIENCE} times in a row; what cuts it off may be a "
            "softmax that is saturated (lower routing_learning_rate, go back to a checkpoint before), a null source or gate "
            "at zero, or reentrant checkpointing over a frozen base (gradient_checkpointing_kwargs={'use_reentrant': False})",
            bool(dead),
        )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self._hooks:
            self._rate = max(self._rate, *(float(optimizer.param_groups[index]["lr"]) for index in self._groups))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._hooks or not self._measures(state.global_step):
            return
        if self._record is not None:
            self._judge_weights(self._record.statistics())
            self._record = None
        self._judge_movement()
        # some trainers average their own numbers over the time between two entries: no entry of ours in between where avoidable
        if not control.should_log:
            self._flush()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        loss = float(logs["loss"])
        middle = self._spikes.exceeded(loss)
        rate = logs.get("routing_learning_rate")
        self._judge(
            "spike",
            f"loss spike: {loss:.4g} at step {state.global_step}, the median of the last losses is {middle or 0:.4g}; if it stays, "
            "go back to a checkpoint before and lower routing_learning_rate"
            f"{'' if rate is None else f' (now {rate:.3g})'}, lengthen the warm-up or lower max_grad_norm",
            middle is not None,
        )
        self._flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._flush()

    # --- the forward pass

    def _before_forward(self, module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not self._armed:
            return None
        self._armed = False
        mask = kwargs.get("attention_mask")
        keep = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._record = StatisticsRecord(self._config, keep)
        return args, {**kwargs, "routing": self._record}

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if self._record is not None:
            self._record.is_open = False

    # --- judgements

    def _judge_weights(self, statistics: dict[str, RouteStatistics]) -> None:
        if not statistics:
            return
        self._note("routing_max_weight", {label: s.max_weight for label, s in statistics.items()}, mean=True)
        entropies = {label: s.normalized_entropy for label, s in statistics.items()}
        self._note("routing_normalized_entropy", entropies, mean=True)
        collapsed = [s.top_source for s in statistics.values() if s.collapsed > 0.5]
        source = Counter(collapsed).most_common(1)[0][0] if collapsed else ""
        self._judge(
            "collapse",
            f"collapsed routing: in {len(collapsed)} of {len(statistics)} reads one source takes all for most tokens, most often "
            f"{source!r}; lower routing_learning_rate and go back to a checkpoint before; routing over states "
            "(depth_source='state') is known for it, depth_source='output' is not",
            len(collapsed) > len(statistics) / 2,
        )

    @torch.no_grad()
    def _judge_movement(self) -> None:
        now = {name: parameter.detach() for name, parameter in self._trainable().items() if name in self._before}
        moved = norms_by_depth(self.trainer.model, {name: now[name] - self._before[name] for name in now})
        if self._rate > 0:
            still = self._lasting_zeros(self._without_movement, moved)
            self._judge(
                "movement",
                f"dead routers: the parameters of {_named(still)} have not moved for {PATIENCE * self.steps} steps; they may be in "
                "no group of the optimizer (depthroute.training.optimizer_groups), or of 16 bits and their steps rounded away "
                "(load the model in float32)",
                bool(still),
            )
        self._remember()

    def _lasting_zeros(self, counts: Counter[str], norms: dict[str, float]) -> list[str]:
        for label, norm in norms.items():
            counts[label] = counts[label] + 1 if norm == 0 else 0
        return [label for label in norms if counts[label] >= PATIENCE]

    def _judge(self, kind: str, message: str, holds: bool) -> None:
        if holds and kind not in self._lasting:
            self._warn(message)
        (self._lasting.add if holds else self._lasting.discard)(kind)

    def _warn(self, message: str | None) -> None:
        if message is not None:
            self.warnings.append(message)
            if self.trainer.is_world_process_zero():
                logger.warning(message)

    # --- helpers

    def _measures(self, step: int) -> bool:
        return step % self.steps == 0

    def _trainable(self) -> dict[str, torch.nn.Parameter]:
        found = routing_parameters(self.trainer.model)
        return {name: parameter for name, parameter in found.items() if parameter.requires_grad}

    def _remember(self) -> None:
        trainable = self._trainable()
        # DeepSpeed's third stage leaves nothing of a parameter between its uses
        lasting = {name: p for name, p in trainable.items() if p.numel() or not self.trainer.is_deepspeed_enabled}
        self._before = {name: parameter.detach().clone() for name, parameter in lasting.items()}
        self._rate = 0.0

    def _note(self, name: str, values: dict[str, float], mean: bool = False) -> None:
        self._pending.update({f"{name}/{label}": value for label, value in values.items()})
        if mean:
            self._pending[f"{name}/mean"] = sum(values.values()) / len(values)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        if pending:
            self.trainer.log(pending)


def _named(labels: list[str]) -> str:
    shown = ", ".join(labels[:4])
    return f"{len(labels)} reads ({shown}, ...)" if len(labels) > 4 else f"read {shown}"
