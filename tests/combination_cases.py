# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Combinations of the axes that no paper studied: name → (preset, fields)."""

COMBINATIONS = {
    "delta-block, everything": (
        "delta-block",
        {"depth_value_route": "decoupled", "depth_detail_bases": ["phase", "split"], "depth_num_heads": 4},
    ),
    "delta-block, null among details": (
        "delta-block",
        {"depth_value_route": "uniform", "depth_detail_bases": ["split"], "depth_null_source": True},
    ),
    "attnres, decoupled with heads": ("attnres", {"depth_value_route": "decoupled", "depth_num_heads": 8}),
    "attnres, average of projections": (
        "attnres",
        {"depth_value_route": "average", "depth_value_projection": True, "depth_key_norm": "none"},
    ),
    "states in blocks, decoupled, null": (
        "attnres-states",
        {"depth_block_size": 3, "depth_value_route": "decoupled", "depth_null_source": True},
    ),
    "states added": ("attnres-states", {"depth_combine": "add", "depth_num_heads": 4, "depth_value_route": "uniform"}),
    "wav of one-layer blocks": (
        "wav",
        {"depth_block_size": 1, "depth_detail_bases": ["split"], "depth_value_route": "average"},
    ),
    "wav, everything": (
        "wav",
        {
            "depth_block_size": 3,
            "depth_value_route": "decoupled",
            "depth_value_projection": True,
            "depth_null_source": True,
            "depth_num_heads": 4,
            "depth_detail_bias": -0.7,
            "depth_detail_max_scale": 2.5,
            "depth_logit_scale": 0.5,
        },
    ),
    "dar, everything": (
        "dar",
        {"dual_gates": "dynamic", "depth_num_heads": 4, "depth_block_size": 3, "dual_partial_source": False},
    ),
    "dar-full, fixed": ("dar-full", {"dual_routing": "fixed", "depth_key_norm": "none", "dual_gates": "dynamic"}),
    "dar, one block": ("dar", {"depth_block_size": 9, "dual_routing": "self", "depth_logit_scale": 2.0}),
}
