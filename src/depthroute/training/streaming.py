# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Documents that are read while training goes on: shuffled through a buffer, dealt to lanes, packed to blocks.

The order of the blocks is a function of the data, the seed and the buffer alone. Documents are dealt to `LANES` lanes, each
of which packs its own into blocks, and block j of the run is taken from lane j mod `LANES`. So whoever needs a block knows
which documents it is made of without tokenizing the others: each process, and each worker of its data loader, reads all
documents, tokenizes those of its own lanes and yields its own blocks.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from math import lcm
from typing import Any

import torch
from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from torch.utils.data import DataLoader, get_worker_info

from ..errors import Refused, one_line
from ..files import HUB_ERRORS
from ..modeling.configuration_depthroute import nearest_names
from .data import READERS, check_tokenizer, document_columns, encode_document
from .trainer import DepthRouteTrainer


LANES = 32
"""How many lanes documents are dealt to; part of the data order. Workers of all processes together share lanes, and tokenize
the same documents twice, where they are more than this."""


@dataclass(frozen=True)
class DocumentStream:
    """Documents of files or of a data set, opened anew for each pass.

    Args:
        rows: what `datasets` streams.
        columns: one column of text; or `input_ids` and perhaps `labels`.
        held_out: documents at the beginning that are not trained on.
        buffer_size: documents of the shuffle buffer; 1: no shuffling.
        seed: of the order; each pass has one of its own.
        where: for messages.
    """

    rows: IterableDataset
    columns: list[str]
    held_out: int
    buffer_size: int
    seed: int
    where: str

    def documents(self, pass_index: int) -> Iterator[dict[str, Any]]:
        """The documents of a pass, in its order: rows with `text`, or with `input_ids` and perhaps `labels`."""
        rows = self.rows.skip(self.held_out) if self.held_out else self.rows
        if self.buffer_size > 1:
            rows = rows.shuffle(seed=self.seed + pass_index, buffer_size=self.buffer_size)
        return map(self._document, _one_by_one(rows))

    def validation_documents(self) -> Iterator[dict[str, Any]]:
        """The first `held_out` documents, in the order of the data."""
        return map(self._document, _one_by_one(self.rows.take(self.held_out)))

    def _document(self, row: dict[str, Any]) -> dict[str, Any]:
        if self.columns[0] == "input_ids":
            return {name: row[name] for name in self.columns}
        return {"text": row[self.columns[0]]}


def _one_by_one(rows: IterableDataset) -> Iterator[dict[str, Any]]:
    """All rows, in a data loader's worker too: there iterating over `rows` itself would leave rows out, by a rule of its own."""
    for batch in rows.iter(batch_size=1):
        yield {name: values[0] for name, values in batch.items()}


def open_stream(
    *,
    files: list[str] | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    split: str = "train",
    text_column: str | None = None,
    held_out: int = 0,
    buffer_size: int = 10_000,
    seed: int = 0,
) -> DocumentStream:
    """Open local files, or one split of a data set by name or folder, without reading more than the first document.

    Args:
        files: all of one kind of `READERS`; a text file is one document. Or:
        dataset, dataset_config, split: for the `datasets` library.
        text_column: as for `data.keep_document_columns`.
        held_out, buffer_size, seed: as for `DocumentStream`.

    Raises:
        Refused: a file of an unknown kind or files of several kinds; a data set, split or column that does not exist or
            cannot be reached; no document.
    """
    where = dataset if dataset is not None else ", ".join(files or [])
    options: dict[str, Any] = {"split": split, "streaming": True}
    if dataset is not None:
        arguments = {"path": dataset, "name": dataset_config, **options}
    else:
        arguments = {**_reader_of(files or []), "data_files": [str(file) for file in files or []], **options}
    try:
        rows = load_dataset(**arguments)
        first = next(iter(rows), None)
    except (*HUB_ERRORS, DatasetNotFoundError, DatasetGenerationError, ValueError) as error:
        field, allowed = (
            ("dataset", "one that can be reached, or --train_files") if dataset else ("train_files", "files")
        )
        raise Refused(
            f"{field}: got {where!r}, which cannot be streamed ({one_line(error)}); allowed: {allowed}"
        ) from error
    if first is None:
        raise Refused(f"{where}: got no document")
    strings = [name for name, value in first.items() if isinstance(value, str)]
    columns = document_columns(list(first), strings, text_column, where)
    return DocumentStream(rows, columns, held_out, buffer_size, seed, where)


def _reader_of(files: list[str]) -> dict[str, Any]:
    suffixes = {"." + str(file).rpartition(".")[2].lower() for file in files}
    for suffix in sorted(suffixes - READERS.keys()):
        raise Refused(f"train_files: got the suffix {suffix!r}, allowed: {nearest_names(suffix, READERS)}")
    readers = {READERS[suffix] for suffix in suffixes}
    if len(readers) != 1:
        raise Refused(f"train_files: got {' and '.join(sorted(readers))} to stream, allowed: files of one kind")
    reader = readers.pop()
    return {"path": reader, "sample_by": "document"} if reader == "text" else {"path": reader}


