# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Every backbone that is hosted, with the habits that its checkpoints have, computes what its stock class computes: same
tensors, same outputs, bit for bit. What the backbone has no place for is refused with the reason."""

import json
import os

import pytest
import torch
from conftest import tiny_qwen3_config
from conversion_helpers import SIZES, edit_json, edit_weights, save_checkpoint, tiny_llama_config, tiny_moe_config
from safetensors.torch import load_file
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from depthroute import DepthRouteConfig, DepthRouteForCausalLM, convert
from depthroute.errors import Refused
from depthroute_conversion.source import open_source


def sizes(**values) -> dict:
    return {**{key: getattr(tiny_qwen3_config(), key) for key in SIZES}, "num_hidden_layers": 4, **values}


def mistral(**values) -> MistralForCausalLM:
    return MistralForCausalLM(MistralConfig(**sizes(sliding_window=None, **values)))


def qwen2(**values) -> Qwen2ForCausalLM:
    fields = sizes(**values)
    fields.pop("head_dim")
    return Qwen2ForCausalLM(Qwen2Config(**fields))


def qwen3(**values) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(tiny_qwen3_config(num_hidden_layers=4, **values))


def llama(**values) -> LlamaForCausalLM:
    return LlamaForCausalLM(tiny_llama_config(num_hidden_layers=4, **values))


HOSTS = {
    "qwen3 with heads wider than the model": lambda: qwen3(head_dim=16),
    "qwen3 with biases": lambda: qwen3(attention_bias=True),
    "qwen3 whose layer types alternate": lambda: qwen3(
        use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "qwen3-moe with a window": lambda: Qwen3MoeForCausalLM(
        tiny_moe_config(num_hidden_layers=4, use_sliding_window=True, sliding_window=5, attention_bias=True)
    ),
    "llama tied, of narrow heads": lambda: llama(tie_word_embeddings=True, head_dim=4),
    # its stock class has not split products for a long time
    "llama that was trained with split products": lambda: llama(pretraining_tp=2),
    "mistral with wide heads, tied": lambda: mistral(head_dim=16, tie_word_embeddings=True),
    "mistral with a window": lambda: MistralForCausalLM(MistralConfig(**sizes(sliding_window=6))),
    "qwen2": qwen2,
    "qwen2 with a window in its upper layers": lambda: qwen2(
        use_sliding_window=True, sliding_window=6, max_window_layers=2
    ),
    # its class does not read what the published folders all say
    "qwen2 with a window that is switched off": lambda: qwen2(sliding_window=6, max_window_layers=2),
}


def randomize_biases(model) -> None:
    """Fresh ones are zero, which would hide that they are there."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)


CASES = [
    *((host, torch.float32) for host in HOSTS),
    *((host, torch.bfloat16) for host in ("qwen3 with biases", "qwen2", "mistral with a window")),
]


@pytest.mark.parametrize("host, dtype", CASES, ids=[f"{host}, {str(dtype)[6:]}" for host, dtype in CASES])
def test_a_hosted_backbone_computes_what_it_computed(host, dtype, tmp_path):
    torch.manual_seed(0)
    model = HOSTS[host]().to(dtype)
    randomize_biases(model)
    model.save_pretrained(tmp_path / "source")
    model = type(model).from_pretrained(tmp_path / "source")  # `to` has rounded the rotary frequencies as well
    found = convert(tmp_path / "source", tmp_path / "out").verification
    assert found.bitwise_equal and found.control_differs and not found.changed
    converted = DepthRouteForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    for parameter in (*converted.parameters(), *model.parameters()):
        parameter.data = parameter.data.clone()  # equal alignment: a product in bfloat16 may depend on it
    # a cache of its own kind for each layer gives the same tokens as the stock class's
    prompt = torch.arange(1, 13).unsqueeze(0)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(converted.generate(prompt, **options), model.eval().generate(prompt, **options))


def test_the_biases_are_those_of_the_source_and_no_others(tmp_path):
    model = qwen2()
    randomize_biases(model)
    model.save_pretrained(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    biases = {
        f"model.layers.{layer}.self_attn.{name}.bias" for layer in range(4) for name in ("q_proj", "k_proj", "v_proj")
    }
    assert {name for name in names if name.endswith(".bias")} == biases
    config = DepthRouteConfig.from_pretrained(tmp_path / "out")
    assert config.attention_bias and not config.attention_output_bias and not config.qk_norm
    assert config.head_dim == 8  # Qwen3's own default is another


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_spelled_out(tied, tmp_path):
    save_checkpoint(qwen3(tie_word_embeddings=tied), tmp_path / "source")
    if tied:
        edit_weights(
            tmp_path / "source", lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()})
        )
    source = load_file(tmp_path / "source" / "model.safetensors")
    convert(tmp_path / "source", tmp_path / "out")
    assert "lm_head.weight" in source
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) == (not tied)


