# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The DepthRoute model: Qwen3's embedding, attention, MLP, norms and heads, in a loop of read → branch → write."""

# isort: off
from .compat import CACHE_NAME, cache_argument  # first: an old release must fail with one line, not an import error

# isort: on
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3ForCausalLM,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeForCausalLM,
    Qwen3MoePreTrainedModel,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_depthroute import DepthRouteConfig
from .depth_backend import has_hooks, is_whole
from .residual_base import Residual, ResidualState, RoutingRecord, RoutingWeights
from .residual_baselines import HyperConnectionResidual, HyperRead, ScaledResidual
from .residual_depth_attention import DepthAttentionResidual, DepthRead
from .residual_dual_stream import DualRead, DualStreamResidual
from .residual_standard import StandardResidual


RESIDUALS: dict[str, type[Residual]] = {
    "standard": StandardResidual,
    "depth_attention": DepthAttentionResidual,
    "dual_stream": DualStreamResidual,
    "hyper_connection": HyperConnectionResidual,
    "rezero": ScaledResidual,
    "layerscale": ScaledResidual,
}


def build_residual(config: DepthRouteConfig) -> Residual:
    """The residual that `config.residual_type` names."""
    return RESIDUALS[config.residual_type](config)


class DepthRouteAttention(Qwen3Attention):
    """Qwen3's attention; without its query and key norms where `qk_norm` is False, which is then Llama's, or Qwen2's."""

    def __init__(self, config: DepthRouteConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        # CODEPATH: Qwen3 checkpoints have query and key norms, Llama-style ones have none
        if not config.qk_norm:
            self.q_norm = nn.Identity()
            self.k_norm = nn.Identity()
        # CODEPATH: Qwen2 checkpoints have biases on queries, keys and values alone
        if not config.attention_output_bias:
            self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, *args: Any, value_input: Tensor | None = None, **kwargs: Any) -> Any:
        """Qwen3's forward; with `value_input` [B, T, D], values are made of it and not of `hidden_states`."""
        if value_input is None:
            return super().forward(hidden_states, *args, **kwargs)
        return Qwen3Attention.forward(_ValuesGiven(self, self.v_proj(value_input)), hidden_states, *args, **kwargs)


class _ValuesGiven:
    """An attention module to all but `v_proj`, which has been called already: upstream's forward serves both routes."""

    def __init__(self, attention: Qwen3Attention, values: Tensor):
        self._attention = attention
        self._values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def v_proj(self, hidden_states: Tensor) -> Tensor:
        return self._values


class DepthRouteDecoderLayer(GradientCheckpointingLayer):
    """Two branches, attention and MLP, each around a read and a write of the residual.

        state before sublayer 2i (flat tensors [B, T, D])
          → attn_read → x → input_layernorm → self_attn → u → write
          → mlp_read  → x → post_attention_layernorm → mlp → u → write
          → the tensors that changed: the stream h_{2i+2} first

    `attn_read` and `mlp_read` (of the scaled baselines: `attn_scale`, `mlp_scale`) are None where there is nothing to learn.
    """

    def __init__(self, config: DepthRouteConfig, layer_idx: int, residual: Residual):
        super().__init__()
        self.layer_idx = layer_idx
        self.residual = residual
        self.self_attn = DepthRouteAttention(config, layer_idx)
        # CODEPATH: Qwen3-MoE checkpoints have sparse layers, all others dense ones
        self.mlp = Qwen3MoeSparseMoeBlock(config) if config.is_sparse(layer_idx) else Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.connections = [f"{branch}_{self.residual.parameter_name}" for branch in ("attn", "mlp")]
        for sublayer, name in enumerate(self.connections):
            setattr(self, name, self.residual.create_read(2 * layer_idx + sublayer))

    def reads(self) -> dict[int, Any]:
        """What is around the layer's sublayers, by s; None where there is nothing to learn."""
        return {2 * self.layer_idx + index: getattr(self, name) for index, name in enumerate(self.connections)}

    def forward(
        self,
        *tensors: Tensor,
        routing: RoutingRecord | None = None,
        prepared: dict[int, Any] | None = None,
        **attention_kwargs: Any,
    ) -> Tensor | tuple[Tensor, ...]:
        """
        Args:
            tensors: the residual's state, packed: the stream h_{2i} [B, T, D] first.
            routing: where reads note their weights.
            prepared: what `Residual.prepare` gave for this layer's reads; None: the layer calls it.
            attention_kwargs: mask, positions and cache, as Qwen3's attention takes them.

        Returns:
            What changed, packed: the stream h_{2i+2} [B, T, D] first, then what else the residual carries, then new
            sources. The stream alone, as in Qwen3, where the residual is standard.
        """
        residual, s = self.residual, 2 * self.layer_idx
        before = residual.unpack(tensors, s)
        reads = self.reads()
        if prepared is None:
            prepared = residual.prepare(before, reads) if residual.group_size(before) else {}

        reading = residual.read(before, s, reads[s], routing, prepared.get(s))
        if reading.value is not None:
            attention_kwargs["value_input"] = self.input_layernorm(reading.value)
        update, _ = self.self_attn(hidden_states=self.input_layernorm(reading.x), **attention_kwargs)
        state = residual.write(before, s, update, reading)

        reading = residual.read(state, s + 1, reads[s + 1], routing, prepared.get(s + 1))
        update = self.mlp(self.post_attention_layernorm(reading.x))
        state = residual.write(state, s + 1, update, reading)

        changes = residual.changes(before, state)
        return changes[0] if len(changes) == 1 else changes


