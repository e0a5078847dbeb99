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
from depthroute.modeling.configuration_depthroute import HOSTING_FIELDS, family_fields


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
    hosted = dict.fromkeys(HOSTING_FIELDS, False)
    first = tiny_config("attnres-block", depth_anchored=True, depth_num_heads=4, **hosted)
    second = DepthRouteConfig.from_preset("delta", base=first)
    # the backbone's settings stay, the routing is the new preset's
    assert not any(getattr(second, name) for name in HOSTING_FIELDS) and second.hidden_size == 32
    assert (second.preset_name, second.depth_anchored, second.depth_num_heads) == ("delta", False, 1)


def test_from_a_config_in_another_language():
    assert DepthRouteConfig.from_preset("delta", base=LlamaConfig(num_hidden_layers=2)).qk_norm is False


DUAL = {"residual_type": "dual_stream", "depth_block_size": 4}
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
    "scale inf": ({"depth_logit_scale": float("inf")}, "depth_logit_scale: got inf, allowed: a finite number > 0"),
    "cap 0": (
        {"depth_detail_bases": ["phase"], "depth_block_size": 4, "depth_detail_max_scale": 0.0},
        "depth_detail_max_scale: got 0.0, allowed: a finite number > 0",
    ),
    "bias nan": (
        {"depth_detail_bases": ["phase"], "depth_block_size": 4, "depth_detail_bias": float("nan")},
        "depth_detail_bias: got nan, allowed: a finite number",
    ),
    "basis": (
        {"depth_detail_bases": ["phrase"]},
        "'depth_detail_bases[0]' expected one of ('phase', 'split'), got phrase",
    ),
    "basis, not in a list": ({"depth_detail_bases": "phase"}, "depth_detail_bases"),
    "value route": ({"depth_value_route": "separate"}, "'depth_value_route' expected one of ('shared', 'decoupled'"),
    "two streams without blocks": (
        {"residual_type": "dual_stream"},
        "depth_block_size: got None for two streams, allowed: layers ≥ 1 (1 is the full form)",
    ),
    "transport inf": (
        {**DUAL, "dual_transport_init": float("inf")},
        "dual_transport_init: got inf, allowed: a finite number",
    ),
    "asymmetry 0": ({**DUAL, "dual_write_asymmetry": 0}, "dual_write_asymmetry: got 0, allowed: between 0 and 1 (at 0"),
    "asymmetry 1": ({**DUAL, "dual_write_asymmetry": 1.0}, "dual_write_asymmetry: got 1.0, allowed: between 0 and 1"),
    "asymmetry -0.5": ({**DUAL, "dual_write_asymmetry": -0.5}, "dual_write_asymmetry: got -0.5, allowed"),
    "routing": ({**DUAL, "dual_routing": "cross"}, "'dual_routing' expected one of ('cross_key', 'self'"),
    "gates": ({**DUAL, "dual_gates": "learned"}, "'dual_gates' expected one of ('static', 'dynamic')"),
    "streams 1": (
        {"residual_type": "hyper_connection", "hyper_num_streams": 1},
        "hyper_num_streams: got 1, allowed: ≥ 2",
    ),
    "dual_gate": ({"dual_gate": "static"}, "dual_gate: unknown field, nearest: dual_gates"),
    "hyper_streams": ({"hyper_streams": 2}, "hyper_streams: unknown field, nearest: hyper_num_streams"),
    "experts -1": ({"num_experts": -1}, "num_experts: got -1, allowed: ≥ 0 (0 is dense)"),
    "more experts per token than experts": (
        {"num_experts": 4, "num_experts_per_tok": 8},
        "num_experts_per_tok: got 8, allowed: 1 to num_experts = 4",
    ),
    "no expert per token": (
        {"num_experts": 4, "num_experts_per_tok": 0},
        "num_experts_per_tok: got 0, allowed: 1 to num_experts = 4",
    ),
    "sparse step 0": ({"decoder_sparse_step": 0}, "decoder_sparse_step: got 0, allowed: ≥ 1"),
    "inert": ({"depth_block_size": 32}, "depth_block_size: got 32 with num_hidden_layers = 32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_field_the_value_and_what_is_allowed(case):
    values, message = REFUSED[case]
    with pytest.raises((ValueError, StrictDataclassError)) as caught:
        DepthRouteConfig(**values)
    assert message in one_line(caught.value) and "\n" not in one_line(caught.value)


# residual type → what else it needs
RESIDUAL_TYPES = {
    "standard": {},
    "depth_attention": {},
    "dual_stream": {"depth_block_size": 4},
    "hyper_connection": {},
    "rezero": {},
    "layerscale": {},
}
# a value of every field of the family that is not its default
MOVED = {
    "depth_source": "state",
    "depth_combine": "replace",
    "depth_block_size": 4,
    "depth_num_heads": 2,
    "depth_key_norm": "none",
    "depth_logit_scale": 2.0,
    "depth_value_route": "average",
    "depth_detail_bases": ["split"],
    "depth_detail_bias": -1.0,
    "depth_detail_max_scale": 0.5,
    "depth_value_projection": True,
    "depth_null_source": True,
    "dual_routing": "self",
    "dual_gates": "dynamic",
    "dual_partial_source": False,
    "dual_transport_init": 1.0,
    "dual_write_asymmetry": 0.25,
    "hyper_num_streams": 2,
}
# written out here, not taken from the table that is tested
READ_BY = {
    "depth_block_size": ("depth_attention", "dual_stream"),
    "depth_num_heads": ("depth_attention", "dual_stream"),
    "depth_key_norm": ("depth_attention", "dual_stream"),
    "depth_logit_scale": ("depth_attention", "dual_stream"),
    **{name: ("dual_stream",) for name in MOVED if name.startswith("dual_")},
    "hyper_num_streams": ("hyper_connection",),
}
READ_BY = {name: READ_BY.get(name, ("depth_attention",)) for name in MOVED}


@pytest.mark.parametrize("residual_type", RESIDUAL_TYPES)
def test_fields_without_a_meaning_are_refused_by_name(residual_type):
    taken_by_all = {"residual_type", "depth_anchored", "depth_backend", *HOSTING_FIELDS}
    assert set(family_fields()) == set(MOVED) | taken_by_all  # a new field has to say whose it is
    for name, value in MOVED.items():
        fields = {"residual_type": residual_type, **RESIDUAL_TYPES[residual_type], name: value}
        if residual_type in READ_BY[name]:
            if name.startswith("depth_detail"):
                fields = {"depth_detail_bases": ["split"], "depth_block_size": 4, **fields}
            assert getattr(DepthRouteConfig(**fields), name) == value
        else:
            with pytest.raises(StrictDataclassError) as caught:
                DepthRouteConfig(**fields)
            message = one_line(caught.value)
            assert message.startswith(f"{name}: got {value!r}, allowed: "), message
            assert message.endswith(f"it has no meaning for residual_type = {residual_type!r}"), message


@pytest.mark.parametrize("residual_type", RESIDUAL_TYPES)
def test_what_every_residual_takes(residual_type):
    more = {"depth_anchored": True, "depth_backend": "reference", **dict.fromkeys(HOSTING_FIELDS, False)}
    DepthRouteConfig(residual_type=residual_type, **RESIDUAL_TYPES[residual_type], **more)


@pytest.mark.parametrize(
    ("preset", "values", "name"),
    [
        ("dar", {"depth_block_size": 1}, "dar-full"),
        ("dar-full", {}, "dar-full"),
        ("dar", {"dual_gates": "dynamic", "dual_write_asymmetry": 0.1, "dual_partial_source": False}, "dar"),
        ("dar", {"dual_routing": "self"}, "custom"),
        ("attnres-block", {"depth_value_route": "decoupled"}, "rd-attnres"),
        ("rd-attnres", {"depth_value_route": "average"}, "custom"),
        ("attnres-block", {"depth_detail_bases": ["phase", "split"]}, "wav"),
        ("wav", {"depth_detail_bases": ["split"]}, "custom"),
        ("wav", {"depth_detail_bias": -1.0, "depth_detail_max_scale": 2.0}, "wav"),
        ("mhc", {"hyper_num_streams": 2}, "mhc"),
        ("layerscale", {"depth_anchored": True}, "layerscale"),
        ("attnres-block", {"depth_value_projection": True, "depth_null_source": True}, "attnres-block"),
        ("delta-block", {"depth_value_route": "decoupled"}, "custom"),
    ],
)
def test_names_follow_from_fields(preset, values, name):
    assert tiny_config(preset, **values).preset_name == name


def test_wav_needs_blocks_of_two_layers():
    """With both details, blocks of one layer would have one detail twice."""
    base = tiny_qwen3_config(num_hidden_layers=8)
    assert DepthRouteConfig.from_preset("wav", base=base).depth_block_size == 2
    assert DepthRouteConfig.from_preset("wav", base=base, depth_detail_bases=["split"]).depth_block_size == 1
    assert DepthRouteConfig.from_preset("dar", base=base).depth_block_size == 1
    assert DepthRouteConfig.from_preset("dar-full", base=base).depth_block_size == 1


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
    with pytest.raises(
        ValueError, match="model_type: got 'gpt2', allowed: qwen3, qwen3_moe, llama, mistral, qwen2, depthroute"
    ):
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
