# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The standard residual is stock Qwen3 (or Llama, without query and key norms), bit for bit."""

import pytest
import torch
from conftest import tiny_config, tiny_qwen3_config
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from depthroute import DepthRouteConfig, DepthRouteForCausalLM


VARIANTS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "sliding": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def loss_and_gradients(model, ids):
    model.zero_grad()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    return output.logits, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_equal_stock(variant, dtype, token_ids):
    base = tiny_qwen3_config(num_hidden_layers=4, **VARIANTS[variant])
    torch.manual_seed(0)
    stock = Qwen3ForCausalLM(base).to(dtype)
    model = DepthRouteForCausalLM(tiny_config("standard", base=base)).to(dtype)
    model.load_state_dict(stock.state_dict())
    expected_logits, expected = loss_and_gradients(stock, token_ids)
    logits, gradients = loss_and_gradients(model, token_ids)
    assert torch.equal(logits, expected_logits)
    assert gradients.keys() == expected.keys()
    for name in expected:
        assert torch.equal(gradients[name], expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_llama_without_query_and_key_norms(dtype, token_ids):
    base = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(base).to(dtype).eval()
    for preset in ("standard", "attnres", "rd-attnres", "wav", "dar", "layerscale"):
        config = DepthRouteConfig.from_preset(preset, base=base, depth_anchored=True)
        assert config.qk_norm is False and config.rms_norm_eps == 1e-5
        model = DepthRouteForCausalLM(config).to(dtype).eval()
        missing = model.load_state_dict(llama.state_dict(), strict=False).missing_keys
        assert set(missing) == set(model.routing_parameters())
        assert torch.equal(model(token_ids).logits, llama(token_ids).logits)


def test_a_qwen3_folder_loads_directly(tmp_path, stock, token_ids):
    stock.save_pretrained(tmp_path)
    config = tiny_config("delta", base=stock.config, depth_anchored=True)
    model, report = DepthRouteForCausalLM.from_pretrained(tmp_path, config=config, output_loading_info=True)
    assert set(report["missing_keys"]) == set(model.routing_parameters())
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert torch.equal(model.eval()(token_ids).logits, stock(token_ids).logits)


@pytest.mark.parametrize("preset", ["attnres", "attnres-states", "delta-block"])
def test_the_same_seed_gives_the_same_base_weights(preset):
    torch.manual_seed(7)
    expected = Qwen3ForCausalLM(tiny_qwen3_config()).state_dict()
    torch.manual_seed(7)
    found = DepthRouteForCausalLM(tiny_config(preset)).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_layers_return_tensors_as_in_qwen3(token_ids):
    seen = []
    model = DepthRouteForCausalLM(tiny_config("standard"))
    model.model.layers[2].register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(token_ids)
    assert isinstance(seen[0], torch.Tensor)
