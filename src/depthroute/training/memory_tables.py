# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/training-at-scale.md, computed: `python -m depthroute.training.memory_tables docs/training-at-scale.md`."""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Qwen3Config, Qwen3MoeConfig

from ..errors import Refused
from ..modeling.configuration_depthroute import DepthRouteConfig
from .memory import training_memory


class Launch(NamedTuple):
    """One way to run a model: `title`, and arguments of `training_memory`."""

    title: str
    arguments: dict[str, Any]


_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6}
BACKBONES = {
    "0.6B": Qwen3Config(
        **_QWEN3, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, tie_word_embeddings=True,
    ),
    "8B": Qwen3Config(
        **_QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "30B-A3B": Qwen3MoeConfig(
        **_QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
    ),
}  # fmt: skip
"""The sizes of Qwen3's checkpoints."""

_FSDP = {"engine": "fsdp", "precision": "mixed", "checkpointing": True, "sequence_length": 4096}
LAUNCHES = {
    "0.6B": [
        Launch(
            "DDP, bf16 autocast",
            {"engine": "ddp", "devices": 8, "precision": "autocast", "batch_size": 2, "sequence_length": 2048},
        ),
        Launch(
            "the same with checkpointing",
            {
                "engine": "ddp",
                "devices": 8,
                "precision": "autocast",
                "batch_size": 2,
                "sequence_length": 2048,
                "checkpointing": True,
            },
        ),
    ],
    "8B": [
        Launch("FSDP2, checkpointing", {**_FSDP, "devices": 8, "batch_size": 1}),
        Launch("ZeRO-3, checkpointing", {**_FSDP, "engine": "zero3", "devices": 8, "batch_size": 1}),
    ],
    "30B-A3B": [
        Launch("FSDP2, checkpointing", {**_FSDP, "devices": 16, "batch_size": 1}),
        Launch("ZeRO-3, checkpointing", {**_FSDP, "engine": "zero3", "devices": 16, "batch_size": 1}),
    ],
}
SHOWN_PRESETS = ("standard", "delta-block", "attnres-block", "rd-attnres", "dar")


def table(size: str) -> str:
    """The memory of each launch of one size, under some presets, as a Markdown table in GiB per device."""
    lines = [
        "| run | preset | states | communication | branches | sources | head | total |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for launch in LAUNCHES[size]:
        a = launch.arguments
        title = f"{launch.title}; {a['devices']} devices, {a['batch_size']} × {a['sequence_length']} tokens on each"
        for preset in SHOWN_PRESETS:
            fields = {} if preset == "standard" else {"depth_anchored": True}
            config = DepthRouteConfig.from_preset(preset, base=BACKBONES[size], **fields)
            memory = training_memory(config, **a)
            terms = (
                memory.states,
                memory.communication,
                memory.activations + memory.recomputed,
                memory.sources,
                memory.head,
                memory.total,
            )
            numbers = " | ".join(f"{term / 2**30:.1f}" for term in terms)
            lines.append(f"| {title} | `{preset}` | {numbers} |")
            title = ""
    return "\n".join(lines)


def renewed(text: str) -> str:
    """The page with its tables computed anew.

    Raises:
        Refused: a table that is marked with a size that there is not, or no table at all.
    """
    pattern = re.compile(r"(<!-- memory: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

    def replace(match: re.Match[str]) -> str:
        if match[2] not in BACKBONES:
            raise Refused(f"memory: got {match[2]!r}, allowed: {', '.join(BACKBONES)}")
        return f"{match[1]}{table(match[2])}\n{match[3]}"

    result, count = pattern.subn(replace, text)
    if not count:
        raise Refused("memory: found no table, allowed: <!-- memory: SIZE --> … <!-- end -->")
    return result


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
