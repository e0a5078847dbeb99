# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the code itself says of a preset: its fields beside the defaults, the parameters it adds, and how it starts."""

import re
from functools import cache
from typing import Any, NamedTuple

import torch

from ..modeling.configuration_depthroute import MEANT_FOR, PRESETS, DepthRouteConfig, family_fields
from ..modeling.depth_schedule import live_reads
from ..modeling.modeling_depthroute import RESIDUALS, DepthRouteForCausalLM
from ..training.optimizer import default_routing_learning_rate


EXAMPLE_SIZES: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
"""Those of Qwen3-0.6B."""

OTHER_DEPTHS = (12, 24, 48)
"""Numbers of layers for which the block size that is filled in is shown too."""


class Parameters(NamedTuple):
    """Of a model of `EXAMPLE_SIZES`: all, those of the routing (or the scales, the gates), and the reads that choose."""

    total: int
    routing: int
    reads: int


@cache
def parameters_of(preset: str) -> Parameters:
    """Counted without memory for them."""
    config = DepthRouteConfig.from_preset(preset, **EXAMPLE_SIZES)
    with torch.device("meta"):
        model = DepthRouteForCausalLM(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    routing = sum(parameter.numel() for parameter in model.routing_parameters().values())
    return Parameters(total, routing, len(live_reads(config)))


def parameters_sentence(preset: str) -> str:
    """What the preset adds to the example model."""
    total, routing, reads = parameters_of(preset)
    where = f"on the sizes of Qwen3-0.6B ({EXAMPLE_SIZES['num_hidden_layers']} layers, width {EXAMPLE_SIZES['hidden_size']})"
    if not routing:
        return f"None: {total:,} parameters {where}, all of them the backbone's."
    of_reads = f", in {reads} reads" if reads else ""
    return f"{routing:,}{of_reads}, {where}: {100 * routing / (total - routing):.3g}% of the backbone's {total - routing:,}."


def field_rows(preset: str) -> list[tuple[str, str, str]]:
    """Field, value under the preset, value of `DepthRouteConfig()`: the preset's own fields and all others that its residual
    reads, on the example's sizes."""
    config, plain = DepthRouteConfig.from_preset(preset, **EXAMPLE_SIZES), family_fields()
    kind = config.residual_type
    names = ["residual_type", *(name for name, kinds in MEANT_FOR.items() if kind in kinds), "depth_anchored"]
    return [(name, str(getattr(config, name)), str(plain[name])) for name in names]


def block_sizes(preset: str) -> str:
    """The block size that is filled in for several depths; empty for a preset that has none filled in."""
    if PRESETS[preset].blocks != "always":
        return ""
    sizes = []
    for layers in sorted((EXAMPLE_SIZES["num_hidden_layers"], *OTHER_DEPTHS)):
        config = DepthRouteConfig.from_preset(preset, **{**EXAMPLE_SIZES, "num_hidden_layers": layers})
        sizes.append(f"{config.depth_block_size} for {layers}")
    return f"`depth_block_size`, where none is given, goes by the number of layers: {', '.join(sizes)}."


def fields_table(preset: str) -> str:
    """`field_rows` as Markdown; values that differ from the plain default are bold."""
    lines = ["| field | this preset | `DepthRouteConfig()` |", "|---|---|---|"]
    for name, value, plain in field_rows(preset):
        shown = f"`{value}`" if value == plain else f"**`{value}`**"
        lines.append(f"| `{name}` | {shown} | `{plain}` |")
    filled_in = block_sizes(preset)
    return "\n".join(lines) + "\n" + (f"\n{filled_in}\n" if filled_in else "")


def learning_rate_factor(preset: str) -> float:
    """The routing's default learning rate as a multiple of the base rate."""
    return default_routing_learning_rate(DepthRouteConfig.from_preset(preset, **EXAMPLE_SIZES), 1.0)


def starting_rules(preset: str) -> list[str]:
    """How a model of the preset starts, from scratch and in a conversion, and how fast its routing learns; one line each."""
    config = DepthRouteConfig.from_preset(preset, **EXAMPLE_SIZES)
    kind = config.residual_type
    if kind == "standard":
        return ["It is the backbone: from scratch and converted it computes what stock Qwen3 computes, bit for bit."]
    reads = kind in ("depth_attention", "dual_stream")
    if reads:
        scratch = (
            f"plain (`depth_anchored={config.depth_anchored}`), the paper's form: queries start at zero and mix evenly"
        )
    elif kind == "hyper_connection":
        scratch = "the paper's initial gates"
    else:
        scratch = "the paper's initial scales"
    if not RESIDUALS[kind].starts_exactly:
        convert = "close to its source, not bit for bit, because of the published gates' eps; the gap is reported"
    elif reads:
        convert = "anchored by default (`--plain` for the paper's form): computes what its source computes, bit for bit, until trained"
    else:
        convert = "scales at one by default (`--plain` for the paper's): computes what its source computes, bit for bit, until trained"
    factor = learning_rate_factor(preset)
    what = "routing" if reads else "gates" if kind == "hyper_connection" else "scales"
    return [
        f"From scratch: {scratch}.",
        f"Converted: {convert}.",
        f"Learning rate of the {what}: {factor:g} times the base rate by default, without weight decay.",
    ]


def paper_link(preset: str) -> str:
    """Where it comes from, with a link."""
    return re.sub(r"arXiv (\S+)$", r"[arXiv \1](https://arxiv.org/abs/\1)", PRESETS[preset].paper)
