# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What training takes per device, as a function of the configuration: parameters, gradients, optimizer, activations.

Units: bytes. Letters of the formulas:
    P parameters, P_t of them trained     N devices     n = B·T tokens on a device     L layers     D width     V vocabulary
    F intermediate size     Q query width (heads A · head_dim)     W key width (heads G · head_dim)     K layers per block
    E experts, k of them per token, of intermediate size I     c bytes of a number in the branches (4, or 2 in bfloat16)

A device's total is what lives through the whole step, and what is largest at one time beside it; allocators take 5 to 20% more
(fragments, workspaces of products), and the driver and the communication library 1 to 2 GiB.
"""

from typing import Any, NamedTuple

import torch

from ..errors import Refused
from ..modeling.configuration_depthroute import nearest_names
from ..modeling.modeling_depthroute import DepthRouteForCausalLM
from .memory_sources import checkpointed_sources, kept_sources


class Precision(NamedTuple):
    """Bytes of the numbers of a run.

    Attributes:
        stored: of a parameter, where the optimizer changes it (ZeRO: the master copy).
        branch: c, of an activation inside attention and MLP.
        stream: of the stream.
        update: of what branches write, and of sources that are made of it.
        norm: kept by both norms of a layer, per entry of D: each its input in float32, what it has divided, and its output once
            for each product that casts it.
        cast: of the copies of the weights that autocast keeps through a step; 0 where there are none.
        expert: of an activation inside an expert.
    """

    stored: int
    branch: int
    stream: int
    update: int
    norm: int
    cast: int
    expert: int


PRECISIONS = {
    "float32": Precision(stored=4, branch=4, stream=4, update=4, norm=24, cast=0, expert=4),
    # float32 masters; products in bfloat16: the Trainer's `bf16` under DDP
    "autocast": Precision(stored=4, branch=2, stream=4, update=2, norm=26, cast=2, expert=4),
    # float32 masters; whole layers in bfloat16: FSDP2's mixed precision, ZeRO's bf16
    "mixed": Precision(stored=4, branch=2, stream=2, update=2, norm=16, cast=0, expert=2),
    # masters of 16 bits: small steps are rounded away
    "bfloat16": Precision(stored=2, branch=2, stream=2, update=2, norm=16, cast=0, expert=2),
}


class Engine(NamedTuple):
    """How an engine spreads a model.

    Attributes:
        divides_parameters, divides_gradients, divides_optimizer: whether a device has its part of them only.
        buckets: copies of all trained gradients that wait to be sent.
        working_copy: whether parameters exist in the branches' precision beside the masters, which belong to the optimizer then.
    """

    divides_parameters: bool = False
    divides_gradients: bool = False
    divides_optimizer: bool = False
    buckets: int = 0
    working_copy: bool = False


ENGINES = {
    "single": Engine(),
    "ddp": Engine(buckets=1),
    "fsdp": Engine(divides_parameters=True, divides_gradients=True, divides_optimizer=True),
    "zero1": Engine(divides_optimizer=True, working_copy=True),
    "zero2": Engine(divides_gradients=True, divides_optimizer=True, working_copy=True),
    "zero3": Engine(divides_parameters=True, divides_gradients=True, divides_optimizer=True, working_copy=True),
}

ZERO_BUCKET = 500_000_000
"""Numbers that DeepSpeed sends at a time under ZeRO-1 and ZeRO-2 where nobody says otherwise: its `reduce_bucket_size`."""


class TrainingMemory(NamedTuple):
    """Bytes on each device; see `training_memory` for the formula of each."""

    parameters: int
    gradients: int
    optimizer: int
    communication: int
    activations: int
    sources: int
    recomputed: int
    head: int

    @property
    def states(self) -> int:
        """What lives through the whole run."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return sum(self)


class Sizes(NamedTuple):
    """Numbers of parameters, counted on a model without storage.

    Attributes:
        total: P.
        routing: of the reads.
        layer: of the largest layer.
        ends: of embedding, final norm and head, a tied head once.
        products: of the weights of linear layers, which autocast copies.
    """

    total: int
    routing: int
    layer: int
    ends: int
    products: int


def parameter_sizes(config: Any) -> Sizes:
    """Count a language model's parameters. Builds it on the meta device: seconds, and no memory, at any size."""
    with torch.device("meta"):
        model = DepthRouteForCausalLM(config)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers]
    linear = {module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)}
    return Sizes(
        total=total,
        routing=sum(parameter.numel() for parameter in model.routing_parameters().values()),
        layer=max(layers),
        ends=total - sum(layers),
        products=sum(weight.numel() for weight in linear),
    )


