# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A conversion keeps everything, adds the reads, and equals its source where that is promised."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import EXACT_PRESETS, QUERY_PRESETS, tiny_qwen3_config
from conversion_helpers import CHAT_TEMPLATE, edit_json, edit_weights, tiny_llama_config, tiny_moe_config
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from depthroute import PRESETS, DepthRouteConfig, DepthRouteForCausalLM, convert, verify
from depthroute.errors import CheckFailed, Refused
from depthroute.modeling.configuration_depthroute import AUTO_MAP


def weights(folder) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


CONTROLS = {
    "standard": "self_attn.o_proj.weight",
    "mhc": "mlp_read.gate_bias",
    "rezero": "mlp_scale",
    "layerscale": "mlp_scale",
    **dict.fromkeys(QUERY_PRESETS, "mlp_read.query"),
}
# the table over dense sources of either kind; over experts one preset of each module that reads or writes in its own way
CASES = [
    *((name, preset) for name in ("qwen3", "llama-bf16") for preset in PRESETS),
    ("moe", "dar"),
    ("moe", "mhc"),
    ("moe-fused", "delta-block"),
    ("moe-fused", "dar"),
    *(("moe-bf16", preset) for preset in ("standard", "wav", "dar", "layerscale")),
]


@pytest.mark.parametrize("name, preset", CASES)
def test_a_conversion_keeps_its_source(name, preset, originals, tmp_path):
    blocks = {"block_size": 2} if PRESETS[preset].blocks == "always" else {}
    report = convert(originals[name], tmp_path / "out", preset, **blocks)
    found = report.verification
    assert found.equality_promised == (preset in ("standard", *EXACT_PRESETS)) and not found.changed
    if found.equality_promised:
        assert found.bitwise_equal and found.max_abs_difference == 0
    else:  # mHC's published gates have an eps of 1e-6; in bfloat16 that is below one rounding of a gate, 2^-9
        assert 0 < found.relative_difference < (0.2 if found.dtype == "bfloat16" else 1e-3)
    assert found.dtype == ("bfloat16" if name.endswith("bf16") else "float32")
    # the negative control: the last query, gate or scale, or a weight where there is no routing
    assert found.control_differs and found.control_difference > 0.05 * found.logits_std
    assert found.perturbed == f"model.layers.{3 if 'moe' in name else 7}.{CONTROLS[preset]}"
    # an independent look at the weights: every byte of the source, and nothing but the reads besides
    source, written = weights(originals[name]), weights(tmp_path / "out")
    assert all(same_bytes(tensor, written[key]) for key, tensor in source.items())
    model = DepthRouteForCausalLM.from_pretrained(tmp_path / "out")
    assert set(written) - set(source) == set(model.routing_parameters())
    assert {p.dtype for p in model.parameters()} == {model.dtype}
    assert report.copied_tensors == len(source) and report.added_tensors == len(written) - len(source)
    assert report.copied_parameters + report.added_parameters == sum(tensor.numel() for tensor in written.values())


def test_experts_keep_their_layout(originals, converted, tmp_path):
    apart, fused = weights(converted("moe", "dar")), weights(converted("moe-fused", "dar"))
    assert (
        "model.layers.0.mlp.experts.3.up_proj.weight" in apart and "model.layers.0.mlp.experts.down_proj" not in apart
    )
    assert "model.layers.0.mlp.experts.down_proj" in fused and not any(".experts.3." in key for key in fused)
    # either conversion verifies against either source, and a copy that transformers has written anew against both
    DepthRouteForCausalLM.from_pretrained(converted("moe-fused", "dar")).save_pretrained(tmp_path / "again")
    for source, folder in [
        ("moe", converted("moe-fused", "dar")),
        ("moe-fused", converted("moe", "dar")),
        ("moe-fused", tmp_path / "again"),
    ]:
        found = verify(originals[source], folder)
        assert found.bitwise_equal and not found.changed and not found.trained_routing


