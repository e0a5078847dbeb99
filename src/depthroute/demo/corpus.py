# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Real text that is on every machine: sources and docstrings of the running Python's standard library.

Files are divided, not lines: a file is training or validation text by a hash of its name. The modules that the local lm-eval
tasks are made of are in neither.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor

from ..errors import Refused
from ..evaluation import HELD_OUT_MODULES
from ..training.data import PackedBlocks, pack


_LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "encodings", "ensurepip", "pydoc_data", "turtledemo")
_CHARACTERS = 8000
_SHORTEST = 2000
_VALIDATION_PART = 8


class Document(NamedTuple):
    """The beginning of one source file: its path inside the library, and whole lines of about 8000 characters."""

    file: str
    text: str


def library_documents() -> tuple[list[Document], list[Document]]:
    """Training and validation documents, in an order that mixes the library's parts; the same for the same Python.

    Raises:
        Refused: this Python has no standard library in source form.
    """
    library = Path(sysconfig.get_path("stdlib"))
    train: list[Document] = []
    validation: list[Document] = []
    for path in library.rglob("*.py"):
        place = path.relative_to(library)
        if set(place.parts) & set(_LEFT_OUT) or place.parts[0].removesuffix(".py") in HELD_OUT_MODULES:
            continue
        text = path.read_text(encoding="utf-8")[:_CHARACTERS]
        if len(text) >= _SHORTEST:
            document = Document(place.as_posix(), text[: text.rfind("\n") + 1])
            (validation if _place(document) % _VALIDATION_PART == 0 else train).append(document)
    if not train or not validation:
        raise Refused(f"{library}: no source files, allowed: a Python whose standard library is there as .py files")
    return sorted(train, key=_place), sorted(validation, key=_place)


def _place(document: Document) -> int:
    return int(hashlib.sha256(document.file.encode()).hexdigest(), 16)


def digest(documents: list[Document]) -> str:
    """A fingerprint of the texts, which differ from one Python release to the next."""
    return hashlib.sha256("\0".join(document.text for document in documents).encode()).hexdigest()[:16]


def training_blocks(documents: list[Document], tokenizer: Any, tokens: int, count: int) -> PackedBlocks:
    """The first `count` blocks of the documents, packed.

    Raises:
        Refused: they hold fewer.
    """
    rows = Dataset.from_list([{"text": document.text} for document in documents])
    blocks = pack(rows, tokenizer, tokens, "standard library")
    if len(blocks) < count:
        raise Refused(
            f"steps: got {count} blocks of {tokens} tokens, allowed: at most {len(blocks)}, the library's size"
        )
    blocks.input_ids = blocks.labels = blocks.input_ids[:count]
    return blocks


def validation_windows(
    documents: list[Document], tokenizer: Any, tokens: int, count: int
) -> tuple[Tensor, list[Document]]:
    """The beginnings of `count` files: token ids [count, tokens], and the documents. One window per file, so that windows are
    about as independent as files are.

    Raises:
        Refused: fewer files are long enough.
    """
    windows: list[list[int]] = []
    used: list[Document] = []
    for document in documents:
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= tokens and len(windows) < count:
            windows.append(ids[:tokens])
            used.append(document)
    if len(windows) < count:
        raise Refused(
            f"validation windows: got {count}, allowed: at most {len(windows)}, the files that are long enough"
        )
    return torch.tensor(windows), used
