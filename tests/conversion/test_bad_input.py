# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Bad input: one line that names field or file, value and what is allowed; exit code 2; nothing is left behind."""

import json
import os

import pytest
import torch
from conversion_helpers import edit_json, edit_weights
from safetensors.torch import save_file


def second_shard(folder) -> str:
    return sorted(path.name for path in folder.glob("*.safetensors"))[1]


def truncate(folder) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickle_only(folder) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def index_names_a_key_that_no_shard_holds(folder) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra"] = second_shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def integers(folder) -> None:
    edit_weights(folder, lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))


def config(**values):
    return lambda folder: edit_json(folder / "config.json", **values)


def weights(change):
    return lambda folder: edit_weights(folder, change)


SOURCES = {
    "another architecture": (
        "qwen3",
        config(model_type="gpt2", architectures=["GPT2LMHeadModel"]),
        "config.json: architectures: got GPT2LMHeadModel (model_type 'gpt2'), allowed: Qwen3ForCausalLM or Qwen3MoeForCausalLM or Llama",
    ),
    "an architecture that is no list": (
        "qwen3",
        config(architectures="Qwen3ForCausalLM"),
        "config.json: architectures: got 'Qwen3ForCausalLM', allowed: a list of one of Qwen3ForCausalLM",
    ),
    "another head": (
        "qwen3",
        config(architectures=["Qwen3ForTokenClassification"]),
        "config.json: architectures: got Qwen3ForTokenClassification (model_type 'qwen3'), allowed: Qwen3ForCausalLM or Qwen3Model",
    ),
    "a head that the keys lack": (
        "qwen3",
        config(architectures=["Qwen3ForSequenceClassification"]),
        "1 missing keys: score.weight; 1 unexpected keys: lm_head.weight",
    ),
    "ours by its type alone": (
        "qwen3",
        config(model_type="depthroute"),
        "config.json: architectures: got ['Qwen3ForCausalLM'], allowed: one of DepthRouteForCausalLM",
    ),
    "bitsandbytes": ("llama", config(quantization_config={"load_in_4bit": True}), "got 'bitsandbytes'"),
    "biases in the MLP": ("llama", config(mlp_bias=True), "mlp_bias: got True, allowed: False"),
    "a size that is no number": ("qwen3", config(hidden_size="wide"), "config.json: Field 'hidden_size' expected int"),
    "no context": ("qwen3", config(max_position_embeddings=0), "config.json: max_position_embeddings: got 0, allowed: ≥ 1"),
    "an activation that there is none of": (
        "qwen3",
        config(hidden_act="slu"),
        "config.json: no model can be built of it",
    ),
    "more experts for a token than there are": (
        "moe",
        config(num_experts_per_tok=9),
        "config.json: num_experts_per_tok: got 9, allowed: 1 to num_experts = 4",
    ),
    "no config": ("qwen3", lambda f: (f / "config.json").unlink(), "config.json: FileNotFoundError, allowed: a readable"),
    "config is no JSON": ("qwen3", lambda f: (f / "config.json").write_text("{"), "config.json: JSONDecodeError"),
    "config is a list": ("qwen3", lambda f: (f / "config.json").write_text("[]"), "config.json: got a list"),
    "an adapter": (
        "qwen3",
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        "holds a PEFT adapter; allowed: a whole model",
    ),
    "pickle": ("qwen3", pickle_only, "weights: got pytorch_model.bin, allowed: safetensors only"),
    "no weights": ("qwen3", lambda f: (f / "model.safetensors").unlink(), "weights: got none, allowed: model.safetensors"),
    "truncated": ("qwen3", truncate, "model.safetensors: no whole safetensors file (truncated or damaged)"),
    "an LFS pointer": (
        "qwen3",
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "model.safetensors: no whole safetensors file",
    ),
    "integers": ("qwen3", integers, "model.norm.weight: dtype: got I8, allowed: F64, F32, BF16, F16"),
    "missing shard": ("sharded", lambda f: (f / second_shard(f)).unlink(), "missing shards, named in model.safetensors.index.json: model-00002"),
    "missing index": (
        "sharded",
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "model.safetensors.index.json: missing, beside model-00001",
    ),
    "broken index": (
        "sharded",
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "model.safetensors.index.json: KeyError, allowed: a readable index with a weight_map",
    ),
    "index outside": (
        "sharded",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}'),
        "got ../b.safetensors, allowed: shards in the folder itself",
    ),
    "index names a key too many": ("sharded", index_names_a_key_that_no_shard_holds, "names 1 keys that it does not hold: model.extra"),
    "missing key": (
        "qwen3",
        weights(lambda w: w.pop("model.layers.3.mlp.up_proj.weight")),
        "1 missing keys: model.layers.3.mlp.up_proj.weight; allowed: exactly the keys",
    ),
    "missing and unexpected keys": (
        "llama",
        weights(lambda w: w.update({"model.layers.3.mlp.b": w.pop("model.norm.weight")})),
        "1 missing keys: model.norm.weight; 1 unexpected keys: model.layers.3.mlp.b",
    ),
    "fewer layers in the config": (
        "qwen3",
        config(num_hidden_layers=7, layer_types=["full_attention"] * 7),
        "11 unexpected keys: model.layers.7.input_layernorm.weight",
    ),
    "other shapes": (
        "qwen3",
        config(intermediate_size=40),
        "shapes differ from the configuration: model.layers.0.mlp.down_proj.weight: got [32, 48], allowed: [32, 40]",
    ),
    "an expert is missing": (
        "moe",
        weights(lambda w: w.pop("model.layers.3.mlp.experts.2.up_proj.weight")),
        "1 missing keys: model.layers.3.mlp.experts.2.up_proj.weight; allowed: exactly the keys",
    ),
    "experts in both layouts": (
        "moe-fused",
        weights(lambda w: w.update({"model.layers.3.mlp.experts.2.up_proj.weight": torch.ones(16, 32)})),
        "1 unexpected keys: model.layers.3.mlp.experts.2.up_proj.weight",
    ),
    "fewer experts than configured": (
        "moe-fused",
        config(num_local_experts=5),
        "model.layers.0.mlp.experts.down_proj: got [4, 32, 16], allowed: [5, 32, 16]",
    ),
    "tokenizer with code": (
        "qwen3",
        lambda f: edit_json(f / "tokenizer_config.json", auto_map={"AutoTokenizer": ["a.B", None]}),
        "tokenizer_config.json: auto_map: got",
    ),
    "broken tokenizer": (
        "qwen3",
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        "tokenizer_config.json: got no JSON",
    ),
    "a tokenizer configuration that is a list": (
        "qwen3",
        lambda f: (f / "tokenizer_config.json").write_text("[]"),
        "tokenizer_config.json: got a list, allowed: a tokenizer configuration",
    ),
}  # fmt: skip

