# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoint folders as they are found on the hub: weights, tokenizer, chat template, generation configuration."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_qwen3_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3ForCausalLM

from depthroute import cli


CHAT_TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes with two merges, 97 tokens at most."""
    letters = [chr(code) for code in range(33, 123)]
    vocab = {token: index for index, token in enumerate(["<s>", "</s>", *letters, "Ġ", "th", "the"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("t", "h"), ("th", "e")], unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def tiny_llama_config(**values) -> LlamaConfig:
    sizes = {
        key: getattr(tiny_qwen3_config(), key)
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    more = {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "max_position_embeddings": 256}
    return LlamaConfig(**{**sizes, **more, **values})


def save_checkpoint(model, folder: Path, **options) -> Path:
    """A model with all its side files."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, eos_token_id=[1, 2]).save_pretrained(folder)
    (folder / "LICENSE").write_text("do as you like\n")
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\ntags:\n- x\n---\n\n# A tiny model\n")
    return folder


def edit_json(path: Path, **values) -> None:
    """Change entries of a JSON file; None removes one."""
    entries = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))


def edit_weights(folder: Path, change) -> None:
    """Rewrite a folder's weights; `change` edits the dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> dict[str, Path]:
    """Read-only sources by name; convert them, do not change them."""
    root = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    qwen3, llama = Qwen3ForCausalLM(tiny_qwen3_config()), LlamaForCausalLM(tiny_llama_config())
    tied = Qwen3ForCausalLM(tiny_qwen3_config(tie_word_embeddings=True, initializer_range=0.1))
    return {
        "qwen3": save_checkpoint(qwen3, root / "tiny-qwen3"),
        "llama": save_checkpoint(llama, root / "tiny-llama"),
        "qwen3-bf16": save_checkpoint(qwen3.to(torch.bfloat16), root / "tiny-qwen3-bf16"),
        "llama-bf16": save_checkpoint(llama.to(torch.bfloat16), root / "tiny-llama-bf16"),
        "tied": save_checkpoint(tied, root / "tiny-tied"),
        "sharded": save_checkpoint(tied, root / "tiny-sharded", max_shard_size="40kB"),
    }


@pytest.fixture
def copy_of(originals, tmp_path):
    """A copy of a source that a test may damage: `copy_of("qwen3")`."""
    return lambda name: Path(shutil.copytree(originals[name], tmp_path / f"copy-of-{name}"))


@pytest.fixture(scope="session")
def converted(originals, tmp_path_factory):
    """A conversion, made once: `converted("qwen3", "delta-block", anchored=False)`. Do not change it."""
    from depthroute import convert

    root, made = tmp_path_factory.mktemp("converted"), {}

    def make(name: str, preset: str = "delta-block", **options) -> Path:
        key = (name, preset, *sorted(options.items()))
        if key not in made:
            made[key] = root / f"number-{len(made)}"
            convert(originals[name], made[key], preset, **options)
        return made[key]

    return make


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """Run the command line in this process: `code, out, err = run_cli("convert", SRC, OUT)`."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthroute", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
