# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Which sources each depth read sees: plain integers and labels, no tensors.

Sublayers are counted `s = 0 … 2L-1` (even: attention, odd: MLP); read `2L` is the final read. A *unit* is the number of
sublayers that make one source: 1 per sublayer, `2K` for blocks of `K` layers. With `b = s // unit` units completed before
`s` and `r = s % unit` sublayers into the running one, read `s` has

    outputs, replace   1 + b + (1 if r > 0)     e, u_0 … u_{s-1}   or   e, C_0 … C_{b-1} and the partial PC
    outputs, add       1 + b                    e, the completed units (the partial is already in the base)
    states             1 + b + (1 if r > 0)     h at each unit's start, and h_s where it is not such a start itself
    two streams        as outputs, replace      entries of each stream's history, the partial only with `dual_partial_source`

sources; with D detail bases, every block and the partial count 1 + D times, except in the final read. A read with fewer than
two sources has nothing to choose: it is *inert*, has no query and returns `h_s`.
"""

from typing import Any, NamedTuple


class Source(NamedTuple):
    """One source of a read: its name, and the detail basis it is the detail of (None: the source itself)."""

    label: str
    basis: str | None = None


def unit_sublayers(config: Any) -> int:
    """Sublayers that make one source: 1, or 2K for blocks of K layers."""
    return 1 if config.depth_block_size is None else 2 * config.depth_block_size


def read_count(config: Any) -> int:
    """Reads of the model: one per sublayer, and the final one where the stream is not what is left at the end."""
    if config.residual_type not in ("depth_attention", "dual_stream"):
        return 0
    adds = config.residual_type == "depth_attention" and config.depth_combine == "add"
    return 2 * config.num_hidden_layers + (not adds)


def includes_partial(config: Any) -> bool:
    """Whether the running block is a source."""
    if config.residual_type == "dual_stream":
        return config.dual_partial_source
    return config.depth_source == "output" and config.depth_combine == "replace"


def history_sources(config: Any, s: int) -> list[Source]:
    """The completed sources before sublayer `s`, in the order in which they are kept: each block's details behind it."""
    unit = unit_sublayers(config)
    sources = [Source("embedding")]
    for index in range(s // unit):
        if config.residual_type == "depth_attention" and config.depth_source == "state":
            sources.append(Source(f"state {(index + 1) * unit}"))
        elif config.depth_block_size is None:
            sources.append(Source(f"layer {index // 2} {'mlp' if index % 2 else 'attn'}"))
        else:
            sources.append(Source(f"block {index}"))
            sources.extend(Source(f"block {index} {basis}", basis) for basis in config.depth_detail_bases)
    return sources


def read_sources(config: Any, s: int) -> list[Source]:
    """The sources of read `s`, in the order of its weights."""
    sources = history_sources(config, s)
    if s % unit_sublayers(config):
        if config.residual_type == "depth_attention" and config.depth_source == "state":
            sources.append(Source(f"state {s}"))
        elif includes_partial(config) or s == 2 * config.num_hidden_layers:  # a short last block is never dropped
            sources.append(Source("partial"))
            sources.extend(Source(f"partial {basis}", basis) for basis in config.depth_detail_bases)
    if s == 2 * config.num_hidden_layers:
        return [source for source in sources if source.basis is None]
    return sources


def source_labels(config: Any, s: int) -> list[str]:
    """Names of the sources of read `s`, in the order of its weights.

    Returns:
        `embedding`, then `layer 3 attn` (one sublayer's output) or `block 2` (one block's sum) with its details behind it
        (`block 2 phase`, `block 2 split`), then `partial` for the running block; over states `state s` for h_s. Layers,
        blocks and states are counted from 0.
    """
    return [source.label for source in read_sources(config, s)]


def live_reads(config: Any) -> list[int]:
    """The reads that have a choice (two sources or more), in order."""
    return [s for s in range(read_count(config)) if len(read_sources(config, s)) > 1]


def read_name(config: Any, s: int) -> str:
    """Module path of read `s` inside the decoder: `layers.3.attn_read`, `layers.3.mlp_read`, `final_read`."""
    if s == 2 * config.num_hidden_layers:
        return "final_read"
    return f"layers.{s // 2}.{'mlp_read' if s % 2 else 'attn_read'}"
