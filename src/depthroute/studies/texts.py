# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a study reads: the standard library's sources as files of documents, or a data set of the hub."""

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from ..demo.corpus import Document, digest, library_documents
from ..files import write_text
from .definition import Text


TRAIN_FILE, VALIDATION_FILE = "train.jsonl", "validation.jsonl"


def library_text(text: Text, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write the part of the standard library that a size reads: documents of ASCII text, so that characters are few.

    Args:
        folder: of all texts; this one gets a folder of its own, by its contents.

    Returns:
        The folder with `train.jsonl` and `validation.jsonl`, and what to say of the text.

    Raises:
        Refused: this Python has no standard library in source form.
    """
    train, validation = (
        [document for document in documents if document.text.isascii()] for documents in library_documents()
    )
    train = _part(train, text.documents, text.characters)
    validation = _part(validation, text.validation_documents, text.validation_characters)
    fingerprint = hashlib.sha256((digest(train) + digest(validation)).encode()).hexdigest()[:16]
    target = folder / fingerprint
    target.mkdir(parents=True, exist_ok=True)
    for file, documents in ((TRAIN_FILE, train), (VALIDATION_FILE, validation)):
        lines = "".join(json.dumps(document._asdict()) + "\n" for document in documents)
        if not (target / file).is_file() or (target / file).read_text(encoding="utf-8") != lines:
            write_text(target / file, lines)
    return target, {
        "name": f"sources of Python {platform.python_version()}'s standard library, divided by file",
        "digest": fingerprint,
        "train_documents": len(train),
        "train_characters": sum(len(document.text) for document in train),
        "validation_documents": len(validation),
        "validation_characters": sum(len(document.text) for document in validation),
    }


def _part(documents: list[Document], count: int | None, characters: int | None) -> list[Document]:
    return [Document(document.file, document.text[:characters]) for document in documents[:count]]
