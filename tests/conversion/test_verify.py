# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Verification tells apart: equal, plain, trained routing, other weights, another model; and fails when it sees nothing."""

import json
import os
import shutil

import pytest
import torch
from conftest import tiny_qwen3_config
from conversion_helpers import edit_weights, save_checkpoint, tiny_llama_config
from transformers import LlamaForCausalLM, Qwen3ForCausalLM

import depthroute_conversion.conversion as conversion
import depthroute_conversion.verification as verification
from depthroute import DepthRouteForCausalLM, convert, verify
from depthroute.errors import CheckFailed, Refused
from depthroute_conversion.verification import probe_ids


@pytest.fixture
def trained_copy(converted, tmp_path):
    """A copy of a conversion with one tensor changed."""

    def make(key: str, value: float, **options):
        folder = tmp_path / "trained"
        shutil.copytree(converted("qwen3", "delta-block", **options), folder)
        edit_weights(folder, lambda w: w[key][5].fill_(value))
        return folder

    return make


@pytest.mark.parametrize("preset", ["delta-block", "standard"])
def test_equal(preset, originals, converted, run_cli, tmp_path):
    code, out, err = run_cli("verify", originals["qwen3"], converted("qwen3", preset), "--json", tmp_path / "r.json")
    assert code == 0, err
    assert "bitwise equal to the source" in out and "negative control" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["bitwise_equal"] and result["max_abs_difference"] == 0 and result["failure"] is None
    assert result["control_difference"] > 0 and result["verdict"] == "bitwise equal to the source"


@pytest.mark.parametrize(
    "change",
    [{"sliding_window": 90}, {"sliding_window": 110}, {"layer_types": ["full_attention"] * 8}],
    ids=["shorter", "longer", "none"],
)
def test_a_change_of_the_sliding_window_is_noticed(change, tmp_path):
    windows = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 4}
    torch.manual_seed(0)
    source = save_checkpoint(Qwen3ForCausalLM(tiny_qwen3_config(**windows)), tmp_path / "source")
    report = convert(source, tmp_path / "out")
    assert [1, 108] in report.verification.probes
    with pytest.raises(CheckFailed, match="not equal to the source at step 0"):
        convert(source, tmp_path / "changed", fields=change)


def test_the_output_is_looked_for_before_the_source_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "open_source", lambda source: pytest.fail("opened"))
    with pytest.raises(Refused, match="nowhere: got no folder"):
        verify("owner/large", tmp_path / "nowhere")


def test_plain_needs_allow_gap(originals, converted, run_cli, tmp_path):
    pair = (originals["qwen3"], converted("qwen3", anchored=False))
    code, out, err = run_cli("verify", *pair, "--json", tmp_path / "r.json")
    assert code == 1 and "not equal to the source at step 0" in out and "--allow-gap" in err
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["max_abs_difference"] > 0 and "not equal" in result["failure"]
    code, out, _ = run_cli("verify", *pair, "--allow-gap")
    assert code == 0 and "not equal to the source at step 0" in out and "max |Δlogits|" in out


@pytest.mark.parametrize("key, value", [("layers.3.attn_read.query", 1.0), ("layers.3.attn_read.key_norm", 0.5)])
@pytest.mark.parametrize("anchored", [True, False])
def test_trained_routing_is_called_so(key, value, anchored, trained_copy, originals, run_cli):
    folder = trained_copy(f"model.{key}", value, anchored=anchored)
    found = verify(originals["qwen3"], folder)
    assert found.trained_routing == [f"model.{key}"] and found.changed == []
    # a key norm alone routes nothing as long as the query is zero
    assert found.bitwise_equal == (anchored and key.endswith("key_norm"))
    with pytest.raises(CheckFailed, match=f"trained routing: 1 parameters have moved: model.{key}"):
        found.check(allow_gap=True)
    if anchored and key.endswith("query"):
        code, out, err = run_cli("verify", originals["qwen3"], folder, "--allow-gap")
        assert code == 1 and "trained routing" in out and "trained routing" in err


TRAINED = {
    "rd-attnres": ["layers.3.attn_read.value_query"],
    "wav": ["layers.3.mlp_read.detail_bias"],
    "dar": [
        "layers.0.attn_read.gate_logits",
        "layers.3.mlp_read.query",
        "layers.3.attn_read.gate_proj",
        "final_read.key_norm",
    ],
    "attnres-block": ["layers.3.mlp_read.value_proj", "final_read.null"],
    "mhc": ["layers.2.attn_read.gate_proj", "layers.2.attn_read.gate_bias", "final_read.gate_scale"],
    "rezero": ["layers.0.attn_scale"],
    "layerscale": ["layers.7.mlp_scale"],
}
OPTIONS = {
    "dar": {"dual_gates": "dynamic"},
    "attnres-block": {"depth_value_projection": True, "depth_null_source": True},
}


@pytest.mark.parametrize("preset", TRAINED)
def test_every_kind_of_routing_parameter_is_known_to_have_moved(preset, originals, tmp_path):
    convert(originals["qwen3-bf16"], tmp_path / "out", preset, fields=OPTIONS.get(preset, {}), verify=False)
    model = DepthRouteForCausalLM.from_pretrained(tmp_path / "out")
    assert verification.moved_routing(model) == []
    names = [f"model.{key}" for key in TRAINED[preset]]
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).view(-1)[0] += 0.5
    assert sorted(verification.moved_routing(model)) == sorted(names)


