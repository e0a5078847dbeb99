# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoint folders as they are found on the hub: weights, tokenizer, chat template, generation configuration."""

import json
from pathlib import Path

from conftest import tiny_qwen3_config
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig


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


SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "initializer_range", "max_position_embeddings",
)  # fmt: skip


def tiny_llama_config(**values) -> LlamaConfig:
    return LlamaConfig(**{**{key: getattr(tiny_qwen3_config(), key) for key in SIZES}, **values})


def tiny_moe_config(**values) -> Qwen3MoeConfig:
    """Four experts, two for each token; the second layer is dense."""
    sizes = {key: getattr(tiny_qwen3_config(), key) for key in SIZES}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    return Qwen3MoeConfig(**{**sizes, **experts, **values})


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


def edit_weights(folder: Path, change, **metadata: str) -> None:
    """Rewrite a folder's weights; `change` edits the dict of tensors, `metadata` goes into the file's header."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", **metadata})