# what a read's parameters start at where it is not zero, as queries and projections of gates do
_START = {"key_norm": init.ones_, "value_proj": init.eye_}


class DepthRoutePreTrainedModel(Qwen3MoePreTrainedModel):
    config_class = DepthRouteConfig
    config: DepthRouteConfig
    base_model_prefix = "model"
    _no_split_modules = ["DepthRouteDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": DepthRouteDecoderLayer,
        "attentions": DepthRouteAttention,
        "router_logits": OutputRecorder(Qwen3MoeTopKRouter, index=0),
    }

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch."):
            # FSDP2 gives a model a subclass that torch makes; saved must be the name and the code of the class behind it
            behind = next(base for base in cls.__mro__[1:] if issubclass(base, DepthRoutePreTrainedModel))
            cls.__module__, cls.__name__, cls.__qualname__ = behind.__module__, behind.__name__, behind.__qualname__

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DepthRead):
            for name, parameter in module.named_parameters():
                _START.get(name, init.zeros_)(parameter)
            if module.detail_bias is not None:
                init.constant_(module.detail_bias, module.initial_detail_bias)
        elif isinstance(module, DualRead):
            for name, parameter in module.named_parameters():
                _START.get(name, init.zeros_)(parameter)
            init.copy_(module.gate_logits, torch.tensor(module.initial_gate_logits()))
        elif isinstance(module, HyperRead):
            init.zeros_(module.gate_proj)
            init.copy_(module.gate_bias, module.initial_gate_bias())
            init.constant_(module.gate_scale, 0.01)
        elif isinstance(module, DepthRouteDecoderLayer) and isinstance(module.residual, ScaledResidual):
            for name in module.connections:
                init.constant_(getattr(module, name), module.residual.initial_scale())

    def routing_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of every read and write of the residual, by name. Empty for the standard residual."""
        parts = {"attn_read", "mlp_read", "final_read", "attn_scale", "mlp_scale"}
        return {name: parameter for name, parameter in self.named_parameters() if parts & set(name.split("."))}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the decorator in this file; the experts are upstream's own

    @classmethod
    def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> Any:
        """Refuses pipeline parallelism: the sources of a read cannot cross a stage."""
        options = distributed_config if isinstance(distributed_config, dict) else vars(distributed_config or object)
        if (options.get("pp_size") or 1) > 1:
            raise ValueError(
                f"pp_size: got {options['pp_size']}, allowed: 1, {cls.__name__} does not support pipeline parallelism "
                "(a stage passes on hidden states only, a depth read needs every earlier source)"
            )
        return super().prepare_distribute_model(distributed_config, device_map)


@dataclass
class DepthRouteModelOutputWithPast(BaseModelOutputWithPast):
    """`BaseModelOutputWithPast` and the routing.

    Attributes:
        hidden_states: with `output_hidden_states`, L + 1 tensors [B, T, D]: entry i is the standard stream h_{2i} that
            enters layer i, the last one the normed final read (`last_hidden_state`).
        router_logits: with `output_router_logits`, each sparse layer's expert router's logits [B·T, experts].
        routing: with `output_routing`, `RoutingWeights` by module path; inert reads are absent.
    """

    router_logits: tuple[Tensor, ...] | None = None
    routing: dict[str, RoutingWeights] | None = None


class DepthRouteModel(DepthRoutePreTrainedModel):
    """The decoder without a head.

    input_ids [B, T] → embed_tokens → e [B, T, D] → start → state
    for each layer:  state → read → branch → write (twice) → state
    state → final_read → x_final [B, T, D] → norm → last_hidden_state [B, T, D]
    """

    def __init__(self, config: DepthRouteConfig):
        config.validate()  # fields may have been set since the configuration was made
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.residual = build_residual(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [DepthRouteDecoderLayer(config, layer_idx, self.residual) for layer_idx in range(config.num_hidden_layers)]
        )
        self.final_read = self.residual.create_read(2 * config.num_hidden_layers)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @cache_argument
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_routing: bool | None = None,
        routing: RoutingRecord | None = None,
        **kwargs: Any,
    ) -> DepthRouteModelOutputWithPast:
        """
        Args:
            input_ids: [B, T]; or `inputs_embeds` [B, T, D].
            attention_mask: [B, T], a 4-D mask, or a dict of masks by layer type.
            position_ids: [B, T] or [1, T].
            cache: the KV cache (`past_key_values` before transformers 5.24). Routing is per token and keeps nothing in it.
            output_routing: return every live read's weights.
            routing: where to note them, for callers that wrap this model.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: got both or neither, allowed: exactly one")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past).unsqueeze(0)
        if output_routing and routing is None:
            routing = RoutingRecord()

        state = self.residual.start(inputs_embeds)
        layer_kwargs = {
            "position_embeddings": self.rotary_emb(inputs_embeds, position_ids),
            "position_ids": position_ids,
            "use_cache": use_cache,
            "routing": routing,
            CACHE_NAME: cache,
            **kwargs,
        }
        masks = self._attention_masks(attention_mask, inputs_embeds, cache, position_ids)
        prepared: dict[int, Any] | None = {}
        prepare_at, layer_types = 0, self.config.layer_types
        for layer_idx, layer in enumerate(self.layers):
            if layer_idx == prepare_at:
                size = self.residual.group_size(state)
                prepared = self._prepare_group(state, layer_idx, size) if size else {}
                prepare_at += max(size, 1)
            mask = masks[layer_types[layer_idx]]
            changes = layer(*self.residual.pack(state), attention_mask=mask, prepared=prepared, **layer_kwargs)
            changes = changes if isinstance(changes, tuple) else (changes,)
            state = self.residual.advance(state, changes, 2 * layer_idx + 2)

        final = (prepared or {}).get(2 * len(self.layers))
        x_final = self.residual.finish(state, self.final_read, routing, final)
        hidden_states = self.norm(x_final)
        return DepthRouteModelOutputWithPast(
            last_hidden_state=hidden_states,
            routing=None if routing is None else routing.reads,
            **{CACHE_NAME: cache if use_cache else None},
        )

    def _prepare_group(self, state: ResidualState, first: int, size: int) -> dict[int, Any] | None:
        """The reads of `size` layers from `first` on, prepared at once, with all layers the final read too; None where each
        layer has to see to its own: under checkpointing, which runs a layer again, where layers are wrapped or compiled one by
        one, or parameters sharded or offloaded, and where hooks may change what a layer is given or gives."""
        layers = self.layers[first : first + size]
        modules: dict[int, Any] = {}
        for layer in layers:
            if not isinstance(layer, DepthRouteDecoderLayer) or (layer.gradient_checkpointing and layer.training):
                return None
            if has_hooks(layer) or layer._compiled_call_impl is not None:
                return None
            modules |= layer.reads()
        if len(layers) == len(self.layers):
            modules[2 * len(layers)] = self.final_read
        device = state.stream.device
        for module in modules.values():
            if isinstance(module, nn.Module) and (has_hooks(module) or not is_whole(module, device)):
                return None
        return self.residual.prepare(state, modules)

    def _attention_masks(self, attention_mask: Any, embeds: Tensor, cache: Any, position_ids: Tensor) -> dict[str, Any]:
        if isinstance(attention_mask, dict):  # `generate` may have prepared them already
            return attention_mask
        arguments = {
            "config": self.config,
            "inputs_embeds": embeds,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            CACHE_NAME: cache,
        }
        make_mask = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        return {kind: make_mask[kind](**arguments) for kind in dict.fromkeys(self.config.layer_types)}


