# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""From one preset of the family to another, as far as the function stays: all else is refused with the reason."""

from pathlib import Path

import pytest
import torch
from conftest import randomize_routing, tiny_config
from conversion_helpers import edit_weights
from safetensors.torch import load_file

from depthroute import PRESETS, DepthRouteConfig, DepthRouteForCausalLM, convert, revert, verify
from depthroute.errors import Refused


SUMS_UP = ("attnres", "attnres-block", "rd-attnres", "dar", "dar-full")
"""Plain and anchored reads are one function up to the rms eps: the sources sum up to the stream."""

ONLY_STARTS = ("standard", "mhc", "rezero", "layerscale")
"""`depth_anchored` says how parameters start, and nothing else."""

IDS = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(5))


def trained(folder: Path, preset: str, **fields) -> Path:
    """A model whose routing is far from its start; the write gates of `dar` still sum to 2."""
    torch.manual_seed(0)
    model = DepthRouteForCausalLM(tiny_config(preset, **{"depth_anchored": preset != "standard", **fields}))
    randomize_routing(model, scale=0.3)
    with torch.no_grad():
        for name, parameter in model.routing_parameters().items():
            if name.endswith(("gate_logits", "gate_proj")) and parameter.shape[0] == 4 and preset.startswith("dar"):
                parameter[3] = -parameter[2]
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(folder: Path, dtype=torch.float64) -> torch.Tensor:
    return DepthRouteForCausalLM.from_pretrained(folder, dtype=dtype)(IDS).logits


@pytest.mark.parametrize("preset", PRESETS)
def test_trained_routing_is_exported_to_its_plain_form_where_that_is_the_same(preset, tmp_path):
    source = trained(tmp_path / "source", preset)
    if preset not in (*SUMS_UP, *ONLY_STARTS):
        with pytest.raises(Refused, match="depth_anchored: got False, but source has True, and .*; allowed: True"):
            convert(source, tmp_path / "plain", anchored=False)
        assert not (tmp_path / "plain").exists()
        return
    report = convert(source, tmp_path / "plain", anchored=False)
    config = DepthRouteConfig.from_pretrained(tmp_path / "plain")
    assert config.preset_name == preset and not config.depth_anchored
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "plain" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    gap = (logits(tmp_path / "plain") - logits(source)).abs().max() / logits(source).std()
    if preset in ONLY_STARTS:
        assert gap == 0 and report.verification.bitwise_equal
    else:  # in float64 only the rms eps of 1e-6 is left, against the mean of up to 17 sources in place of their sum
        assert 0 < gap < 2e-2
        assert 0 < report.verification.relative_difference < 2e-2 and report.verification.allowed_gap == 0.05


def test_a_plain_form_becomes_anchored_again(tmp_path):
    source = trained(tmp_path / "source", "rd-attnres")
    convert(source, tmp_path / "plain", anchored=False, verify=False)
    back = convert(tmp_path / "plain", tmp_path / "back", anchored=True)
    assert 0 < back.verification.relative_difference < 2e-2
    assert torch.equal(logits(tmp_path / "back"), logits(source))


@pytest.mark.parametrize("preset, fields, reason", [
    ("attnres", {"depth_value_projection": True}, "depth_value_projection"),
    ("attnres-block", {"depth_null_source": True}, "depth_null_source"),
    ("dar", {"dual_routing": "fixed"}, "dual_routing = 'fixed'"),
    ("dar", {"dual_partial_source": False}, "dual_partial_source"),
    ("attnres-block", {"depth_detail_bases": ["phase"]}, "depth_detail_bases"),
])  # fmt: skip
def test_options_that_export_does_not_bear_are_named(preset, fields, reason, tmp_path):
    with pytest.raises(Refused, match=reason):
        convert(trained(tmp_path / "source", preset, **fields), tmp_path / "plain", anchored=False)


@pytest.mark.parametrize("fields", [{"depth_num_heads": 4}, {"dual_gates": "dynamic"}, {"dual_routing": "self"}])
def test_options_that_export_bears(fields, tmp_path):
    preset = "attnres-block" if "depth_num_heads" in fields else "dar"
    found = convert(trained(tmp_path / "source", preset, **fields), tmp_path / "plain", anchored=False).verification
    assert 0 < found.relative_difference < 2e-2


@pytest.mark.parametrize("gates", ["static", "dynamic"])
def test_write_gates_that_moved_apart_are_named(gates, tmp_path):
    source = trained(tmp_path / "source", "dar", dual_gates=gates)
    key = "model.layers.3.attn_read.gate_logits" if gates == "static" else "model.layers.3.attn_read.gate_proj"
    edit_weights(source, lambda w: w[key][3].add_(0.25))
    with pytest.raises(Refused, match=f"{key}: write gates that no longer sum to 2"):
        convert(source, tmp_path / "plain", anchored=False)


