# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Every read of every fixture, against the independent float64 reference that wrote them."""

import json
import os
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from depthroute import DepthRouteConfig
from depthroute.modeling.modeling_depthroute import build_residual


FOLDER = Path(os.environ.get("DEPTHROUTE_FIXTURES") or Path(__file__).parents[1] / "fixtures")
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())

# What a fixture may ask for that the family does not have yet: field → the one value that today's models imply.
DEFERRED = {"kind": "single", "depth_value_route": "shared", "depth_detail_bases": []}
# Fixture fields that only matter once one of the deferred ones is there.
DORMANT = ("depth_detail_bias", "depth_detail_max_scale")

RUN = [
    name for name, entry in MANIFEST.items() if all(entry.get(key, value) == value for key, value in DEFERRED.items())
]

# float64: a few hundred roundings of 1e-16. float32: of 6e-8, times a cancelling sum. Both relative to max |x|.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5}


def fixture_config(entry: dict, width: int) -> DepthRouteConfig:
    known = {item.name for item in fields(DepthRouteConfig)}
    values = {key: value for key, value in entry.items() if key in known}
    return DepthRouteConfig(
        **values, num_hidden_layers=entry["layers"], hidden_size=width, num_attention_heads=1, rms_norm_eps=entry["eps"]
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", RUN)
def test_reads_agree_with_the_fixture(name, dtype):
    entry = MANIFEST[name]
    arrays = {key: torch.from_numpy(array).to(dtype) for key, array in np.load(FOLDER / f"{name}.npz").items()}
    residual = build_residual(fixture_config(entry, arrays["embedding"].shape[-1]))

    def module(s):
        read = residual.create_read(s)
        if read is None:
            return None
        read = read.to(dtype)
        with torch.no_grad():
            read.query.copy_(arrays["query"][s].flatten())
            read.key_norm.copy_(arrays["key_norm"][s])
        return read

    def error(found, expected):
        return ((found - expected).abs().max() / expected.abs().max()).item()

    with torch.no_grad():
        state = residual.start(arrays["embedding"])
        for s in range(2 * entry["layers"]):
            read = residual.read(state, s, module(s), None)
            assert error(read, arrays["reads"][s]) < TOLERANCES[dtype], f"read {s}"
            state = residual.write(state, s, arrays["outputs"][s])
        final = residual.finish(state, module(2 * entry["layers"]), None)
    assert error(final, arrays["final"]) < TOLERANCES[dtype]


def test_nothing_is_skipped_but_what_is_listed():
    known = {item.name for item in fields(DepthRouteConfig)}
    schedule = {"layers", "eps"}
    for name, entry in MANIFEST.items():
        deferred_by = [key for key, value in DEFERRED.items() if entry.get(key, value) != value]
        unknown = [key for key in entry if key not in known | schedule | {*DEFERRED, *DORMANT}]
        assert (name in RUN) == (not deferred_by), name
        assert deferred_by or not unknown, (
            f"{name} asks for {unknown}, which neither the configuration nor the list knows"
        )
    assert len(RUN) >= 16
    # a field that has come is no reason to defer any more
    assert not known & {*DEFERRED, *DORMANT}
