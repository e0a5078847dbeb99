# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The tokenizer, kept file by file, and checked to be the one that the source loads."""

import json
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
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)

_SAMPLE = "Depth 1, 23 and 456:\n\tdef f(x):  return x  # naïve — 深さ 🙂"


def copy_tokenizer(source: Path, out: Path) -> list[str]:
    """Copy a folder's tokenizer and chat templates byte by byte; the output loads the same tokenizer.

    The class of a tokenizer that does not name its own follows from the model type, which changes here: it is then written
    into the output's `tokenizer_config.json`.

    Returns:
        The names copied; none where the source has no tokenizer.

    Raises:
        Refused: the tokenizer runs code of its own, or cannot be loaded.
        CheckFailed: the output's tokenizer differs from the source's.
    """
    present = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if not any(name.startswith(("tokenizer", "vocab", "spiece", "sentencepiece")) for name in present):
        return []
    reference = _load(source)
    for name in present:
        if (source / name).is_dir():
            shutil.copytree(source / name, out / name)
        else:
            shutil.copyfile(source / name, out / name)
    settings = _settings(out)
    if "tokenizer_class" not in settings:
        settings["tokenizer_class"] = type(reference).__name__
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (out / CONFIG).write_text(text, encoding="utf-8")
    _check_same(reference, _load(out), source)
    return present


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
        "chat template": reference.chat_template == kept.chat_template,
    }
    differing = [name for name, equal in same.items() if not equal]
    if differing:
        raise CheckFailed(
            f"{source}: tokenizer: {', '.join(differing)} would differ once converted, allowed: all the same"
        )