def layer_bytes_per_token(config: Any, layer_idx: int, precision: Precision) -> float:
    """What one layer's branches keep for backward, per token, with fused attention (sdpa or flash):

        norm·D + 8                                  both norms
        (3c + 4)·Q + (3c + 4)·W + 8·A + 4·G         query and key norms (input in float32), rotated queries and keys, values,
                                                    attention's output and its log-sum-exp
        4·c·F                                       dense: gate, its activation, up, their product
        k·(4·I + 2·D)·expert + 36·k + 4·E           sparse: the same per expert, its input and output; the router

    Without query and key norms (Llama's layers) the first of the two lines is 2c·Q + 2c·W.
    """
    width, c = config.hidden_size, precision.branch
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    total = precision.norm * width + 8
    if config.qk_norm:
        total += (3 * c + 4) * (queries + keys) + 8 * config.num_attention_heads + 4 * config.num_key_value_heads
    else:
        total += 2 * c * (queries + keys) + 4 * config.num_attention_heads
    if config.is_sparse(layer_idx):
        of_expert = (4 * config.moe_intermediate_size + 2 * width) * precision.expert + 36
        return total + config.num_experts_per_tok * of_expert + 4 * config.num_experts
    return total + 4 * c * config.intermediate_size


def training_memory(
    config: Any,
    *,
    batch_size: int,
    sequence_length: int,
    engine: str = "single",
    devices: int = 1,
    precision: str = "float32",
    checkpointing: bool = False,
    trained: int | None = None,
) -> TrainingMemory:
    """What a step of AdamW takes on each device, in bytes.

        parameters      stored·P, / N under FSDP2. Under ZeRO c·P, the working copy, / N in stage 3; and stored·P_t, the masters,
                        / N in every stage
        gradients       stored·P_t, / N under FSDP2, ZeRO-2 and ZeRO-3. Under ZeRO-1 c·P_t: whole, as the working copy has them
        optimizer       2·stored·P_t (two moments), / N under FSDP2 and ZeRO
        communication   DDP: stored·P_t, buckets that wait to be sent. ZeRO-1, ZeRO-2: c·P_t, but of `ZERO_BUCKET` numbers at most.
                        FSDP2, ZeRO-3: 2·c·(the largest layer), the one that runs and the next one, c·(embedding, norm and head),
                        which stay from forward to backward, and stored·(the largest layer, or those ends), whose gradient is about
                        to be divided. 0 on one device
        activations     n·Σ layers `layer_bytes_per_token`, and cast·(weights of products); with checkpointing n·stream·D·L, the
                        input of each layer
        sources         n·(what the residual keeps beside that, `memory_sources.kept_sources`); with checkpointing twice
                        `checkpointed_sources`, for the gradients of all sources are alive with them
        recomputed      with checkpointing: n·`layer_bytes_per_token` of the largest layer
        head            n·((8 + c)·V + (4 + stream + c)·D + 16): logits, their log-probabilities and the gradient of these; the final norm

    Args:
        config: a `DepthRouteConfig`.
        batch_size: B, sequences on one device at a time.
        sequence_length: T, tokens of each.
        engine: of `ENGINES`.
        devices: N.
        precision: of `PRECISIONS`.
        checkpointing: gradient checkpointing of every layer.
        trained: P_t; default: all. With LoRA, those of adapters and reads (P is then what is frozen and these).

    Raises:
        Refused: an unknown name (with the nearest ones), or a size below 1.
    """
    for field, name, known in (("engine", engine, ENGINES), ("precision", precision, PRECISIONS)):
        if name not in known:
            raise Refused(f"{field}: got {name!r}, allowed: {', '.join(known)}; nearest: {nearest_names(name, known)}")
    for field, value in (("batch_size", batch_size), ("sequence_length", sequence_length), ("devices", devices)):
        if value < 1:
            raise Refused(f"{field}: got {value}, allowed: at least 1")
    spread, numbers, sizes = ENGINES[engine], PRECISIONS[precision], parameter_sizes(config)
    c, stored, tokens, width = numbers.branch, numbers.stored, batch_size * sequence_length, config.hidden_size
    trainable = sizes.total if trained is None else trained
    of_parameters, of_gradients, of_optimizer = (
        devices if divides else 1
        for divides in (spread.divides_parameters, spread.divides_gradients, spread.divides_optimizer)
    )

    communication = 0
    if devices > 1:
        communication = spread.buckets * stored * trainable
        if spread.divides_parameters:
            communication = c * (2 * sizes.layer + sizes.ends) + stored * max(sizes.layer, sizes.ends)
        elif spread.working_copy:
            communication = c * min(trainable, ZERO_BUCKET)
    parameters = -(-sizes.total * stored // of_parameters)
    if spread.working_copy:
        parameters = -(-sizes.total * c // of_parameters) - (-trainable * stored // of_optimizer)
    of_a_gradient = c if spread.working_copy and not spread.divides_gradients else stored
    layers = [layer_bytes_per_token(config, index, numbers) for index in range(config.num_hidden_layers)]
    activations, sources, recomputed = sum(layers), kept_sources(config, numbers), 0.0
    if checkpointing:
        activations, recomputed = numbers.stream * width * len(layers), max(layers)
        sources = 2 * checkpointed_sources(config, numbers)
    head = (8 + c) * config.vocab_size + (4 + numbers.stream + c) * width + 16
    return TrainingMemory(
        parameters=parameters,
        gradients=-(-trainable * of_a_gradient // of_gradients),
        optimizer=-(-2 * trainable * stored // of_optimizer),
        communication=communication,
        activations=round(tokens * activations) + numbers.cast * sizes.products,
        sources=round(tokens * sources),
        recomputed=round(tokens * recomputed),
        head=tokens * head,
    )
