# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a residual keeps for backward beside a stock model: sources, logits, a value route. Bytes per token.

Counted in tensors of width D in the dtype of updates (a branch's input is kept in either model and not counted):

    depth attention   a source per sublayer            2L     replace, and over states: u_s, h_s, or the running block after each
                                                       2L − 1 add without blocks: the last update is nobody's source; and the
                                                              stream at the start of each group of layers
                                                       blocks add by blocks: (L − 1) // K completed ones
                      details, per block               2K − 1 of "phase" and K of "split": those that differ from the block's
                                                              sum (2K each where the cap is below 1); not of the last block's end
                      anchored                         for each group of layers the mix at initialisation, and where reads replace
                                                       outputs the stream at its start; in the first block for each read
                      a value route                    one more norm for each attention that has one
                      a stream of 16 bits              what reads with private sources give, beside the norm's copy in float32
    two streams       for each sublayer both partial sums and both mixes: 16 bytes for each entry of D, and 20 where updates have 16
                      bits, for the mixes are in float32; anchored: 3 more for each group of layers
    mHC               2n + 1 for each sublayer and 2n at the end, in float32, and 84·n² + 90·n numbers for the gates of a layer;
                      2n more for each layer where the stream has 16 bits
    ReZero, LayerScale  1 for each sublayer: its update

and 4 bytes for each logit: one for each source, route and head of each read. With checkpointing of layers what is kept is what
travels between them: the sources completed so far, the running block, its details, or the streams. Groups are the layers whose
reads are prepared together: one block, or about three layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..modeling.depth_schedule import live_reads, read_sources, unit_sublayers


class Kept(NamedTuple):
    """Bytes per token: `wide` for each entry of D, `narrow` beside that."""

    wide: float
    narrow: float = 0


def value_route_reads(config: Any) -> int:
    """How many attentions have values from a read of their own."""
    if config.residual_type != "depth_attention" or config.depth_value_route not in ("decoupled", "uniform"):
        return 0
    return sum(s % 2 == 0 and s < 2 * config.num_hidden_layers for s in live_reads(config))


def logits(config: Any) -> int:
    """Σ over reads of sources · routes · heads (two streams: two routes)."""
    total = 0
    for s in live_reads(config):
        routes = 2 if config.residual_type == "dual_stream" else 1
        if s % 2 == 0 and s < 2 * config.num_hidden_layers and config.depth_value_route != "shared":
            routes += 1
        total += len(read_sources(config, s)) * routes
    return total * config.depth_num_heads


def _blocks(config: Any) -> int:
    return -(-config.num_hidden_layers // config.depth_block_size)


def _adds(config: Any) -> bool:
    return config.residual_type == "depth_attention" and config.depth_combine == "add"


def _group(config: Any) -> int:
    """Layers whose reads are prepared together."""
    block = config.depth_block_size or 3
    one_block = config.depth_detail_bases or (_adds(config) and config.depth_block_size)
    return block if one_block else block * max(1, 3 // block)


def _groups(config: Any) -> int:
    return -(-config.num_hidden_layers // _group(config))


def _differing_details(config: Any, positions: range) -> int:
    """Details that are no copy of the block's sum, at the given positions of one block."""
    same_until = {"phase": 1, "split": config.depth_block_size}
    if config.depth_detail_max_scale < 1:
        same_until = dict.fromkeys(same_until, 0)
    return sum(position > same_until[basis] for position in positions for basis in config.depth_detail_bases)


def _details(config: Any, step: int) -> int:
    """Of all blocks, looked at after every `step` sublayers; those at the end of the last block nobody reads."""
    if not config.depth_detail_bases:
        return 0
    unit = unit_sublayers(config)
    whole = _differing_details(config, range(step, unit + 1, step))
    last = 2 * config.num_hidden_layers - (_blocks(config) - 1) * unit
    return whole * (_blocks(config) - 1) + _differing_details(config, range(step, last, step))


def _depth_attention(config: Any, numbers: Any) -> Kept:
    layers, blocks, groups = config.num_hidden_layers, config.depth_block_size, _groups(config)
    over_states = config.depth_source == "state"
    by_completed_blocks = _adds(config) and blocks is not None and not over_states
    tensors = 2 * layers + _details(config, 1)
    if by_completed_blocks:
        tensors = (layers - 1) // blocks + _details(config, 1)
    elif _adds(config) and not over_states:
        tensors = 2 * layers - 1 + groups
    if config.depth_anchored and not by_completed_blocks:
        tensors += groups
        if not _adds(config) and not over_states:
            # the first group has no whole block before it: each of its reads keeps the stream
            tensors += groups if blocks is None else groups - 1 + 2 * _group(config) - 1
    wide = tensors * numbers.update + value_route_reads(config) * numbers.norm / 2
    if numbers.stream < 4 and not by_completed_blocks:
        wide += (len(live_reads(config)) - groups + 1) * numbers.stream
    return Kept(wide, 4 * logits(config))


def _depth_attention_between_layers(config: Any, stream: int) -> float:
    layers, blocks = config.num_hidden_layers, config.depth_block_size
    over_states = config.depth_source == "state"
    if blocks is None:
        # every second state is the stream, which each layer keeps anyway
        tensors = layers if over_states else 2 * layers - 2 * _adds(config)
    elif over_states:
        tensors = 0
    else:
        tensors = layers - _adds(config) + _details(config, 2)
    return tensors * stream


def _dual_stream(config: Any, numbers: Any) -> Kept:
    wide = 2 * config.num_hidden_layers * (16 if numbers.update == 4 else 20)
    wide += 3 * _groups(config) * config.depth_anchored * numbers.stream
    return Kept(wide, 4 * logits(config))


def _hyper_connection(config: Any, numbers: Any) -> Kept:
    layers, n = config.num_hidden_layers, config.hyper_num_streams
    copies = 2 * n * layers * numbers.stream if numbers.stream < 4 else 0
    return Kept(4 * (layers * (4 * n + 2) + 2 * n) + copies, 4 * layers * (84 * n * n + 90 * n))


def _branch_updates(config: Any, numbers: Any) -> Kept:
    return Kept(2 * config.num_hidden_layers * numbers.update)


IN_A_FORWARD: dict[str, Callable[[Any, Any], Kept]] = {
    "standard": lambda config, numbers: Kept(0),
    "depth_attention": _depth_attention,
    "dual_stream": _dual_stream,
    "hyper_connection": _hyper_connection,
    "rezero": _branch_updates,
    "layerscale": _branch_updates,
}
"""By residual type: what the whole model keeps."""

BETWEEN_LAYERS: dict[str, Callable[[Any, int], float]] = {
    "standard": lambda config, stream: 0,
    "depth_attention": _depth_attention_between_layers,
    "dual_stream": lambda config, stream: (2 * config.num_hidden_layers + 2) * stream,
    "hyper_connection": lambda config, stream: (config.num_hidden_layers + 2) * config.hyper_num_streams * stream,
    "rezero": lambda config, stream: 0,
    "layerscale": lambda config, stream: 0,
}
"""By residual type: bytes per token and entry of D that checkpointed layers keep, beside the stream."""


def kept_sources(config: Any, numbers: Any) -> float:
    """Bytes per token that `config`'s residual keeps beside the standard one.

    Args:
        numbers: a `memory.Precision`.
    """
    kept = IN_A_FORWARD[config.residual_type](config, numbers)
    return kept.wide * config.hidden_size + kept.narrow


def checkpointed_sources(config: Any, numbers: Any) -> float:
    """The same where every layer is checkpointed."""
    return BETWEEN_LAYERS[config.residual_type](config, numbers.update) * config.hidden_size
