# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""With one layer in memory the same numbers come out as with all of them, bit for bit, and no more than one layer is."""

import shutil
import threading
from functools import partial

import pytest
import torch
from conftest import tiny_config, tiny_qwen3_config
from conversion_helpers import edit_weights, save_checkpoint
from transformers import Qwen3ForCausalLM, Qwen3ForSequenceClassification, Qwen3Model

import depthroute_conversion.verification as verification
from depthroute import DepthRouteForCausalLM, convert, verify
from depthroute_conversion.layerwise import empty_model, evaluate_layerwise, model_reader


SAME = [
    ("qwen3", "delta-block", {}),
    ("qwen3", "attnres", {"anchored": False}),
    ("qwen3", "mhc", {}),
    ("qwen3", "layerscale", {"anchored": False}),
    ("qwen3", "standard", {}),
    ("qwen3-bf16", "rd-attnres", {"anchored": False}),
    ("llama", "dar", {"anchored": False, "fields": {"dual_gates": "dynamic"}}),
    ("tied", "wav", {"anchored": False}),
    ("moe", "attnres-block", {"anchored": False}),
    ("moe-fused", "delta", {}),
]


@pytest.mark.parametrize("name, preset, options", SAME, ids=[f"{name}-{preset}" for name, preset, _ in SAME])
def test_both_ways_report_the_same(name, preset, options, originals, tmp_path):
    out = tmp_path / "out"
    found = convert(originals[name], out, preset, layerwise=True, **options).verification
    # every figure: largest difference, standard deviation, negative control
    assert found == verify(originals[name], out, layerwise=False)


@pytest.mark.parametrize("kind", [Qwen3Model, Qwen3ForSequenceClassification])
def test_models_without_a_language_head(kind, tmp_path):
    torch.manual_seed(0)
    source = save_checkpoint(kind(tiny_qwen3_config(num_labels=3)), tmp_path / "source")
    found = convert(source, tmp_path / "out", layerwise=True).verification
    assert found == verify(source, tmp_path / "out", layerwise=False)


def test_layer_by_layer_finds_what_differs(originals, converted, tmp_path):
    for key, found in {
        "model.layers.2.mlp.up_proj.weight": "changed",
        "model.layers.3.attn_read.query": "trained_routing",
    }.items():
        folder = shutil.copytree(converted("qwen3"), tmp_path / found)
        edit_weights(folder, lambda w, key=key: w[key][5].add_(1))
        report = verify(originals["qwen3"], folder, layerwise=True)
        assert getattr(report, found) == [key] and not report.bitwise_equal
        assert report == verify(originals["qwen3"], folder, layerwise=False)


def test_a_model_in_several_files_is_verified_layer_by_layer(originals, tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "_whole_source", lambda *a: pytest.fail("the whole source was loaded"))
    monkeypatch.setattr(verification, "_whole_converted", lambda *a: pytest.fail("the whole model was loaded"))
    assert convert(originals["qwen3"], tmp_path / "out", max_shard_size="60kB").verification.bitwise_equal
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


# -- how it is done ---------------------------------------------------------------------------------------------------


@pytest.fixture
def routed():
    torch.manual_seed(0)
    return DepthRouteForCausalLM(tiny_config("delta-block", depth_anchored=True)).eval()


@pytest.mark.smoke
def test_one_part_is_in_memory_at_a_time_and_read_once(routed, token_ids):
    weights = routed.state_dict()
    model = empty_model(DepthRouteForCausalLM, routed.config, torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    read, most = [], 0

    def count(key: str) -> torch.Tensor:
        nonlocal most
        read.append(key)
        held = [name for name, parameter in model.named_parameters() if not parameter.is_meta and "_read" not in name]
        layers = {".".join(name.split(".")[:3]) for name in held}
        most = max(most, len(layers))
        return weights[key]

    def compute(ids):
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    resident = list(model.routing_parameters())
    inputs = [token_ids, token_ids[:, :5], token_ids[:1]]
    reader = model_reader(model, count, weights, {})
    found = evaluate_layerwise(model, reader, [partial(compute, ids) for ids in inputs], resident)
    for ids, got in zip(inputs, found):
        with torch.no_grad():
            assert torch.equal(got, routed(ids, use_cache=False).logits)
    assert sorted(read) == sorted(weights)  # each once, for all three inputs
    assert most == 1
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_changes_are_for_one_computation_alone(routed, token_ids):
    weights = routed.state_dict()
    model = empty_model(DepthRouteForCausalLM, routed.config, torch.float32)
    keys = ["model.layers.7.mlp_read.query", "model.layers.3.mlp.up_proj.weight"]

    def compute():
        with torch.no_grad():
            return model(token_ids, use_cache=False).logits

    found = evaluate_layerwise(
        model,
        model_reader(model, weights.__getitem__, weights, {}),
        [compute] * 4,
        list(model.routing_parameters()),
        {number + 1: {key: lambda tensor: tensor + 0.5} for number, key in enumerate(keys)},
    )
    with torch.no_grad():
        plain = routed(token_ids, use_cache=False).logits
        assert torch.equal(found[0], plain) and torch.equal(found[3], plain)
        for number, key in enumerate(keys):
            routed.get_parameter(key).add_(0.5)
            assert torch.equal(found[number + 1], routed(token_ids, use_cache=False).logits)
            assert not torch.equal(found[number + 1], plain)
            routed.get_parameter(key).sub_(0.5)


@pytest.mark.parametrize("where", ["reading", "computing"])
def test_an_error_comes_out_as_it_is_and_leaves_no_thread(where, routed, token_ids):
    weights, before = routed.state_dict(), threading.active_count()
    model = empty_model(Qwen3ForCausalLM, tiny_qwen3_config(), torch.float32)

    def read(key):
        if where == "reading" and key.startswith("model.layers.4."):
            raise OSError("the disk is gone")
        return weights[key]

    def compute(number):
        logits = model(token_ids, use_cache=False).logits
        if where == "computing" and number == 1:
            raise OSError("the disk is gone")
        return logits

    with pytest.raises(OSError, match="the disk is gone"):
        evaluate_layerwise(model, model_reader(model, read, weights, {}), [partial(compute, n) for n in range(3)])
    assert threading.active_count() == before
    assert all(parameter.is_meta for parameter in model.parameters())