@dataclass
class DepthRouteCausalLMOutputWithPast(CausalLMOutputWithPast):
    """A language model's output and the routing, by module path."""

    routing: dict[str, RoutingWeights] | None = None


@dataclass
class DepthRouteMoeCausalLMOutputWithPast(MoeCausalLMOutputWithPast):
    """A language model's output with sparse experts and the routing, by module path."""

    routing: dict[str, RoutingWeights] | None = None


@dataclass
class DepthRouteSequenceClassifierOutputWithPast(SequenceClassifierOutputWithPast):
    """A sequence classifier's output and the routing, by module path."""

    routing: dict[str, RoutingWeights] | None = None


@dataclass
class DepthRouteTokenClassifierOutput(TokenClassifierOutput):
    """A token classifier's output and the routing, by module path."""

    routing: dict[str, RoutingWeights] | None = None


@dataclass
class DepthRouteQuestionAnsweringModelOutput(QuestionAnsweringModelOutput):
    """A question answering model's output and the routing, by module path."""

    routing: dict[str, RoutingWeights] | None = None


ROUTED_OUTPUTS: dict[type, type] = {
    CausalLMOutputWithPast: DepthRouteCausalLMOutputWithPast,
    MoeCausalLMOutputWithPast: DepthRouteMoeCausalLMOutputWithPast,
    SequenceClassifierOutputWithPast: DepthRouteSequenceClassifierOutputWithPast,
    TokenClassifierOutput: DepthRouteTokenClassifierOutput,
    QuestionAnsweringModelOutput: DepthRouteQuestionAnsweringModelOutput,
}
"""What a head of transformers returns → the same with an entry `routing`."""


