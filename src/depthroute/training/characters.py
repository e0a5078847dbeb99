# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A tokenizer with one token per character, made from a text."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ..errors import Refused


END, UNKNOWN = "<eos>", "<unk>"


def character_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token for each character that occurs in `texts`, by code point, behind `<eos>` (0) and `<unk>` (1). Puts nothing
    around a text by itself; decoding gives the text back.

    Raises:
        Refused: there is no character.
    """
    characters = sorted({character for text in texts for character in text})
    if not characters:
        raise Refused("tokenizer: got no text to take the characters from, allowed: training documents with text")
    vocabulary = {token: index for index, token in enumerate([END, UNKNOWN, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END, unk_token=UNKNOWN)
