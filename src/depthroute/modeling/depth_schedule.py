# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Which sources each depth read sees: plain integers and labels, no tensors.

Sublayers are counted `s = 0 … 2L-1` (even: attention, odd: MLP); read `2L` is the final read. A *unit* is the number of
sublayers that make one source: 1 per sublayer, `2K` for blocks of `K` layers. With `b = s // unit` units completed before
`s` and `r = s % unit` sublayers into the running one, read `s` has

    outputs, replace   1 + b + (1 if r > 0)     e, u_0 … u_{s-1}   or   e, C_0 … C_{b-1} and the partial PC
    outputs, add       1 + b                    e, the completed units (the partial is already in the base)
    states             1 + b + (1 if r > 0)     h at each unit's start, and h_s where it is not such a start itself

sources. A read with fewer than two has nothing to choose: it is *inert*, has no parameters and returns `h_s`.
"""

from typing import Any


def unit_sublayers(config: Any) -> int:
    """Sublayers that make one source: 1, or 2K for blocks of K layers."""
    return 1 if config.depth_block_size is None else 2 * config.depth_block_size


def read_count(config: Any) -> int:
    """Reads of the model: one per sublayer, and the final one where the combine rule has it."""
    return 2 * config.num_hidden_layers + (config.depth_combine == "replace")


def _written(config: Any, unit: int) -> str:
    if config.depth_block_size is not None:
        return f"block {unit}"
    return f"layer {unit // 2} {'mlp' if unit % 2 else 'attn'}"


def source_labels(config: Any, s: int) -> list[str]:
    """Names of the sources of read `s`, in the order of its weights.

    Returns:
        `embedding`, then `layer 3 attn` (one sublayer's output) or `block 2` (one block's sum), then `partial` for the
        running block; over states `state s` for h_s. Layers, blocks and states are counted from 0.
    """
    unit = unit_sublayers(config)
    completed, running = divmod(s, unit)
    if config.depth_source == "state":
        starts = [*range(0, s + 1, unit)]
        return ["embedding" if state == 0 else f"state {state}" for state in starts + ([s] if running else [])]
    labels = ["embedding", *(_written(config, index) for index in range(completed))]
    if running and config.depth_combine == "replace":
        labels.append("partial")
    return labels


def live_reads(config: Any) -> list[int]:
    """The reads that have a choice (two sources or more), in order."""
    return [s for s in range(read_count(config)) if len(source_labels(config, s)) > 1]


def read_name(config: Any, s: int) -> str:
    """Module path of read `s` inside the decoder: `layers.3.attn_read`, `layers.3.mlp_read`, `final_read`."""
    if s == 2 * config.num_hidden_layers:
        return "final_read"
    return f"layers.{s // 2}.{'mlp_read' if s % 2 else 'attn_read'}"
