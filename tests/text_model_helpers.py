# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""For tests that evaluate or inspect: a tokenizer of the tiny model's 97 tokens, model folders, and the command line."""

import sys
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from depthroute.cli import main


END = "<|endoftext|>"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """End of text, newline and the printable ASCII characters; anything else becomes the end token."""
    vocabulary = {token: index for index, token in enumerate([END, "\n", *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END, unk_token=END)


def save_folder(model, folder: Path) -> Path:
    """Write model and tokenizer as a checkpoint folder."""
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def run_command(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    """Run `depthroute ARGUMENTS` in this process; exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["depthroute", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    capsys.readouterr()
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err
