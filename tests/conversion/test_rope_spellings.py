# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Rotary positions in the spelling of old configurations (`rope_theta`, `rope_scaling`) and of new ones (`rope_parameters`): the
converted model has the stock class's inverse frequencies and attention scaling, within its context and beyond."""

import pytest
import torch
from conftest import tiny_qwen3_config
from conversion_helpers import SIZES, edit_json, tiny_llama_config
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from depthroute import DepthRouteConfig, DepthRouteForCausalLM, DepthRouteModel, convert
from depthroute.errors import Refused


CONTEXT, PAIRS = 32, 4
SCALINGS = {
    "none": None,
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": CONTEXT},
    "yarn with all its options": {
        "factor": 4.0, "original_max_position_embeddings": CONTEXT, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False,
        "attention_factor": 1.3,
    },
    "yarn with mscale": {"factor": 4.0, "original_max_position_embeddings": CONTEXT, "mscale": 0.7, "mscale_all_dim": 1.2},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": CONTEXT // 2,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0], "factor": 4.0,
        "original_max_position_embeddings": CONTEXT,
    },
}  # fmt: skip
THETA = 5000.0


def rope_type(scaling: str) -> str:
    return "default" if scaling == "none" else scaling.split()[0]


def spelled(scaling: str, spelling: str) -> dict:
    """The entries of a configuration file."""
    options = SCALINGS[scaling] or {}
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_type": rope_type(scaling), "rope_theta": THETA, **options}}
    if scaling == "none":
        return {"rope_theta": THETA, "rope_parameters": None}
    return {
        "rope_theta": THETA,
        "rope_parameters": None,
        "rope_scaling": {"type" if spelling == "type" else "rope_type": rope_type(scaling), **options},
    }


def write_config(config, folder, scaling: str, spelling: str) -> None:
    """`config.json` of a configuration, with these positions."""
    config.save_pretrained(folder)
    edit_json(folder / "config.json", max_position_embeddings=CONTEXT, **spelled(scaling, spelling))


def check_same_positions(stock, ours) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_dim / 2] and scaling of a rotary embedding, after it has been found to agree with ours: as they
    are built, on a short sequence, on one beyond every original context, and on a short one again."""
    at_first = stock.inv_freq.clone(), stock.attention_scaling
    states = torch.zeros(1, 1, 32)
    for length in (0, 9, 3 * CONTEXT, 9):
        if length:
            positions = torch.arange(length).unsqueeze(0)
            for a, b in zip(stock(states, positions), ours(states, positions)):
                assert torch.equal(a, b), length
        assert torch.equal(stock.inv_freq, ours.inv_freq), length
        assert stock.attention_scaling == ours.attention_scaling, length
    return at_first


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling_in_every_spelling(scaling, spelling, tmp_path):
    write_config(tiny_qwen3_config(num_hidden_layers=1), tmp_path, scaling, spelling)
    stock = Qwen3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    DepthRouteConfig.from_preset("standard", base=tmp_path).save_pretrained(tmp_path / "out")
    ours = DepthRouteModel(DepthRouteConfig.from_pretrained(tmp_path / "out")).rotary_emb
    frequencies, attention_scaling = check_same_positions(stock, ours)
    unscaled = 1.0 / THETA ** (torch.arange(0, 2 * PAIRS, 2) / (2 * PAIRS))
    # dynamic scaling begins beyond the context, and the long factors of longrope beyond the original one
    scaled_at_once = scaling not in ("none", "dynamic")
    assert torch.allclose(frequencies, unscaled, rtol=1e-6) == (not scaled_at_once)
    assert (attention_scaling != 1.0) == (rope_type(scaling) in ("yarn", "longrope"))
    kept = DepthRouteConfig.from_pretrained(tmp_path / "out").rope_parameters
    assert kept["rope_type"] == rope_type(scaling) and kept["rope_theta"] == THETA
    assert all(kept[key] == value for key, value in (SCALINGS[scaling] or {}).items())


SIZED = {**{key: getattr(tiny_qwen3_config(), key) for key in SIZES}, "num_hidden_layers": 2}
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(tiny_qwen3_config(num_hidden_layers=2)),
    "llama": lambda: LlamaForCausalLM(tiny_llama_config(num_hidden_layers=2)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{key: SIZED[key] for key in SIZED if key != "head_dim"})),
}


@pytest.mark.parametrize("entries", [spelled("yarn", "type"), {"rope_parameters": None}], ids=["old spelling", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_conversions_of_every_family(family, entries, tmp_path):
    torch.manual_seed(0)
    FAMILIES[family]().save_pretrained(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", max_position_embeddings=CONTEXT, **entries)
    assert convert(tmp_path / "source", tmp_path / "out").verification.bitwise_equal
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "source").model.rotary_emb
    check_same_positions(stock, DepthRouteForCausalLM.from_pretrained(tmp_path / "out").model.rotary_emb)


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"type": "mrope", "mrope_section": [2, 1, 1]}, "'rope_type': 'mrope'"),
        ({"rope_type": "yarn"}, "factor"),
    ],
    ids=["of another kind", "incomplete"],
)
def test_a_scaling_that_no_model_can_be_built_with(scaling, message, tmp_path):
    Qwen3ForCausalLM(tiny_qwen3_config(num_hidden_layers=2)).save_pretrained(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", rope_parameters=None, rope_theta=THETA, rope_scaling=scaling)
    with pytest.raises(Refused, match=message):
        convert(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()