def test_trained_routing_is_of_its_preset(tmp_path, run_cli):
    source = trained(tmp_path / "source", "attnres-block")
    code, _, err = run_cli("convert", source, tmp_path / "out", "--preset", "delta-block")
    assert code == 2 and "preset: got delta-block, but source has routing of its own" in err
    with pytest.raises(Refused, match="depth_block_size = 4, not 2"):
        convert(source, tmp_path / "out", block_size=4)
    with pytest.raises(Refused, match="depth_logit_scale = 2.0, not 1.0"):
        convert(source, tmp_path / "out", fields={"depth_logit_scale": 2.0})
    assert not (tmp_path / "out").exists()


def test_the_same_preset_is_a_copy(tmp_path):
    source = trained(tmp_path / "source", "wav")
    found = convert(source, tmp_path / "rounded", dtype="bfloat16").verification
    assert found.equality_promised and found.bitwise_equal and not found.trained_routing
    assert found.control_differs and found.dtype == "bfloat16"
    # another order of additions
    found = convert(source, tmp_path / "out", fields={"depth_backend": "reference"}).verification
    assert found.relative_difference < found.allowed_gap == 1e-3
    assert DepthRouteConfig.from_pretrained(tmp_path / "out").depth_backend == "reference"


# -- routing that never moved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "standard"])
def test_standard_becomes_anything_anchored(preset, converted, tmp_path):
    blocks = {"block_size": 2} if PRESETS[preset].blocks == "always" else {}
    report = convert(converted("qwen3", "standard"), tmp_path / "out", preset, **blocks)
    assert report.preset == preset and report.added_tensors > 0
    found = report.verification
    assert found.bitwise_equal if preset != "mhc" else 0 < found.relative_difference < 1e-3


def test_what_is_noted_of_the_stock_model_is_handed_on(converted, originals, tmp_path):
    convert(converted("qwen3", "standard"), tmp_path / "out", "wav", verify=False)
    verify(originals["qwen3"], tmp_path / "out").check()
    first, second = (
        DepthRouteConfig.from_pretrained(each) for each in (converted("qwen3", "standard"), tmp_path / "out")
    )
    assert first.converted_from == second.converted_from and first.converted_from["source"] == "tiny-qwen3"
    # a new model of the same sizes is no conversion
    assert not hasattr(DepthRouteConfig.from_preset("delta", base=second), "converted_from")
    assert revert(tmp_path / "out", tmp_path / "back").identical
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        originals["qwen3"] / "model.safetensors"
    ).read_bytes()


def test_untouched_routing_is_exchanged(converted, tmp_path):
    source = converted("llama-bf16", "delta-block")
    convert(source, tmp_path / "blocks", block_size=4)
    config = DepthRouteConfig.from_pretrained(tmp_path / "blocks")
    assert (config.preset_name, config.depth_block_size, config.depth_anchored) == ("delta-block", 4, True)
    convert(tmp_path / "blocks", tmp_path / "wav", "wav", num_heads=2)
    assert DepthRouteConfig.from_pretrained(tmp_path / "wav").depth_num_heads == 2
    report = convert(tmp_path / "wav", tmp_path / "standard", "standard")
    assert report.added_tensors == 0 and report.verification.bitwise_equal
    assert not DepthRouteForCausalLM.from_pretrained(tmp_path / "standard").routing_parameters()


@pytest.mark.parametrize("preset", ["attnres", "dar"])
def test_untouched_routing_may_become_plain_where_it_starts_at_the_same_function(preset, converted, tmp_path):
    found = convert(converted("qwen3", "delta-block"), tmp_path / "out", preset, anchored=False).verification
    assert 0 < found.relative_difference < 2e-3 and found.allowed_gap == 0.05


@pytest.mark.parametrize("preset, reason", [
    ("delta", "depth_combine = 'add'"),
    ("attnres-states", "depth_source = 'state'"),
    ("wav", "depth_detail_bases"),
    ("rezero", "its branches start switched off"),
])  # fmt: skip
def test_a_start_at_another_function_is_refused(preset, reason, converted, tmp_path):
    with pytest.raises(Refused, match=f"depth_anchored: got False, but .*{reason}.*allowed: anchored"):
        convert(converted("qwen3", "standard"), tmp_path / "out", preset, anchored=False)


def test_a_plain_start_is_a_function_of_its_own(converted, tmp_path):
    source = converted("qwen3", "delta-block", anchored=False)
    with pytest.raises(Refused, match="has routing of its own that attnres would not compute"):
        convert(source, tmp_path / "out", "attnres")
    with pytest.raises(Refused, match="depth_anchored: got True, but .* has False, and depth_combine = 'add'"):
        convert(source, tmp_path / "out", anchored=True)
    assert convert(source, tmp_path / "out").verification.bitwise_equal


def test_an_unknown_preset_is_refused_with_the_nearest(converted, tmp_path):
    with pytest.raises(Refused, match="preset: got 'attnress', nearest: attnres"):
        convert(converted("qwen3", "standard"), tmp_path / "out", "attnress")