def test_an_untied_head_that_is_missing_is_not_made_up(tmp_path):
    save_checkpoint(qwen3(), tmp_path / "source")
    edit_weights(tmp_path / "source", lambda w: w.pop("lm_head.weight"))
    with pytest.raises(Refused, match="1 missing keys: lm_head.weight"):
        convert(tmp_path / "source", tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def mixed_layouts(weights: dict) -> None:
    """Experts of a fused checkpoint: layer 0 apart, layer 2 half apart, layer 3 as it is."""
    for key in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.gate_up_proj"):
        for index, expert in enumerate(weights.pop(key)):
            gate, up = (part.clone() for part in expert.chunk(2))
            prefix = key.rpartition(".")[0]
            weights.update({f"{prefix}.{index}.gate_proj.weight": gate, f"{prefix}.{index}.up_proj.weight": up})
    for index, expert in enumerate(weights.pop("model.layers.0.mlp.experts.down_proj")):
        weights[f"model.layers.0.mlp.experts.{index}.down_proj.weight"] = expert.clone()


def test_experts_in_both_layouts_at_once(tmp_path):
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(tiny_moe_config(num_hidden_layers=4))
    save_checkpoint(model, tmp_path / "source", save_original_format=False)
    edit_weights(tmp_path / "source", mixed_layouts)
    found = convert(tmp_path / "source", tmp_path / "out").verification
    assert found.bitwise_equal and not found.changed
    written = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(tmp_path / "source" / "model.safetensors")
    assert len(source) == 41 + (12 - 2) + (8 - 1) + 6  # fused, and what layers 0 and 2 have more than fused ones
    apart = [key.split(".")[2] for key in source if ".experts.1." in key]
    assert sorted(apart) == [*"000", *"22"]
    assert all(torch.equal(written[key], tensor) for key, tensor in source.items())
    ids = torch.arange(1, 20).unsqueeze(0)
    stock = model.eval()(ids).logits
    # the model before its weights were split: same numbers, in other memory
    assert torch.allclose(DepthRouteForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, stock, atol=1e-4)


REFUSED = {
    "biases in the MLP": (llama, {"mlp_bias": True}, "mlp_bias: got True, allowed: False, the Qwen3 MLP has no biases"),
    "heads that are rotated in part": (
        llama,
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: got 0.5, allowed: 1, Qwen3's attention rotates whole heads",
    ),
    "another family": (
        qwen2,
        {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
        r"architectures: got Qwen2MoeForCausalLM \(model_type 'qwen2_moe'\), allowed: Qwen3ForCausalLM or Qwen3MoeForCausalLM",
    ),
    "an architecture of another family": (
        mistral,
        {"architectures": ["LlamaForCausalLM"]},
        r"got LlamaForCausalLM \(model_type 'mistral'\), allowed: MistralForCausalLM or MistralModel or MistralForSequence",
    ),
    "two architectures": (
        qwen3,
        {"architectures": ["Qwen3ForCausalLM", "Qwen3Model"]},
        "architectures: got Qwen3ForCausalLM, Qwen3Model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_hosted_is_refused_with_the_reason(case, tmp_path):
    build, values, message = REFUSED[case]
    build().save_pretrained(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", **values)
    with pytest.raises(Refused, match=message):
        convert(tmp_path / "source", tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


def test_entries_that_a_stock_class_does_not_read_change_nothing(tmp_path):
    torch.manual_seed(0)
    llama().save_pretrained(tmp_path / "source")
    extras = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "attention_output_bias": False}
    edit_json(tmp_path / "source" / "config.json", **extras)
    assert json.loads((tmp_path / "source" / "config.json").read_text())["sliding_window"] == 4
    assert open_source(tmp_path / "source").config.sliding_window == 4
    assert convert(tmp_path / "source", tmp_path / "out").verification.bitwise_equal


@pytest.mark.parametrize("declared", ["TokenizersBackend", "LlamaTokenizerFast"])
def test_a_tokenizer_whose_class_follows_from_the_model_type_against_its_own_word(declared, tmp_path):
    save_checkpoint(qwen2(), tmp_path / "source")
    edit_json(tmp_path / "source" / "tokenizer_config.json", tokenizer_class=declared)
    convert(tmp_path / "source", tmp_path / "out", verify=False)
    expected, kept = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("source", "out"))
    assert type(expected).__name__ == "Qwen2Tokenizer"  # what transformers does with this model type
    assert type(kept) is type(expected) and kept.get_vocab() == expected.get_vocab()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"] == "Qwen2Tokenizer"
