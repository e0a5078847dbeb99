# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A .gguf file as source: dequantized by transformers, converted to a plain model, tokenizer and chat template with it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conversion_helpers import CHAT_TEMPLATE, tiny_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from depthroute import DepthRouteConfig, DepthRouteForCausalLM, convert, revert, verify
from depthroute.errors import Refused
from depthroute_conversion.record import metadata_of
from depthroute_conversion.source import open_source


gguf = pytest.importorskip("gguf")

LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, EXPERTS = 3, 32, 4, 2, 64, 4


def write_gguf(path: Path, architecture: str = "llama", tokens: int = 97, add=lambda writer: None) -> Path:
    """A model of random weights, its matrices quantized to Q8_0, with a byte-level tokenizer. Of `llama`, `qwen2`, `qwen3` and
    `qwen3moe`; `add` puts in more."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(tokens)
    if architecture.startswith("qwen3"):
        writer.add_key_length(WIDTH // HEADS)
    if architecture == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(HIDDEN)
    vocabulary = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    names = [name for name, _ in vocabulary] + [f"<unused{i}>" for i in range(tokens - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(names)
    writer.add_token_types([3, 3] + [1] * (len(names) - 2))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template(CHAT_TEMPLATE)

    def matrix(name: str, *shape: int) -> None:
        values = rng.normal(0, 0.2, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    def vector(name: str, size: int) -> None:
        writer.add_tensor(name, rng.normal(1, 0.2, size).astype(np.float32))

    matrix("token_embd.weight", tokens, WIDTH)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(LAYERS):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(WIDTH, np.float32))
        matrix(f"blk.{i}.attn_q.weight", WIDTH, WIDTH)
        matrix(f"blk.{i}.attn_k.weight", WIDTH * KV_HEADS // HEADS, WIDTH)
        matrix(f"blk.{i}.attn_v.weight", WIDTH * KV_HEADS // HEADS, WIDTH)
        matrix(f"blk.{i}.attn_output.weight", WIDTH, WIDTH)
        if architecture == "qwen2":
            vector(f"blk.{i}.attn_q.bias", WIDTH)
            vector(f"blk.{i}.attn_k.bias", WIDTH * KV_HEADS // HEADS)
            vector(f"blk.{i}.attn_v.bias", WIDTH * KV_HEADS // HEADS)
        if architecture.startswith("qwen3"):
            vector(f"blk.{i}.attn_q_norm.weight", WIDTH // HEADS)
            vector(f"blk.{i}.attn_k_norm.weight", WIDTH // HEADS)
        if architecture == "qwen3moe":
            matrix(f"blk.{i}.ffn_gate_inp.weight", EXPERTS, WIDTH)
            matrix(f"blk.{i}.ffn_gate_exps.weight", EXPERTS, HIDDEN, WIDTH)
            matrix(f"blk.{i}.ffn_up_exps.weight", EXPERTS, HIDDEN, WIDTH)
            matrix(f"blk.{i}.ffn_down_exps.weight", EXPERTS, WIDTH, HIDDEN)
        else:
            matrix(f"blk.{i}.ffn_gate.weight", HIDDEN, WIDTH)
            matrix(f"blk.{i}.ffn_up.weight", HIDDEN, WIDTH)
            matrix(f"blk.{i}.ffn_down.weight", WIDTH, HIDDEN)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_gguf_file_becomes_a_plain_model(source, dtype, tmp_path):
    report = convert(source, tmp_path / "out", "attnres", dtype=dtype)
    assert report.verification.bitwise_equal and report.verification.control_differs
    assert report.dtype == report.verification.dtype == (dtype or "float32")
    config = DepthRouteConfig.from_pretrained(tmp_path / "out")
    assert not config.qk_norm and config.tie_word_embeddings and getattr(config, "quantization_config", None) is None
    assert (config.num_hidden_layers, config.num_key_value_heads, config.vocab_size) == (LAYERS, KV_HEADS, 97)
    stock = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = {key: value for key, value in stock.state_dict().items() if key != "lm_head.weight"}
    assert all(torch.equal(written[key], value.to(written[key].dtype)) for key, value in expected.items())
    assert len(written) == len(expected) + report.added_tensors

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer("the cat").input_ids == tiny_tokenizer()("the cat").input_ids
    if dtype is None:
        verify(source, tmp_path / "out").check()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "qwen3moe"])
def test_other_families(architecture, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", architecture)
    found = convert(path, tmp_path / "out").verification
    assert found.bitwise_equal and found.control_differs
    # the numbers of the file themselves, under the names of the model
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    model = DepthRouteForCausalLM.from_pretrained(tmp_path / "out").model
    layer, theirs = model.layers[2], "blk.2"
    pairs = [
        (model.embed_tokens.weight, "token_embd.weight"),
        (layer.self_attn.k_proj.weight, f"{theirs}.attn_k.weight"),
    ]
    if architecture == "qwen2":
        pairs += [(layer.self_attn.v_proj.bias, f"{theirs}.attn_v.bias")]
    else:
        pairs += [(layer.self_attn.q_norm.weight, f"{theirs}.attn_q_norm.weight")]
    if architecture == "qwen3moe":
        gate, up = layer.mlp.experts.gate_up_proj.chunk(2, dim=1)
        pairs += [(gate, f"{theirs}.ffn_gate_exps.weight"), (up, f"{theirs}.ffn_up_exps.weight")]
        pairs += [(layer.mlp.experts.down_proj, f"{theirs}.ffn_down_exps.weight")]
        pairs += [(layer.mlp.gate.weight, f"{theirs}.ffn_gate_inp.weight")]
    else:
        pairs += [(layer.mlp.down_proj.weight, f"{theirs}.ffn_down.weight")]
    assert all(torch.equal(ours, torch.tensor(stored[name])) for ours, name in pairs)


def test_a_tensor_is_dequantized_when_it_is_read(source, monkeypatch):
    seen = []
    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: seen.append(data.shape) or dequantize(data, kind))
    opened = open_source(source)
    assert not seen and len(opened.shapes()) == 2 + 9 * LAYERS
    assert opened.read("model.layers.1.mlp.up_proj.weight").shape == (HIDDEN, WIDTH) and len(seen) == 1


REFUSED = {
    "scaled frequencies": (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(WIDTH // HEADS // 2, np.float32)),
        "rope_freqs.weight: got tensors that transformers does not read, allowed: none of them; convert the model's own folder",
    ),
    "scaled positions": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        "llama.rope.scaling.type: got 'yarn', allowed: none",
    ),
    "biases that nothing holds": (
        lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(WIDTH, np.float32)),
        "blk.0.attn_q.bias: got tensors that transformers does not read",
    ),
    "a head of another size": (
        lambda writer: writer.add_tensor("output.weight", np.ones((50, WIDTH), np.float32)),
        r"output.weight \[50, 32\]: allowed: lm_head.weight \[97, 32\] by its metadata",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_would_drop_is_refused(case, tmp_path):
    add, message = REFUSED[case]
    path = write_gguf(tmp_path / "more.gguf", add=add)
    with pytest.raises(Refused, match=message):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_truncated_file_is_refused(source, tmp_path):
    (tmp_path / "half.gguf").write_bytes(source.read_bytes()[:5000])
    with pytest.raises(Refused, match=r"half.gguf: transformers cannot load it"):
        convert(tmp_path / "half.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_architecture_is_refused(tmp_path):
    path = write_gguf(tmp_path / "other.gguf", "nonesuch")
    with pytest.raises(Refused, match=r"other.gguf: transformers cannot load it: .*nonesuch"):
        convert(path, tmp_path / "out")


def test_a_folder_with_a_gguf_file_alone_names_it(source, tmp_path, copy_of):
    folder = copy_of("llama")
    (folder / "model.safetensors").unlink()
    (folder / source.name).write_bytes(b"GGUF")
    with pytest.raises(Refused, match="weights: got none, .*name the file itself to convert tiny.Q8_0.gguf"):
        convert(folder, tmp_path / "out")


def test_there_is_no_way_back_to_a_gguf_file(source, tmp_path):
    convert(source, tmp_path / "out", verify=False)
    with pytest.raises(Refused, match="not the source's bytes: .* tensors were computed from what the source stores"):
        revert(tmp_path / "out", tmp_path / "back")
    revert(tmp_path / "out", tmp_path / "back", as_is=True)
    stock = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(stock) and getattr(back.config, "quantization_config", None) is None
    assert all(torch.equal(value, back.state_dict()[key]) for key, value in stock.state_dict().items())


def test_licence_languages_and_base_model_are_those_of_the_file(tmp_path):
    def about(writer) -> None:
        writer.add_license("apache-2.0")
        writer.add_languages(["en", "de"])
        writer.add_base_model_count(1)
        writer.add_base_model_repo_url(0, "https://huggingface.co/some-org/some-model")

    # a folder of downloads: the card in it is another model's
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: some-org/another\n---\n")
    convert(write_gguf(tmp_path / "tiny.gguf", add=about), tmp_path / "out", verify=False)
    metadata = metadata_of((tmp_path / "out" / "README.md").read_text())
    assert metadata["license"] == "apache-2.0" and metadata["language"] == ["en", "de"]
    assert metadata["base_model"] == "some-org/some-model"


def test_what_the_file_does_not_say_is_said_by_the_card_beside_it(source, tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(source, folder)
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: some-org/some-model\n---\n")
    convert(folder / source.name, tmp_path / "out", verify=False)
    metadata = metadata_of((tmp_path / "out" / "README.md").read_text())
    assert metadata["license"] == "mit" and metadata["base_model"] == "some-org/some-model"
