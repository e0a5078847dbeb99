# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, kept file by file, and checked to be the one that the source loads."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from depthroute.errors import CheckFailed, Refused, one_line


CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"

_SAMPLE = "Depth 1, 23 and 456:\n\tdef f(x):  return x  # naïve — 深さ 🙂"


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """Copy a folder's tokenizer and chat templates byte by byte; the output loads the same tokenizer.

    The class of a tokenizer may follow from the model type, which changes here: where none is named, and for types such as
    qwen2 even where one is. The class that the source loads is then written into the output's `tokenizer_config.json`.

    Returns:
        The names copied; none where the source has no tokenizer.

    Raises:
        Refused: the tokenizer runs code of its own, or cannot be loaded.
        CheckFailed: the output's tokenizer differs from the source's.
    """
    present = [name for name in TOKENIZER_FILES if os.path.lexists(source / name)]
    present += [f"{TEMPLATES}/{path.name}" for path in sorted((source / TEMPLATES).glob("*.jinja"))]
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece", "tekken")) for name in present):
        return []
    for name in present:
        copy_file(source / name, out / name)
    reference = _load(source)
    settings = _settings(out)
    if "tokenizer_class" not in settings or type(_load(out)) is not type(reference):
        settings["tokenizer_class"] = type(reference).__name__
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (out / CONFIG).write_text(text, encoding="utf-8")
    _check_same(reference, _load(out), source)
    return present


def copy_file(source: Path, out: Path) -> None:
    """Copy one file, or what a link leads to.

    Raises:
        Refused: a link that leads nowhere.
    """
    if not source.exists():
        raise Refused(f"{source}: got a link to {source.readlink()}, which does not exist; allowed: a whole folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, out)


def tokenizer_warnings(folder: Path, embedding_rows: int) -> list[str]:
    """What a user should know about a kept tokenizer, one line each: that it knows ids for which the model has no vector."""
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return []
    beyond = sorted((index, token) for token, index in _load(folder).get_vocab().items() if index >= embedding_rows)
    if not beyond:
        return []
    return [
        f"tokenizer: kept as it is; {len(beyond)} of its tokens are beyond the {embedding_rows} rows of the embedding, "
        f"the first {beyond[0][1]!r} with id {beyond[0][0]}"
    ]


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise Refused(f"{path}: got no JSON, allowed: a tokenizer configuration") from error
    if not isinstance(settings, dict):
        raise Refused(f"{path}: got a {type(settings).__name__}, allowed: a tokenizer configuration")
    if "auto_map" in settings:
        raise Refused(f"{path}: auto_map: got {settings['auto_map']}, allowed: a tokenizer without code of its own")
    return settings


def _load(folder: Path) -> Any:
    _settings(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, ImportError, KeyError, TypeError) as error:
        raise Refused(f"{folder}: tokenizer: cannot be loaded: {one_line(error)}") from error


def _check_same(reference: Any, kept: Any, source: Path) -> None:
    same = {
        "vocabulary": reference.get_vocab() == kept.get_vocab(),
        "token ids of a sample": reference(_SAMPLE)["input_ids"] == kept(_SAMPLE)["input_ids"],
        "special tokens": reference.special_tokens_map == kept.special_tokens_map,
        "added tokens": reference.added_tokens_decoder == kept.added_tokens_decoder,
        "padding": (reference.padding_side, reference.pad_token_id) == (kept.padding_side, kept.pad_token_id),
        "chat template": reference.chat_template == kept.chat_template,
    }
    differing = [name for name, equal in same.items() if not equal]
    if differing:
        raise CheckFailed(
            f"{source}: tokenizer: {', '.join(differing)} would differ once converted, allowed: all the same"
        )
