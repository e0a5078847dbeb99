# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What an imported AttnRes checkpoint computes, by its equations: the stock class's own branches, and reads in a few lines of
plain torch that share nothing with this package's."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class _Layer(nn.Module):
    """A layer's modules under their own names, called once for both sublayers: as where the whole layer's weights have to be in
    memory, and only then (`layerwise.py`)."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        for name, module in layer.named_children():
            self.add_module(name, module)

    def forward(self, compute: Callable[[Any], None]) -> None:
        compute(self)


class AttnResReference(nn.Module):
    """A model to compute logits with, on the protocol of a stock one.

        read s    x_s = Σ_i p_i v_i, p = softmax_i(q · (γ ⊙ v_i / rms(v_i)))   v: completed blocks, and the running one
        adds      x_s = h_s + Σ_i p_i v_i, and the stream itself at the end

    The embedding is a block of its own, closed at the first sublayer.

    Args:
        stock: the backbone, whose layers are taken apart.
        routing: queries and norms [D] by our keys; a read without any has one source.
        unit: sublayers of a block.
        adds: whether a read is added to the stream.
    """

    def __init__(self, stock: PreTrainedModel, routing: Mapping[str, Tensor], unit: int, adds: bool):
        super().__init__()
        self.stock, self.routing, self.unit, self.adds = stock, dict(routing), unit, adds
        self.config = stock.config
        stock.model.layers = nn.ModuleList(map(_Layer, stock.model.layers))

    def mix(self, name: str, sources: Sequence[Tensor]) -> Tensor:
        if f"model.{name}.query" not in self.routing:
            return sources[-1]
        query, norm = self.routing[f"model.{name}.query"], self.routing[f"model.{name}.key_norm"]
        values = torch.stack(list(sources))  # [S, B, T, D]
        values = values.double() if values.dtype == torch.float64 else values.float()
        keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        weights = torch.softmax(keys @ (query.to(values) * norm.to(values)), dim=0)
        return (weights.unsqueeze(-1) * values).sum(0).to(sources[0].dtype)

    @torch.no_grad()
    def forward(self, input_ids: Tensor, use_cache: bool = False, logits_to_keep: int = 0, **_: Any) -> CausalLMOutput:
        """Logits [B, T, V] of the last `logits_to_keep` positions (0: all) for `input_ids` [B, T]."""
        decoder = self.stock.model
        completed: list[Tensor] = []
        stream: Tensor = decoder.embed_tokens(input_ids)
        running: Tensor | None = stream
        length = input_ids.shape[1]
        positions = torch.arange(length).unsqueeze(0)
        angles = decoder.rotary_emb(stream, positions)
        masks = self._masks(length)
        every = "sliding_attention" if getattr(self.config, "sliding_window", None) else "full_attention"
        kinds = getattr(self.config, "layer_types", None) or [every] * len(decoder.layers)

        def through(index: int, layer: Any) -> None:
            nonlocal completed, running, stream
            for part in ("attn", "mlp"):
                sources = completed if running is None else [*completed, running]
                x = self.mix(f"layers.{index}.{part}_read", sources)
                if self.adds:
                    x = stream + x if len(sources) > 1 else stream
                if (2 * index + (part == "mlp")) % self.unit == 0:
                    completed, running = sources, None
                if part == "attn":
                    update, _weights = layer.self_attn(
                        hidden_states=layer.input_layernorm(x),
                        attention_mask=masks[kinds[index]],
                        position_embeddings=angles,
                    )
                else:
                    update = layer.mlp(layer.post_attention_layernorm(x))
                running = update if running is None else running + update
                stream = stream + update

        for index, layer in enumerate(decoder.layers):
            layer(partial(through, index))
        final = stream if self.adds else self.mix("final_read", [*completed, running])  # type: ignore[list-item]
        return CausalLMOutput(logits=self.stock.lm_head(decoder.norm(final)[:, -logits_to_keep:]))

    def _masks(self, length: int) -> dict[str, Tensor]:
        """True where position i sees position j [1, 1, T, T], by kind of layer."""
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
        causal = (distance >= 0)[None, None]
        window = getattr(self.config, "sliding_window", None) or length
        return {"full_attention": causal, "sliding_attention": causal & (distance < window)}