def with_routing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Give the forward of one of transformers' heads the argument `output_routing` and its output the entry `routing`:
    `RoutingWeights` by module path, such as `model.layers.3.attn_read`."""
    signature = inspect.signature(forward)
    *arguments, rest = signature.parameters.values()
    option = inspect.Parameter("output_routing", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)

    @wraps(forward)
    def call(self: Any, *args: Any, output_routing: bool | None = None, **kwargs: Any) -> Any:
        if not output_routing:
            return forward(self, *args, **kwargs)
        record = RoutingRecord()
        output = forward(self, *args, routing=record, **kwargs)
        routing = {f"{self.base_model_prefix}.{name}": weights for name, weights in record.reads.items()}
        if isinstance(output, tuple):
            return (*output, routing)
        return ROUTED_OUTPUTS[type(output)](**output, routing=routing)

    call.__signature__ = signature.replace(parameters=[*arguments, option, rest])  # type: ignore[attr-defined]
    return call


@wraps(Qwen3MoeForCausalLM.forward)
def _causal_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    # CODEPATH: Qwen3-MoE checkpoints add the balance loss of their expert routers, all others have none
    upstream: Any = Qwen3MoeForCausalLM if self.config.num_experts else Qwen3ForCausalLM
    return upstream.forward(self, *args, **kwargs)


class DepthRouteForCausalLM(DepthRoutePreTrainedModel, Qwen3ForCausalLM):
    """The decoder with a language-modelling head. `forward` is Qwen3's (with experts Qwen3-MoE's, which adds the balance loss
    of the expert routers), with `output_routing`."""

    _pp_plan: dict[str, Any] = {}

    def __init__(self, config: DepthRouteConfig):
        DepthRoutePreTrainedModel.__init__(self, config)  # type: ignore[call-arg]
        self.model = DepthRouteModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.post_init()

    forward = with_routing(_causal_forward)

    def generate(self, *args: Any, output_routing: bool | None = None, **kwargs: Any) -> Any:
        """transformers' `generate`; with `output_routing` and `return_dict_in_generate` the output has the entry
        `routing`: one record per forward pass, the prompt's first.

        Raises:
            ValueError: `output_routing` without `return_dict_in_generate`.
        """
        if not output_routing:
            return super().generate(*args, **kwargs)
        settings = kwargs.get("generation_config") or self.generation_config
        if not kwargs.get("return_dict_in_generate", settings.return_dict_in_generate):
            raise ValueError("return_dict_in_generate: got False, allowed: True where output_routing is asked for")
        steps: list[dict[str, RoutingWeights]] = []
        # not through the model's arguments: `generate` would hand them to an assistant as well
        hooks = (
            self.register_forward_pre_hook(
                lambda module, args, kwargs: (args, {**kwargs, "output_routing": True}), with_kwargs=True
            ),
            self.register_forward_hook(lambda module, args, output: steps.append(output["routing"])),
        )
        try:
            output = super().generate(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        output["routing"] = tuple(steps)
        return output


def head_with_bias(width: int, outputs: int) -> nn.Linear:
    """A linear head [outputs, D] that 8-bit and 4-bit loading leave alone: they find a model's head by the name of its last
    parameter, and take that for a weight."""
    head = nn.Linear(width, outputs)
    weight = head.weight
    del head.weight
    head.weight = weight  # behind the bias
    return head


class DepthRouteForSequenceClassification(GenericForSequenceClassification, DepthRoutePreTrainedModel):
    """The decoder with a linear head on the last token."""

    def __init__(self, config: DepthRouteConfig):
        DepthRoutePreTrainedModel.__init__(self, config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = DepthRouteModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    forward = with_routing(GenericForSequenceClassification.forward)


class DepthRouteForTokenClassification(GenericForTokenClassification, DepthRoutePreTrainedModel):
    """The decoder with a linear head on every token."""

    def __init__(self, config: DepthRouteConfig):
        DepthRoutePreTrainedModel.__init__(self, config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = DepthRouteModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = head_with_bias(config.hidden_size, config.num_labels)
        self.post_init()

    forward = with_routing(GenericForTokenClassification.forward)


class DepthRouteForQuestionAnswering(GenericForQuestionAnswering, DepthRoutePreTrainedModel):
    """The decoder with start and end logits for every token."""

    base_model_prefix = "model"

    def __init__(self, config: DepthRouteConfig):
        DepthRoutePreTrainedModel.__init__(self, config)  # type: ignore[call-arg]
        self.model = DepthRouteModel(config)
        self.qa_outputs = head_with_bias(config.hidden_size, 2)
        self.post_init()

    forward = with_routing(GenericForQuestionAnswering.forward)


# transformers skips its own expert layouts (one tensor per expert, or fused) for custom code that has not registered them
register_checkpoint_conversion_mapping(
    DepthRouteConfig.model_type, get_checkpoint_conversion_mapping("qwen3_moe") or [], overwrite=True
)

for _auto_class, _model_class in (
    ("AutoModel", DepthRouteModel),
    ("AutoModelForCausalLM", DepthRouteForCausalLM),
    ("AutoModelForSequenceClassification", DepthRouteForSequenceClassification),
    ("AutoModelForTokenClassification", DepthRouteForTokenClassification),
    ("AutoModelForQuestionAnswering", DepthRouteForQuestionAnswering),
):
    # without this a re-saved checkpoint would lose its code, and with it trust_remote_code
    _model_class.register_for_auto_class(_auto_class)

__all__ = [
    "DepthRouteForCausalLM",
    "DepthRouteForQuestionAnswering",
    "DepthRouteForSequenceClassification",
    "DepthRouteForTokenClassification",
    "DepthRouteModel",
    "DepthRoutePreTrainedModel",
]