class _Lane:
    """Documents in their order, packed into blocks of [T] tokens and [T] labels."""

    def __init__(self, tokenizer: Any, block_size: int):
        self.tokenizer, self.block_size = tokenizer, block_size
        self.tokens: list[int] = []
        self.labels: list[int] = []
        self.blocks: deque[tuple[list[int], list[int]]] = deque()

    def add(self, document: dict[str, Any], where: str) -> None:
        if "text" in document:
            tokens = encode_document(document["text"], self.tokenizer) if document["text"] else []
        else:
            tokens = list(document["input_ids"])
        labels = list(document.get("labels") or tokens)
        if len(labels) != len(tokens):
            raise Refused(f"{where}: labels: a row has {len(labels)} for {len(tokens)} input_ids, allowed: as many")
        self.tokens += tokens
        self.labels += labels
        while len(self.tokens) >= self.block_size:
            self.blocks.append((self.tokens[: self.block_size], self.labels[: self.block_size]))
            del self.tokens[: self.block_size], self.labels[: self.block_size]


class StreamedBlocks(torch.utils.data.IterableDataset):
    """Blocks of `block_size` tokens without end: where the documents are used up, they come again in another order. Block j is
    the same for any number of processes, of data loader workers, and any batch size.

    Args:
        stream: the documents.
        tokenizer: of the model.
        block_size: T.
        batch_size: blocks per batch and process; the data loader must use the same.
        process_index, processes: global batch g is made of the `processes` batches from block g · processes · batch_size
            on, one for each process.
        vocab_size: token ids are below it.

    Raises:
        Refused: the tokenizer has no end-of-text token; while reading: a pass without a document, a row with more or fewer labels
            than tokens, or a token id out of range.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Any,
        block_size: int,
        batch_size: int = 1,
        process_index: int = 0,
        processes: int = 1,
        vocab_size: int | None = None,
    ):
        check_tokenizer(tokenizer)
        self.stream, self.tokenizer, self.block_size, self.batch_size = stream, tokenizer, block_size, batch_size
        self.process_index, self.processes, self.vocab_size = process_index, processes, vocab_size

    def _is_ours(self, block: int, worker: int, workers: int) -> bool:
        batch, step = block // self.batch_size % self.processes, block // (self.batch_size * self.processes)
        # a data loader takes batches from its workers in turn
        return batch == self.process_index and step % workers == worker

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Dicts of `input_ids` and `labels`, both [T] int64."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        period = lcm(self.batch_size * self.processes * workers, LANES)
        # the pattern repeats after a period; lanes that none of our blocks comes from are not tokenized
        ours = {block % LANES for block in range(period) if self._is_ours(block, worker, workers)}
        lanes = {index: _Lane(self.tokenizer, self.block_size) for index in ours}
        documents = self._dealt()
        for block in count():
            if (lane := lanes.get(block % LANES)) is None:
                continue
            while not lane.blocks:
                index, document = next(documents)
                if index in lanes:
                    lanes[index].add(document, self.stream.where)
            packed = lane.blocks.popleft()  # also where it is another worker's: ours begin behind it
            if self._is_ours(block, worker, workers):
                yield self._example(*packed)

    def _dealt(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Documents without end, each with its lane: the one with the least text so far, which nobody has to tokenize for."""
        sizes = [0] * LANES
        pass_index = 0
        while True:
            before = sum(sizes)
            for document in self.stream.documents(pass_index):
                lane = sizes.index(min(sizes))
                sizes[lane] += len(document["text"] if "text" in document else document["input_ids"])
                yield lane, document
            if sum(sizes) == before:
                raise Refused(f"{self.stream.where}: got no text behind the documents that are held out")
            pass_index += 1

    def _example(self, tokens: list[int], labels: list[int]) -> dict[str, torch.Tensor]:
        if self.vocab_size is not None and max(tokens) >= self.vocab_size:
            raise Refused(
                f"{self.stream.where}: token id {max(tokens)}, allowed: below {self.vocab_size}, vocab_size of the model"
            )
        return {"input_ids": torch.tensor(tokens), "labels": torch.tensor(labels)}


class StreamTrainer(DepthRouteTrainer):
    """`DepthRouteTrainer` on `StreamedBlocks`, which give each process its own batches. Resuming reads and tokenizes again what
    was trained on, and goes on exactly behind it."""

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process; not divided a second time among processes."""
        arguments = self.args
        return DataLoader(
            self.train_dataset,
            batch_size=self.train_dataset.batch_size,
            collate_fn=self.data_collator,
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory and arguments.device.type == "cuda",
            prefetch_factor=arguments.dataloader_prefetch_factor,
        )
