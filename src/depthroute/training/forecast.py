# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a run will take, before it is started: tokens exactly, memory by arithmetic, time from two steps that are thrown away."""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..errors import Refused
from ..modeling.configuration_depthroute import HOSTED_MODEL_TYPES, DepthRouteConfig
from .arguments import DepthRouteTrainingArguments
from .engines import engine_of, low_precision_of
from .memory import ENGINES, training_memory
from .routing_state import routing_parameters


GIB = 2**30


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    Attributes:
        parameters, trainable: how many.
        steps: of the optimizer.
        tokens_per_step: B · T, over accumulation and processes.
        tokens: trained on in all.
        flops: of all forward and backward passes, without recomputation: 6 per token and weight of a product (4 where the
            base is frozen), and attention's.
        memory: bytes per process, by what takes them; see `training_memory`. Empty for a model of another family.
        step_seconds: of one step without the optimizer, evaluation and saving, measured; None where it was not.
        seconds: of all steps at that rate.
        not_measured: why there is no time.
    """

    parameters: int
    trainable: int
    steps: int
    tokens_per_step: int
    tokens: int
    flops: float
    memory: dict[str, int]
    step_seconds: float | None = None
    seconds: float | None = None
    not_measured: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For the results."""
        return asdict(self)

    def lines(self) -> dict[str, str]:
        """The same as text, for a table."""
        unit, name_of_unit = (GIB, "GiB") if self.memory.get("total", 0) >= GIB / 10 else (2**20, "MiB")
        parts = ", ".join(f"{name} {size / unit:.2f}" for name, size in self.memory.items() if name != "total" and size)
        whole = f"about {self.memory.get('total', 0) / unit:.2f} {name_of_unit} ({parts})"
        time_line = f"not estimated: {self.not_measured}"
        if self.seconds is not None and self.step_seconds is not None:
            rate = self.tokens_per_step / self.step_seconds
            time_line = f"about {duration(self.seconds)} (estimate: {rate:,.0f} tokens per second in a warm-up step)"
        return {
            "parameters": f"{self.parameters:,}, trained {self.trainable:,}",
            "steps": f"{self.steps:,} of {self.tokens_per_step:,} tokens",
            "tokens": f"{self.tokens:,}",
            "work": f"{self.flops:.3g} floating-point operations",
            "memory per process": whole if self.memory else "not estimated: another family",
            "time": time_line,
        }


def duration(seconds: float) -> str:
    """A time for people: the two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{max(seconds, 0.1):.1f} s"


def set_accumulation(training: DepthRouteTrainingArguments, global_batch_size: int | None) -> None:
    """Accumulate so many batches that a step has `global_batch_size` examples over all processes.

    Raises:
        Refused: it is no multiple of what all processes take at once.
    """
    if global_batch_size is None:
        return
    at_once = training.train_batch_size * training.world_size
    if global_batch_size < 1 or global_batch_size % at_once:
        raise Refused(
            f"global_batch_size: got {global_batch_size}, allowed: a multiple of {at_once}, per_device_train_batch_size "
            "times the number of processes"
        )
    training.gradient_accumulation_steps = global_batch_size // at_once


def tokens_per_step(training: DepthRouteTrainingArguments, block_size: int) -> int:
    """Tokens of one optimizer step, over accumulation and processes."""
    examples = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    return examples * block_size


def set_steps(training: DepthRouteTrainingArguments, train_tokens: int | None, block_size: int) -> None:
    """Set `max_steps` so that at least `train_tokens` are trained on.

    Raises:
        Refused: not a positive number.
    """
    if train_tokens is None:
        return
    if train_tokens < 1:
        raise Refused(f"train_tokens: got {train_tokens}, allowed: at least 1")
    training.max_steps = math.ceil(train_tokens / tokens_per_step(training, block_size))


def evaluation_steps(
    training: DepthRouteTrainingArguments, eval_tokens: Sequence[int] | None, block_size: int
) -> list[int]:
    """The first steps at whose end so many tokens have been trained on.

    Raises:
        Refused: not a positive number, or more than the run has.
    """
    size = tokens_per_step(training, block_size)
    for tokens in eval_tokens or []:
        if tokens < 1 or (training.max_steps > 0 and math.ceil(tokens / size) > training.max_steps):
            most = training.max_steps * size
            raise Refused(f"eval_tokens: got {tokens}, allowed: 1 to {most}, the tokens of {training.max_steps} steps")
    return sorted({math.ceil(tokens / size) for tokens in eval_tokens or []})


def count_steps(training: DepthRouteTrainingArguments, blocks: int | None, block_size: int) -> tuple[int, int]:
    """Optimizer steps and tokens of a run, as Trainer counts them.

    Args:
        training: batch size, accumulation, steps or epochs.
        blocks: training examples, of which an epoch's last step may have fewer; None: a stream without end.
        block_size: T.
    """
    full = tokens_per_step(training, block_size)
    if blocks is None:
        return training.max_steps, training.max_steps * full
    per_batch = training.train_batch_size * training.world_size
    if training.dataloader_drop_last:
        batches, examples = blocks // per_batch, blocks // per_batch * per_batch
    else:
        batches = math.ceil(blocks / per_batch)
        # several processes get batches of one size: the first examples come again to fill the last ones
        examples = blocks if training.world_size == 1 else batches * per_batch
    steps_per_epoch = max(math.ceil(batches / training.gradient_accumulation_steps), 1)
    steps = training.max_steps
    if steps <= 0:
        steps = math.ceil(training.num_train_epochs * steps_per_epoch)
    epochs, rest = divmod(steps, steps_per_epoch)
    return steps, epochs * examples * block_size + rest * full


def training_flops(model: Any, block_size: int, tokens: int) -> float:
    """Floating-point operations of training on so many tokens, without those of recomputation: 6 for each weight of a product
    that a token meets (4 where the base is frozen: no gradients of weights), and attention's scores and mixes."""
    config = model.config
    routing = {id(parameter) for parameter in routing_parameters(model).values()}
    met = 0.0
    for name, parameter in model.named_parameters():
        if (
            parameter.ndim < 2
            or id(parameter) in routing
            or ("embed_tokens" in name and not config.tie_word_embeddings)
        ):
            continue
        experts = getattr(config, "num_experts", 0)
        share = config.num_experts_per_tok / experts if experts and ".experts." in name else 1.0
        met += parameter.numel() * share
    trainable = any(p.requires_grad and id(p) not in routing for p in model.parameters())
    heads = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    # forward: scores and mix are 4 · T · width per token and layer over the whole square, half of it under a causal mask
    attention = 3 * 2 * config.num_hidden_layers * block_size * heads
    return tokens * ((6 if trainable else 4) * met + attention)