def test_mhc_reports_its_gap_and_verifies_only_with_allow_gap(originals, converted, run_cli):
    pair = (originals["qwen3-bf16"], converted("qwen3-bf16", "mhc"))
    code, out, err = run_cli("verify", *pair)
    assert code == 1 and "not equal to the source at step 0" in out and "one gate perturbed" in out
    assert "allowed: bitwise equality, or --allow-gap for a conversion that does not promise it" in err
    assert run_cli("verify", *pair, "--allow-gap")[0] == 0


@pytest.mark.parametrize("anchored", [True, False])
def test_other_weights_are_named_and_no_gap_excuses_them(anchored, trained_copy, originals):
    folder = trained_copy("model.layers.2.mlp.up_proj.weight", 0.1, anchored=anchored)
    found = verify(originals["qwen3"], folder)
    assert found.changed == ["model.layers.2.mlp.up_proj.weight"] and not found.trained_routing
    with pytest.raises(CheckFailed, match="1 other parameters are not the source's: model.layers.2.mlp.up_proj.weight"):
        found.check(allow_gap=True)


def test_non_finite_logits_are_no_equality(copy_of, converted, tmp_path, originals):
    source, folder = copy_of("qwen3"), tmp_path / "out"
    shutil.copytree(converted("qwen3"), folder)
    for where in (source, folder):
        edit_weights(where, lambda w: w["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(CheckFailed, match="not finite"):
        verify(source, folder).check()


def test_a_saved_copy_in_shards_verifies(originals, converted, tmp_path):
    DepthRouteForCausalLM.from_pretrained(converted("qwen3")).save_pretrained(tmp_path / "out", max_shard_size="60kB")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    verify(originals["qwen3"], tmp_path / "out").check()


def test_verification_does_not_depend_on_where_weights_lie(originals, converted, tmp_path):
    # a longer header moves every tensor of the file, and with it the alignment of the memory that is mapped from it
    for number in (1, 3):
        folder = tmp_path / str(number)
        shutil.copytree(converted("qwen3", "delta"), folder)
        edit_weights(folder, lambda w: None, padding="y" * 16 * number)
        verify(originals["qwen3"], folder).check()


def test_probes_are_fixed_and_inside_vocabulary_and_context():
    first, again = probe_ids(50, 40), probe_ids(50, 40)
    assert [list(ids.shape) for ids in first] == [[1, 1], [1, 7], [3, 16], [1, 40]]
    assert all(map(torch.equal, first, again)) and all(ids.max() < 50 for ids in first)


# -- what cannot be compared ------------------------------------------------------------------------------------------


def test_a_missing_routing_key_is_not_started_afresh(converted, originals, tmp_path):
    folder = tmp_path / "out"
    shutil.copytree(converted("qwen3"), folder)
    edit_weights(folder, lambda w: w.pop("model.layers.3.attn_read.query"))
    with pytest.raises(Refused, match=r"1 missing keys: model.layers.3.attn_read.query"):
        verify(originals["qwen3"], folder)


def test_a_conversion_of_another_model_is_refused(converted, originals, tmp_path):
    with pytest.raises(Refused, match="tiny-llama, as the source of .*: 16 missing keys: .*q_norm"):
        verify(originals["llama"], converted("qwen3"))
    other = save_checkpoint(LlamaForCausalLM(tiny_llama_config(vocab_size=96)), tmp_path / "other")
    with pytest.raises(Refused, match=r"shapes differ .*lm_head.weight: got \[96, 32\], allowed: \[97, 32\]"):
        verify(other, converted("llama"))


def test_something_that_is_no_conversion_is_refused(originals, tmp_path, run_cli):
    with pytest.raises(Refused, match=r"got model_type 'qwen3', allowed: a folder that `depthroute convert` wrote"):
        verify(originals["qwen3"], originals["qwen3"])
    code, _, err = run_cli("verify", originals["qwen3"], tmp_path / "nowhere")
    assert code == 2 and "nowhere: got no folder" in err


# -- inside a conversion ----------------------------------------------------------------------------------------------


@pytest.fixture
def damage(monkeypatch):
    """Change a written tensor between writing and verifying."""

    def install(key: str):
        write = conversion._write

        def write_and_damage(work, folder, *rest):
            report = write(work, folder, *rest)
            edit_weights(folder.files, lambda w: w[key][5].add_(1))
            return report

        monkeypatch.setattr(conversion, "_write", write_and_damage)

    return install


@pytest.mark.parametrize(
    "options, key",
    [
        ([], "model.layers.2.mlp.up_proj.weight"),
        (["--preset", "standard"], "model.layers.2.mlp.up_proj.weight"),
        (["--plain"], "model.layers.2.mlp.up_proj.weight"),
        ([], "model.layers.2.attn_read.query"),
    ],
)
def test_a_verification_that_fails_leaves_nothing(options, key, damage, originals, tmp_path, run_cli):
    damage(key)
    code, _, err = run_cli("convert", originals["qwen3"], tmp_path / "deep" / "out", *options)
    assert code == 1 and len(err.strip().splitlines()[-1]) and key in err and "nothing was written" in err
    assert os.listdir(tmp_path) == []


def test_a_negative_control_without_effect_fails(monkeypatch, originals, tmp_path):
    monkeypatch.setattr(verification, "perturb", lambda model: "model.final_read.query")
    with pytest.raises(CheckFailed, match="negative control: changing model.final_read.query changed no logit"):
        convert(originals["qwen3"], tmp_path / "out")
    assert os.listdir(tmp_path) == []