OPTIONS = {
    "unknown preset": (["--preset", "delta-blok"], "preset: got 'delta-blok', nearest: delta-block, delta"),
    "block size 0": (["--block-size", "0"], "depth_block_size: got 0, allowed: layers ≥ 1"),
    "block size for a preset without blocks": (
        ["--preset", "attnres", "--block-size", "2"],
        "depth_block_size: got 2, allowed: none, preset 'attnres' has no blocks",
    ),
    "block as large as the model": (["--block-size", "8"], "depth_block_size: got 8 with num_hidden_layers = 8"),
    "block size for blocks of one layer": (
        ["--preset", "dar-full", "--block-size", "2"],
        "depth_block_size: got 2, allowed: none, preset 'dar-full' has blocks of one layer",
    ),
    "details of states": (
        ["--preset", "attnres-states", "--set", "depth_detail_bases=[phase]"],
        "depth_source: got 'state' with details, allowed: 'output'",
    ),
    "a field of another residual": (
        ["--preset", "dar", "--set", "depth_detail_bases=[phase]"],
        "depth_detail_bases: got ['phase'], allowed: [], it has no meaning for residual_type = 'dual_stream'",
    ),
    "equal write gates": (["--preset", "dar", "--set", "dual_write_asymmetry=0"], "dual_write_asymmetry: got 0, allowed: between 0 and 1"),
    "heads": (["--heads", "5"], "depth_num_heads: got 5, allowed: a divisor of hidden_size = 32"),
    "heads without reads": (["--preset", "standard", "--heads", "2"], "num_heads: got 2, allowed: 1"),
    "unknown field": (["--set", "depth_sorce=state"], "depth_sorce: unknown field, nearest: depth_source"),
    "a field far from any": (["--set", "wxyz=1"], "wxyz: unknown field, nearest: none is near"),
    "no field": (["--set", "depth_source"], "--set: got 'depth_source', allowed: field=value"),
    "field twice": (["--set", "use_cache=true", "--set", "use_cache=false"], "--set: got use_cache twice"),
    "option and field": (["--heads", "2", "--set", "depth_num_heads=4"], "depth_num_heads: got 2 as an option and 4 as a field"),
    "no YAML": (["--set", "depth_source=[a"], "--set: depth_source: got '[a', allowed: a JSON or YAML value"),
    "value of another type": (["--set", "depth_num_heads=two"], "Field 'depth_num_heads' expected int, got str (value: 'two')"),
    "value out of the list": (["--set", "depth_combine=mix"], "Field 'depth_combine' expected one of ('replace', 'add'), got mix"),
    "value out of range": (["--set", "depth_logit_scale=0"], "depth_logit_scale: got 0, allowed: a finite number > 0"),
    "an activation that there is none of": (["--set", "hidden_act=foo"], "configuration: no model can be built of it (KeyError"),
    "a rope type that there is none of": (
        ["--set", "rope_parameters={rope_type: foo, rope_theta: 1e4}"],
        "rope_parameters = {'rope_type': 'foo'",
    ),
    "no key-value heads": (["--set", "num_key_value_heads=0"], "num_key_value_heads = 0"),
    "dtype": (["--dtype", "int8"], "dtype: got 'int8', allowed: float32, bfloat16, float16"),
    "dtype twice": (["--dtype", "float16", "--set", "dtype=float32"], "dtype: got float16 and the field 'float32'"),
}  # fmt: skip


