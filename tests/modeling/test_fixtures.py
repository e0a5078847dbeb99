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
DEFERRED: dict = {}
KINDS = {"single": "depth_attention", "dual": "dual_stream"}

RUN = [
    name for name, entry in MANIFEST.items() if all(entry.get(key, value) == value for key, value in DEFERRED.items())
]

# float64: a few hundred roundings of 1e-16. float32: of 6e-8, times a cancelling sum. Both relative to max |x|.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5}


def fixture_config(entry: dict, width: int) -> DepthRouteConfig:
    known = {item.name for item in fields(DepthRouteConfig)}
    values = {key: value for key, value in entry.items() if key in known}
    return DepthRouteConfig(
        **values,
        residual_type=KINDS[entry["kind"]],
        num_hidden_layers=entry["layers"],
        hidden_size=width,
        num_attention_heads=1,
        rms_norm_eps=entry["eps"],
    )


def fill(read, s, arrays):
    """Give one read the fixture's parameters."""
    if getattr(read, "gate_logits", None) is not None:
        alpha, gates = arrays["alpha"][s], []
        if s < len(arrays["rho"]):
            gates = [arrays["rho"][s], *arrays["beta"][s] / 2]
        read.gate_logits.copy_(torch.logit(torch.stack([alpha, *gates])))
    for name in ("query", "key_norm", "value_query", "detail_bias"):
        parameter = getattr(read, name, None)
        if parameter is not None:
            parameter.copy_(arrays[name][s].reshape(parameter.shape))
    return read


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", RUN)
@torch.no_grad()
def test_reads_agree_with_the_fixture(name, dtype):
    entry = MANIFEST[name]
    exact = {key: torch.from_numpy(array) for key, array in np.load(FOLDER / f"{name}.npz").items()}
    arrays = {key: array.to(dtype) for key, array in exact.items()}
    residual = build_residual(fixture_config(entry, arrays["embedding"].shape[-1]))

    def module(s):
        read = residual.create_read(s)
        return None if read is None else fill(read.to(torch.float64), s, exact).to(dtype)

    def error(found, expected):
        return ((found - expected).abs().max() / expected.abs().max()).item()

    state = residual.start(arrays["embedding"])
    for s in range(2 * entry["layers"]):
        reading = residual.read(state, s, module(s), None)
        assert error(reading.x, arrays["reads"][s]) < TOLERANCES[dtype], f"read {s}"
        if reading.value is not None:
            assert error(reading.value, arrays["value_reads"][s]) < TOLERANCES[dtype], f"value read {s}"
        assert (reading.value is not None) == (
            "value_reads" in arrays and getattr(module(s), "value_query", None) is not None
        )
        state = residual.write(state, s, arrays["outputs"][s], reading)
    final = residual.finish(state, module(2 * entry["layers"]), None)
    assert error(final, arrays["final"]) < TOLERANCES[dtype]


def test_nothing_is_skipped_but_what_is_listed():
    known = {item.name for item in fields(DepthRouteConfig)}
    for name, entry in MANIFEST.items():
        deferred_by = [key for key, value in DEFERRED.items() if entry.get(key, value) != value]
        unknown = [key for key in entry if key not in known | {"layers", "eps", "kind", *DEFERRED}]
        assert (name in RUN) == (not deferred_by), name
        assert not unknown, f"{name} asks for {unknown}, which neither the configuration nor the list knows"
    assert len(RUN) >= 16
    # a field that has come is no reason to defer any more
    assert not known & set(DEFERRED)
