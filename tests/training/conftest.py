# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with one token per character, folders with a tiny model, and text with something to learn in it."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


CHARACTERS = "\n" + "".join(map(chr, range(32, 126)))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """97 tokens: `<eos>` 0, `<unk>` 1, then the characters. Puts nothing around a text by itself."""
    vocabulary = {token: index for index, token in enumerate(["<eos>", "<unk>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def text() -> str:
    """1400 characters."""
    return "".join(f"line {i} has the square {i * i}\n" for i in range(50))


@pytest.fixture
def model_folder(graft, tokenizer, tmp_path):
    """Save a preset's anchored model on the stock weights, and the tokenizer, to a folder: `model_folder("delta")`."""

    def save(preset: str, **values) -> str:
        folder = tmp_path / f"model-{preset}"
        graft(preset, depth_anchored=True, **values).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    return save