def test_a_changed_expert_is_named_in_either_layout(originals, converted, tmp_path):
    changes = {
        "moe": lambda w: w["model.layers.3.mlp.experts.2.up_proj.weight"][-1].fill_(0.1),
        # the last row of expert 2 belongs to its up_proj
        "moe-fused": lambda w: w["model.layers.3.mlp.experts.gate_up_proj"][2, -1].fill_(0.1),
    }
    for name, change in changes.items():
        folder = Path(shutil.copytree(converted(name, "dar"), tmp_path / name))
        edit_weights(folder, change)
        found = verify(originals["moe"], folder)
        assert found.changed == ["model.layers.3.mlp.experts.2.up_proj.weight"], name


HOSTS = {
    "llama 3 rope": lambda: LlamaForCausalLM(
        tiny_llama_config(
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        )
    ),
    "llama with biases, one kv head": lambda: LlamaForCausalLM(tiny_llama_config(attention_bias=True, num_key_value_heads=1)),
    "sliding window": lambda: Qwen3ForCausalLM(
        tiny_qwen3_config(use_sliding_window=True, sliding_window=8, max_window_layers=3, tie_word_embeddings=True)
    ),
    "yarn": lambda: Qwen3ForCausalLM(
        tiny_qwen3_config(
            rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
        )
    ),
    "experts in every second layer, all of them chosen": lambda: Qwen3MoeForCausalLM(
        tiny_moe_config(
            num_hidden_layers=4, decoder_sparse_step=2, num_experts_per_tok=4, norm_topk_prob=True, output_router_logits=True,
            mlp_only_layers=[],
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("host", HOSTS)
def test_what_a_backbone_may_have_besides(host, tmp_path):
    HOSTS[host]().save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", tmp_path / "out", "attnres-block")
    assert report.verification.bitwise_equal and report.kept_files == ["generation_config.json"]
    assert json.loads(json.dumps(report.to_dict()))["verification"]["bitwise_equal"]


@pytest.mark.parametrize("name", ["qwen3-bf16", "llama"])
def test_the_default_is_anchored_delta_block(name, converted):
    config = DepthRouteConfig.from_pretrained(converted(name))
    assert config.preset_name == "delta-block" and config.depth_anchored and config.depth_block_size == 1
    assert config.qk_norm == name.startswith("qwen3")
    assert config.dtype == (torch.bfloat16 if name.endswith("bf16") else torch.float32)


@pytest.mark.parametrize(
    "preset, low, high",
    [
        # the mix is the stream times a factor, which PreNorm ignores but for its eps: 1e-6 against activations of order 1,
        # amplified by 16 sublayers of random weights
        ("attnres", 0, 2e-3),
        ("delta", 0, 2e-3),
        # other functions: a bounded perturbation, and the mean of the states
        ("delta-block", 0.05, 50),
        ("attnres-states", 0.05, 50),
        ("wav", 0.05, 50),
        ("dar", 0, 2e-3),
        # branches that are switched off, or nearly so
        ("rezero", 0.05, 50),
        ("layerscale", 0.05, 50),
    ],
)
def test_plain_conversion_reports_its_gap(preset, low, high, originals, tmp_path):
    blocks = {"block_size": 2} if preset == "delta-block" else {}
    found = convert(originals["qwen3"], tmp_path / "out", preset, anchored=False, **blocks).verification
    assert low < found.relative_difference < high
    assert not found.bitwise_equal and found.verdict == "not equal to the source at step 0"
    assert not DepthRouteConfig.from_pretrained(tmp_path / "out").depth_anchored


@pytest.mark.parametrize("name", ["qwen3", "tied"])
def test_side_files_are_kept(name, originals, converted):
    source, out = originals[name], converted(name)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"):
        assert (out / file).read_bytes() == (source / file).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("the cat").input_ids == AutoTokenizer.from_pretrained(source)("the cat").input_ids
    model = DepthRouteForCausalLM.from_pretrained(out)
    assert (model.generation_config.temperature, model.generation_config.eos_token_id) == (0.6, [1, 2])


def test_chat_template_inside_the_tokenizer_configuration_is_kept(copy_of, tmp_path):
    source = copy_of("qwen3")
    (source / "chat_template.jinja").unlink()
    edit_json(source / "tokenizer_config.json", chat_template=CHAT_TEMPLATE)
    convert(source, tmp_path / "out", verify=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == CHAT_TEMPLATE


def test_a_tokenizer_whose_class_follows_from_the_model_type_is_named(copy_of, tmp_path):
    source = copy_of("qwen3")
    edit_json(source / "tokenizer_config.json", tokenizer_class=None)
    convert(source, tmp_path / "out", verify=False)
    expected = AutoTokenizer.from_pretrained(source)
    kept = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(kept) is type(expected) and kept("the cat").input_ids == expected("the cat").input_ids


def test_a_source_without_tokenizer_is_converted_without_one(copy_of, tmp_path):
    source = copy_of("qwen3")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (source / file).unlink()
    assert convert(source, tmp_path / "out", verify=False).kept_files == ["generation_config.json", "LICENSE"]


def test_the_configuration_is_complete(converted):
    entries = json.loads((converted("qwen3") / "config.json").read_text())
    assert entries["auto_map"] == AUTO_MAP
    assert entries["architectures"] == ["DepthRouteForCausalLM"] and entries["model_type"] == "depthroute"


# -- dtype ------------------------------------------------------------------------------------------------------------


def test_dtype_casts_source_and_comparison(originals, tmp_path):
    report = convert(originals["qwen3"], tmp_path / "out", dtype="float16")
    assert report.verification.bitwise_equal and report.dtype == report.verification.dtype == "float16"
    source = weights(originals["qwen3"])
    written = weights(tmp_path / "out")
    assert all(same_bytes(source[key].half(), written[key]) for key in source)
    assert {tensor.dtype for tensor in written.values()} == {torch.float16}


def test_checkpoint_of_several_dtypes_keeps_its_bytes_and_its_configured_dtype(copy_of, tmp_path):
    source = copy_of("qwen3-bf16")
    edit_weights(source, lambda w: w.update({k: v.float() for k, v in w.items() if "embed" in k or "norm" in k}))
    report = convert(source, tmp_path / "out")
    assert report.dtype == "bfloat16" and report.verification.bitwise_equal
    written = weights(tmp_path / "out")
    assert all(same_bytes(tensor, written[key]) for key, tensor in weights(source).items())
    assert written["model.layers.3.attn_read.query"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_values_that_overflow_are_refused(copy_of, tmp_path):
    source = copy_of("qwen3")
    edit_weights(source, lambda w: w["model.norm.weight"].fill_(1e6))
    with pytest.raises(Refused, match=r"float16, in which model.norm.weight overflows \(largest value 1e\+06\)"):
        convert(source, tmp_path / "out", dtype="float16")
    assert os.listdir(tmp_path) == [source.name]


# -- tied heads and shards --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "sharded"])
def test_tied_checkpoints_stay_tied(name, originals, converted):
    out = converted(name)
    assert len(list(originals["sharded"].glob("*.safetensors"))) > 2
    assert "lm_head.weight" not in weights(out)
    model = DepthRouteForCausalLM.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weights(originals["tied"])["model.embed_tokens.weight"])


def test_tied_checkpoint_that_spells_out_its_head(copy_of, tmp_path):
    source = copy_of("tied")
    edit_weights(source, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    assert convert(source, tmp_path / "out").verification.bitwise_equal
    assert "lm_head.weight" not in weights(tmp_path / "out")

    edit_weights(source, lambda w: w["lm_head.weight"][3].zero_())
    with pytest.raises(
        Refused, match="tie_word_embeddings: got True, but lm_head.weight is not model.embed_tokens.weight"
    ):
        convert(source, tmp_path / "other")
    report = convert(source, tmp_path / "other", fields={"tie_word_embeddings": False}, verify=False)
    assert report.copied_tensors == len(weights(source))


def test_rotary_buffers_of_old_checkpoints_are_left_out(copy_of, tmp_path):
    source = copy_of("llama")
    edit_weights(source, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert convert(source, tmp_path / "out").verification.bitwise_equal
    assert not any("inv_freq" in key for key in weights(tmp_path / "out"))


# -- options ----------------------------------------------------------------------------------------------------------


def test_every_field_can_be_set(originals, tmp_path):
    fields = {"depth_key_norm": "none", "depth_logit_scale": 0.5, "depth_backend": "reference", "use_cache": False}
    report = convert(originals["qwen3"], tmp_path / "out", "attnres-states", block_size=3, num_heads=4, fields=fields)
    config = DepthRouteConfig.from_pretrained(tmp_path / "out")
    expected = {**fields, "depth_block_size": 3, "depth_num_heads": 4, "depth_anchored": True}
    assert {key: getattr(config, key) for key in expected} == expected
    assert report.added_tensors == report.live_reads and report.verification.bitwise_equal


FIELDS = {
    "wav": {"depth_detail_bases": ["split"], "depth_detail_bias": -1, "depth_detail_max_scale": 0.5, "depth_value_route": "average"},
    "attnres-block": {"depth_value_projection": True, "depth_null_source": True, "depth_value_route": "uniform"},
    "delta-block": {"depth_detail_bases": ["phase"], "depth_value_route": "decoupled", "depth_key_norm": "none"},
    "dar": {
        "dual_routing": "fixed", "dual_gates": "dynamic", "dual_partial_source": False, "dual_transport_init": 1.5,
        "dual_write_asymmetry": 0.25, "depth_num_heads": 4,
    },
    "mhc": {"hyper_num_streams": 2},
}  # fmt: skip


@pytest.mark.parametrize("preset", FIELDS)
def test_every_field_of_the_family_can_be_set_on_the_command_line(preset, originals, tmp_path, run_cli):
    values = [
        f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in FIELDS[preset].items()
    ]
    values = [text.replace("'", "") for text in values]  # [split], as it is typed
    code, out, err = run_cli(
        "convert",
        originals["qwen3"],
        tmp_path / "out",
        "--preset",
        preset,
        *(x for text in values for x in ("--set", text)),
    )
    assert code == 0, err
    config = DepthRouteConfig.from_pretrained(tmp_path / "out")
    assert {key: getattr(config, key) for key in FIELDS[preset]} == FIELDS[preset]
    assert ("not equal to the source at step 0" if preset == "mhc" else "bitwise equal to the source") in out
    # fields of other residuals are not shown
    assert ("dual_gates" in out) == (preset == "dar") and ("hyper_num_streams" in out) == (preset == "mhc")
    assert ("live reads" in out) == (preset != "mhc")


def test_inert_reads_are_listed(originals, tmp_path):
    report = convert(originals["qwen3"], tmp_path / "out", block_size=6, verify=False)
    reads = [f"model.layers.{layer}.{kind}_read" for layer in range(6) for kind in ("attn", "mlp")]
    assert report.inert_reads == reads and report.live_reads == 4
    names = set(DepthRouteForCausalLM.from_pretrained(tmp_path / "out").routing_parameters())
    assert not any(name.startswith(tuple(reads)) for name in names) and len(names) == 8


def test_a_field_that_changes_the_function_fails_where_equality_was_promised(originals, tmp_path):
    with pytest.raises(CheckFailed, match="not equal to the source at step 0"):
        convert(originals["qwen3"], tmp_path / "out", fields={"rms_norm_eps": 0.5})
    assert os.listdir(tmp_path) == []
