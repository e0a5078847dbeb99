# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""From files or a `datasets` name to blocks of token ids: read, divide, tokenize, pack."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute
import torch
from datasets import (
    Dataset,
    Features,
    Sequence,
    Value,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError

from ..errors import Refused
from ..modeling.configuration_depthroute import nearest_names


READERS = {
    ".txt": "text",
    ".md": "text",
    ".rst": "text",
    ".py": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
"""Readers of the `datasets` library by file suffix."""

IGNORED_LABEL = -100
"""Label of a position that the loss leaves out."""

_TOKENS = Sequence(Value("int32"))

# a longer document is tokenized in pieces, cut at line ends: memory then grows with the piece, not with the file
_PIECE_CHARACTERS = 1_000_000


class PackedBlocks(torch.utils.data.Dataset):
    """Training examples of one length, `block_size` tokens: documents one after the other, cut without gaps. What is left at
    the end is dropped, so that every example weighs the same in a mean.

    Args:
        input_ids: [tokens] int32.
        labels: [tokens] int32; -100 where the loss leaves a position out. Default: the input ids.
        block_size: T.

    Raises:
        Refused: fewer tokens than one block has.
    """

    def __init__(self, input_ids: np.ndarray, labels: np.ndarray | None, block_size: int):
        if len(input_ids) < block_size:
            raise Refused(f"block_size: got {block_size}, allowed: at most {len(input_ids)}, the tokens in the data")
        blocks = len(input_ids) // block_size

        def cut(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[: blocks * block_size].reshape(blocks, block_size))

        self.input_ids = cut(input_ids)
        self.labels = self.input_ids if labels is None else cut(labels)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels`, both [T] int64."""
        return {"input_ids": self.input_ids[index].long(), "labels": self.labels[index].long()}


def read_files(files: list[str], text_column: str | None = None, cache_dir: str | None = None) -> Dataset:
    """The documents of local files, in the order of the files: rows with `text`, or with `input_ids` (and `labels`).

    Raises:
        Refused: a file that is missing, of an unknown kind or unreadable, or whose column cannot be told.
    """
    parts = []
    for file in files:
        path = Path(file)
        if not path.is_file():
            raise Refused(f"{file}: no such file")
        if path.suffix.lower() not in READERS:
            raise Refused(f"{file}: got the suffix {path.suffix!r}, allowed: {', '.join(READERS)}")
        reader = READERS[path.suffix.lower()]
        options = {"sample_by": "document"} if reader == "text" else {}
        try:
            rows = load_dataset(reader, data_files=[str(path)], split="train", cache_dir=cache_dir, **options)
        except DatasetGenerationError as error:
            raise Refused(f"{file}: not readable as {reader}: {error.__cause__ or error}") from error
        parts.append(keep_document_columns(rows, text_column, str(file)))
    if len({tuple(part.column_names) for part in parts}) > 1:
        raise Refused(f"{', '.join(map(str, files))}: got texts and token ids, allowed: one of the two")
    if any(part.features != parts[0].features for part in parts):  # readers differ in string and integer types
        common = {"text": Value("large_string"), "input_ids": _TOKENS, "labels": _TOKENS}
        parts = [part.cast(Features({name: common[name] for name in part.column_names})) for part in parts]
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def read_split(
    name: str, config: str | None, split: str, text_column: str | None = None, cache_dir: str | None = None
) -> Dataset:
    """The documents of one split of a data set, by name or folder; also of a folder that `save_to_disk` wrote.

    Raises:
        Refused: the split does not exist, or its column cannot be told.
    """
    if split not in (names := split_names(name, config, cache_dir)):
        raise Refused(f"{name}: no split {split!r}, nearest: {nearest_names(split, names)}")
    if _was_saved_to_disk(name):
        loaded = load_from_disk(name)
        rows = loaded if isinstance(loaded, Dataset) else loaded[split]
    else:
        rows = load_dataset(name, config, split=split, cache_dir=cache_dir)
    return keep_document_columns(rows, text_column, f"{name}, {split}")


def split_names(name: str, config: str | None, cache_dir: str | None = None) -> list[str]:
    """The splits of a data set; one without splits counts as `train`."""
    if not _was_saved_to_disk(name):
        builder = load_dataset_builder(name, config, cache_dir=cache_dir)
        if builder.info.splits:
            return list(builder.info.splits)
        return list(builder.config.data_files or load_dataset(name, config, cache_dir=cache_dir))
    loaded = load_from_disk(name)
    return ["train"] if isinstance(loaded, Dataset) else list(loaded)


def _was_saved_to_disk(name: str) -> bool:
    return any((Path(name) / marker).is_file() for marker in ("dataset_dict.json", "state.json"))


def keep_document_columns(rows: Dataset, text_column: str | None, where: str) -> Dataset:
    """Only what training needs: `text`; or `input_ids` and, where it exists, `labels`.

    Args:
        rows: any columns.
        text_column: default: `input_ids` where it exists, else "text", else the only column of strings.
        where: for messages.

    Raises:
        Refused: no such column (the nearest are listed), no or several columns of strings, or a column of something else.
    """
    names = rows.column_names
    strings = [name for name in names if getattr(rows.features[name], "dtype", None) in ("string", "large_string")]
    kept = document_columns(names, strings, text_column, where)
    rows = rows.select_columns(kept)
    return rows.rename_column(kept[0], "text") if kept[0] not in ("text", "input_ids") else rows


def document_columns(names: list[str], strings: list[str], text_column: str | None, where: str) -> list[str]:
    """The columns that hold the documents: one of text; or `input_ids` and, where it exists, `labels`.

    Args:
        names: of all columns.
        strings: of those that hold strings.
        text_column, where: as for `keep_document_columns`, which raises the same.
    """
    if text_column is None and "input_ids" in names:
        return [name for name in ("input_ids", "labels") if name in names]
    if text_column is None:
        if "text" not in names and len(strings) != 1:
            raise Refused(f"{where}: text_column: got none, allowed: {', '.join(strings or names)}")
        text_column = "text" if "text" in names else strings[0]
    if text_column not in names:
        raise Refused(f"{where}: text_column: got {text_column!r}, nearest: {nearest_names(text_column, names)}")
    if text_column not in strings:
        raise Refused(
            f"{where}: text_column: {text_column!r} holds no strings, allowed: {', '.join(strings) or 'none here'}"
        )
    return [text_column]


def divide(documents: Dataset, validation_fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Training and validation documents, drawn by the seed.

    Raises:
        Refused: the fraction is not between 0 and 1, or leaves one side empty.
    """
    if not 0 < validation_fraction < 1:
        raise Refused(f"validation_fraction: got {validation_fraction}, allowed: between 0 and 1")
    count = round(len(documents) * validation_fraction)
    if not 0 < count < len(documents):
        raise Refused(
            f"validation_fraction: got {validation_fraction} of {len(documents)} documents, which leaves one side empty; "
            "allowed: more documents, or validation_files"
        )
    parts = documents.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]


def pieces(text: str, limit: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """The text in order, in pieces of about `limit` characters, cut after line ends; a line of more than twice that is cut
    before spaces (tokenizers keep a space with the word behind it), and stays whole where it has none."""
    start = 0
    while len(text) - start > limit:
        end = text.find("\n", start + limit - 1, start + 2 * limit) + 1 or text.find(" ", start + limit)
        if end < 0:
            end = text.find("\n", start + limit - 1) + 1 or len(text)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def tokenize(documents: Dataset, tokenizer: Any, num_proc: int | None = None) -> Dataset:
    """Texts to `input_ids`, each document with the tokenizer's end-of-text token (and its start token, where the tokenizer
    puts one) around it. Empty texts are left out.

    Raises:
        Refused: the tokenizer has no end-of-text token.
    """
    check_tokenizer(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [encode_document(text, tokenizer) for text in batch["text"] if text]}

    return documents.map(
        encode,
        batched=True,
        batch_size=100,
        remove_columns=["text"],
        features=Features({"input_ids": _TOKENS}),
        num_proc=num_proc,
        desc="Tokenizing",
    )


def check_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that cannot separate documents.

    Raises:
        Refused: it has no end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise Refused("tokenizer: got no eos_token, allowed: a tokenizer with one, it separates the documents")


def encode_document(text: str, tokenizer: Any) -> list[int]:
    """One document's token ids, as in `tokenize`."""
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer("").input_ids else []
    parts = tokenizer(list(pieces(text)), add_special_tokens=False, verbose=False).input_ids
    return [*start, *(token for part in parts for token in part), tokenizer.eos_token_id]


def _flat(documents: Dataset, column: str) -> np.ndarray:
    """A column of lists as one array."""
    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in documents.data.column(column).chunks]
    return np.concatenate([np.empty(0, np.int32), *(chunk.astype(np.int32) for chunk in chunks)])


def _lengths(documents: Dataset, column: str) -> np.ndarray:
    return pyarrow.compute.list_value_length(documents.data.column(column)).to_numpy()


def pack(documents: Dataset, tokenizer: Any, block_size: int, where: str, num_proc: int | None = None) -> PackedBlocks:
    """Documents to blocks, in their order.

    Args:
        documents: rows with `text`, or with `input_ids` (and `labels`), which are taken as they are.
        tokenizer: of the model.
        block_size: T.
        where: for messages.
        num_proc: processes for tokenizing.

    Raises:
        Refused: no token, fewer than one block has, or a row with more or fewer labels than tokens.
    """
    if "text" in documents.column_names:
        documents = tokenize(documents, tokenizer, num_proc)
    documents = documents.flatten_indices()  # the table below then has the rows, in their order
    input_ids = _flat(documents, "input_ids")
    labels = _flat(documents, "labels") if "labels" in documents.column_names else None
    if not len(input_ids):
        raise Refused(f"{where}: got no text, allowed: at least {block_size} tokens")
    if labels is not None:
        odd = np.flatnonzero(_lengths(documents, "input_ids") != _lengths(documents, "labels"))
        if len(odd):
            raise Refused(f"{where}: labels: row {odd[0]} has not as many as input_ids, allowed: the same number")
    try:
        return PackedBlocks(input_ids, labels, block_size)
    except Refused as error:
        raise Refused(f"{where}: {error}") from error
