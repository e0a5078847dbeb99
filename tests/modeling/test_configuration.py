# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Fields, presets and refusals of the configuration."""

import json

import pytest
import torch
from conftest import QUERY_PRESETS, tiny_config, tiny_qwen3_config
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaConfig, Qwen3Config

from depthroute import PRESETS, DepthRouteConfig, DepthRouteForCausalLM
from depthroute.errors import one_line


@pytest.mark.smoke
def test_defaults_are_plain_delta():
    config = DepthRouteConfig()
    assert config.preset_name == "delta" and not config.depth_anchored and config.depth_num_heads == 1
    assert (config.depth_source, config.depth_combine, config.depth_block_size) == ("output", "add", None)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_its_fields_and_survives_json(preset, tmp_path):
    config = tiny_config(preset, **({"depth_num_heads": 2} if preset in QUERY_PRESETS else {}))
    assert config.preset_name == preset
    for name, value in PRESETS[preset].fields.items():
        assert getattr(config, name) == value
    config.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    assert "preset_name" not in entries and "preset" not in entries  # derived, so that fields are the one truth
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is DepthRouteConfig
    assert {key: value for key, value in loaded.to_dict().items() if key != "_name_or_path"} == {
        key: value for key, value in config.to_dict().items() if key != "_name_or_path"
    }


@pytest.mark.parametrize(("layers", "block"), [(7, 1), (8, 1), (9, 2), (28, 4), (36, 5)])
def test_the_block_size_is_an_eighth_of_the_layers(layers, block):
    base = tiny_qwen3_config(num_hidden_layers=layers)
    assert DepthRouteConfig.from_preset("attnres-block", base=base).depth_block_size == block
    assert DepthRouteConfig.from_preset("attnres-states", base=base).depth_block_size is None


def test_a_backbone_keeps_its_settings(tmp_path):
    base = tiny_qwen3_config(
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 12345.0},
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=3,
        eos_token_id=[1, 2],
        dtype="bfloat16",
    )
    base.save_pretrained(tmp_path)
    for source in (base, tmp_path, str(tmp_path)):
        config = DepthRouteConfig.from_preset("delta", base=source)
        for name in (
            "rope_parameters",
            "layer_types",
            "sliding_window",
            "eos_token_id",
            "tie_word_embeddings",
            "dtype",
        ):
            assert getattr(config, name) == getattr(base, name), name
        assert config.qk_norm and config.model_type == "depthroute" and config.dtype == torch.bfloat16


def test_a_preset_on_one_of_our_own_configurations():
    first = tiny_config("attnres-block", depth_anchored=True, depth_num_heads=4, qk_norm=False)
    second = DepthRouteConfig.from_preset("delta", base=first)
    # the backbone's settings stay, the routing is the new preset's
    assert not second.qk_norm and second.hidden_size == 32
    assert (second.preset_name, second.depth_anchored, second.depth_num_heads) == ("delta", False, 1)


def test_from_a_config_in_another_language():
    assert DepthRouteConfig.from_preset("delta", base=LlamaConfig(num_hidden_layers=2)).qk_norm is False


REFUSED = {
    "depth_soruce='output'": ({"depth_soruce": "output"}, "depth_soruce: unknown field, nearest: depth_source"),
    "qk_nrom": ({"qk_nrom": True}, "qk_nrom: unknown field, nearest: qk_norm"),
    "residual_typ": ({"residual_typ": "standard"}, "residual_typ: unknown field, nearest: residual_type"),
    "source": ({"depth_source": "outputs"}, "depth_source"),
    "block 0": ({"depth_block_size": 0}, "depth_block_size: got 0, allowed: layers ≥ 1"),
    "block -3": ({"depth_block_size": -3}, "depth_block_size: got -3, allowed: layers ≥ 1"),
    "heads 5": ({"depth_num_heads": 5}, "depth_num_heads: got 5, allowed: a divisor of hidden_size = 4096"),
    "heads 0": ({"depth_num_heads": 0}, "depth_num_heads: got 0, allowed"),
    "scale 0": ({"depth_logit_scale": 0.0}, "depth_logit_scale: got 0.0, allowed: a finite number > 0"),
    "backend": ({"depth_backend": "cuda"}, "depth_backend"),
    "inert": ({"depth_block_size": 32}, "depth_block_size: got 32 with num_hidden_layers = 32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_field_the_value_and_what_is_allowed(case):
    values, message = REFUSED[case]
    with pytest.raises((ValueError, StrictDataclassError)) as caught:
        DepthRouteConfig(**values)
    assert message in one_line(caught.value) and "\n" not in one_line(caught.value)


def test_refusals_of_from_preset():
    for arguments, message in (
        ({"name": "delta-blok"}, "preset: got 'delta-blok', nearest: delta-block"),
        (
            {"name": "delta", "depth_block_size": 4},
            "depth_block_size: got 4, allowed: none, preset 'delta' has no blocks",
        ),
        ({"name": "delta", "hiden_size": 4}, "hiden_size: unknown field, nearest: hidden_size"),
        ({"name": "delta", "base": LlamaConfig(mlp_bias=True)}, "mlp_bias: got True, allowed: False"),
        ({"name": "delta", "depth_num_heads": 7}, "depth_num_heads: got 7, allowed"),
    ):
        with pytest.raises(ValueError) as caught:
            DepthRouteConfig.from_preset(**arguments)
        assert str(caught.value).startswith(message)


def test_folders_that_are_no_backbone(tmp_path):
    with pytest.raises(ValueError, match="config.json: FileNotFoundError, allowed: a readable model configuration"):
        DepthRouteConfig.from_preset("delta", base=tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="model_type: got 'gpt2', allowed: qwen3, qwen3_moe, llama, depthroute"):
        DepthRouteConfig.from_preset("delta", base=tmp_path)


def test_pipeline_parallelism_is_refused_by_name(tmp_path):
    assert Qwen3Config().base_model_pp_plan and not DepthRouteConfig().base_model_pp_plan
    model = DepthRouteForCausalLM(tiny_config("delta"))
    assert not model._pp_plan
    with pytest.raises(ValueError, match="pp_size: got 2, allowed: 1, DepthRouteForCausalLM does not support pipeline"):
        DepthRouteForCausalLM.prepare_distribute_model({"pp_size": 2})


def test_another_depth_than_the_backbone_s():
    config = DepthRouteConfig.from_preset("delta-block", base=tiny_qwen3_config(), num_hidden_layers=4)
    assert (len(config.layer_types), config.depth_block_size) == (4, 1)


def test_fields_set_after_construction_are_checked_when_the_model_is_built():
    config = tiny_config("delta-block")
    config.depth_block_size = 99
    with pytest.raises(StrictDataclassError, match="depth_block_size"):
        DepthRouteForCausalLM(config)