def check_refused(result, message: str, tmp_path, left: list[str]) -> None:
    code, _, err = result
    lines = [line for line in err.splitlines() if line.startswith("depthroute: ")]
    assert code == 2 and len(lines) == 1 and lines[0] == err.splitlines()[-1]
    assert message in lines[0]
    assert sorted(os.listdir(tmp_path)) == left


@pytest.mark.parametrize("case", SOURCES)
def test_source(case, copy_of, tmp_path, run_cli):
    name, damage, message = SOURCES[case]
    source = copy_of(name)
    damage(source)
    check_refused(run_cli("convert", source, tmp_path / "deep" / "out"), message, tmp_path, [source.name])


@pytest.mark.parametrize("case", OPTIONS)
def test_option(case, originals, tmp_path, run_cli):
    options, message = OPTIONS[case]
    check_refused(run_cli("convert", originals["qwen3"], tmp_path / "out", *options), message, tmp_path, [])


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "no/such/folder",
            "got 'no/such/folder', which does not exist; allowed: a model folder, a .gguf file or a hub id",
        ),
        ("", "source: got '', allowed: a model folder, a .gguf file or a hub id"),
        ("owner/not-here", "got 'owner/not-here', no local folder, and the hub could not give it"),
        ("gone.gguf", "got 'gone.gguf', which does not exist"),
        ("weights.bin", "weights.bin: got a pickle file, allowed: safetensors only"),
        ("one.safetensors", "one.safetensors: got a file, allowed: a model folder"),
        ("text.gguf", "text.gguf: got a file that does not begin with GGUF"),
        ("cut.gguf", "cut.gguf: transformers cannot load it"),
    ],
)
def test_source_that_is_no_folder(name, message, tmp_path, run_cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({}, tmp_path / "weights.bin")
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_text("GGUF1234")
    left = sorted(os.listdir(tmp_path))
    check_refused(run_cli("convert", name, tmp_path / "out"), message, tmp_path, left)


def test_an_output_under_a_file(originals, tmp_path, run_cli):
    (tmp_path / "afile").write_text("x")
    result = run_cli("convert", originals["qwen3"], tmp_path / "afile" / "x" / "y")
    check_refused(result, "afile is a file, allowed: a path of folders", tmp_path, ["afile"])


def test_json_file_that_cannot_be_written(originals, converted, tmp_path, run_cli):
    result = run_cli("verify", originals["qwen3"], converted("qwen3"), "--json", tmp_path / "no" / "r.json")
    check_refused(result, "r.json: its folder does not exist", tmp_path, [])