def measured_step(model: Any, training: DepthRouteTrainingArguments, block_size: int) -> float:
    """Seconds of one optimizer step's forward and backward passes: of two batches of random token ids on the training device
    the second is timed. Weights, gradients and random states stay as they are."""
    device = training.device
    model.to(device)
    if training.gradient_checkpointing:
        model.gradient_checkpointing_enable(training.gradient_checkpointing_kwargs)
    low = low_precision_of(training)
    shape = (training.per_device_train_batch_size, block_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator).to(device)
    was_training = model.training
    model.train()
    seconds = 0.0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for _ in range(2):
            begin = time.perf_counter()
            with torch.autocast(device.type, low) if low else nullcontext():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            loss.item()  # waits for the device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - begin
            model.zero_grad(set_to_none=True)
    model.train(was_training)
    return seconds * training.gradient_accumulation_steps


def forecast(model: Any, training: DepthRouteTrainingArguments, blocks: int | None, block_size: int) -> Forecast:
    """What training `model` will take.

    Args:
        model: as it will be trained (frozen or not). On the meta device nothing is measured.
        training: the run's arguments, with accumulation and steps set.
        blocks: training examples; None: a stream.
        block_size: T.
    """
    steps, tokens = count_steps(training, blocks, block_size)
    parameters = [(parameter.numel(), parameter.itemsize, parameter.requires_grad) for parameter in model.parameters()]
    reason, step_seconds = "", None
    if any(parameter.is_meta for parameter in model.parameters()):
        reason = "the weights were not made"
    elif (spread := ENGINES[engine_of(training)]).divides_optimizer:
        divided = "the model" if spread.divides_parameters else "its optimizer"
        reason = f"{divided} is divided among processes when training starts"
    else:
        step_seconds = measured_step(model, training, block_size)
    return Forecast(
        parameters=sum(number for number, _, _ in parameters),
        trainable=sum(number for number, _, trained in parameters if trained),
        steps=steps,
        tokens_per_step=tokens_per_step(training, block_size),
        tokens=tokens,
        flops=training_flops(model, block_size, tokens),
        memory=expected_memory(model, training, block_size),
        step_seconds=step_seconds,
        seconds=None if step_seconds is None else step_seconds * steps,
        not_measured=reason,
    )


def expected_memory(model: Any, training: DepthRouteTrainingArguments, block_size: int) -> dict[str, int]:
    """Bytes per process by what takes them, with their `total`, as `training_memory` has them; empty for a model that is no
    backbone of the family."""
    config = model.config
    if config.model_type not in (*HOSTED_MODEL_TYPES, "depthroute"):
        return {}
    if config.model_type != "depthroute":
        config = DepthRouteConfig.from_preset("standard", base=config)
    engine = engine_of(training)
    masters = next(model.parameters()).dtype
    if masters != torch.float32:
        precision = "bfloat16"  # as much as float16
    elif low_precision_of(training) is not None:
        precision = "autocast" if engine in ("single", "ddp") else "mixed"
    else:
        precision = "float32"
    memory = training_memory(
        config,
        batch_size=training.per_device_train_batch_size,
        sequence_length=block_size,
        engine=engine,
        devices=training.world_size,
        precision=precision,
        checkpointing=training.gradient_checkpointing,
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
    )
    return {**memory._asdict(), "total": memory.total}
