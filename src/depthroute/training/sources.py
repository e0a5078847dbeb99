# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""From a run's arguments to its training and validation examples, read before the run or streamed during it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..errors import Refused
from .arguments import DepthRouteTrainingArguments, RunArguments
from .data import PackedBlocks, divide, pack, read_files, read_split, split_names
from .streaming import DocumentStream, StreamedBlocks, open_stream


DEFAULT_BLOCK_SIZE = 1024


@dataclass(frozen=True)
class Documents:
    """What a run trains on and measures on, before it is tokenized."""

    train: Dataset | DocumentStream
    held_out: Dataset | None

    def texts(self) -> Iterator[str]:
        """The training documents' texts, in the order of the data where they are read before the run.

        Raises:
            Refused: they are token ids.
        """
        rows = self.train.documents(0) if isinstance(self.train, DocumentStream) else iter(self.train)
        for row in rows:
            if "text" not in row:
                raise Refused("tokenizer: got characters for documents of token ids, allowed: documents of text")
            yield row["text"]


def check_sources(run: RunArguments, training: DepthRouteTrainingArguments) -> None:
    """Refuse sources that contradict each other, before anything is read."""
    if bool(run.train_files) == bool(run.dataset):
        raise Refused("train_files, dataset: got both or neither, allowed: exactly one of the two")
    sources = {
        "validation_files": run.validation_files,
        "validation_split": run.validation_split,
        "validation_fraction": run.validation_fraction,
        "validation_documents": run.validation_documents,
    }
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        raise Refused(f"{', '.join(given)}: got {len(given)} sources of validation data, allowed: one")
    if run.validation_split and not run.dataset:
        raise Refused(f"validation_split: got {run.validation_split!r} without dataset, allowed: with dataset")
    if run.stream and run.validation_fraction is not None:
        raise Refused("validation_fraction: got a stream, whose length is not known; allowed: validation_documents")
    for name in ("validation_documents", "shuffle_buffer"):
        if (value := getattr(run, name)) is not None and value < 1:
            raise Refused(f"{name}: got {value}, allowed: at least 1")
    may_have_split = run.dataset is not None
    wanted = "eval_tokens" if run.eval_tokens else "eval_strategy"
    if (training.eval_strategy != "no" or run.eval_tokens) and not given and not may_have_split:
        value = run.eval_tokens or str(training.eval_strategy.value)
        raise Refused(f"{wanted}: got {value!r} without validation data, allowed: with one of {', '.join(sources)}")
    if run.block_size is not None and run.block_size < 2:
        raise Refused(f"block_size: got {run.block_size}, allowed: at least 2 tokens")


def open_documents(run: RunArguments, training: DepthRouteTrainingArguments) -> Documents:
    """Read the documents, or open the stream of them.

    Raises:
        Refused: files, data sets, splits or columns that do not exist or cannot be read; nothing left to train on; evaluation
            without data for it.
    """
    options: dict[str, Any] = {"text_column": run.text_column, "cache_dir": run.cache_dir}
    held_out = None
    if run.validation_files:
        held_out = read_files(run.validation_files, **options)
    elif run.stream and run.validation_split:
        split_options: dict[str, Any] = {"dataset_config": run.dataset_config, "split": run.validation_split}
        held_out_stream = open_stream(dataset=run.dataset, text_column=run.text_column, buffer_size=1, **split_options)
        held_out = Dataset.from_list(list(held_out_stream.documents(0)))
    elif split := _validation_split(run):
        held_out = read_split(str(run.dataset), run.dataset_config, split, **options)
    train: Dataset | DocumentStream
    if run.stream:
        train = open_stream(
            files=run.train_files,
            dataset=run.dataset,
            dataset_config=run.dataset_config,
            split=run.train_split,
            text_column=run.text_column,
            held_out=run.validation_documents or 0,
            buffer_size=run.shuffle_buffer,
            seed=_data_seed(training),
        )
        if run.validation_documents:
            held_out = Dataset.from_list(list(train.validation_documents()))
    elif run.dataset is None:
        train = read_files(run.train_files or [], **options)
    else:
        train = read_split(run.dataset, run.dataset_config, run.train_split, **options)
    if isinstance(train, Dataset):
        if run.validation_fraction is not None:
            train, held_out = divide(train, run.validation_fraction, _data_seed(training))
        if (first := run.validation_documents) is not None:
            if first >= len(train):
                raise Refused(f"validation_documents: got {first} of {len(train)} documents, allowed: fewer")
            train, held_out = train.select(range(first, len(train))), train.select(range(first))
    if held_out is None and (training.eval_strategy != "no" or run.eval_tokens):
        wanted = run.eval_tokens or training.eval_strategy.value
        name = "eval_tokens" if run.eval_tokens else "eval_strategy"
        raise Refused(f"{name}: got {wanted!r}, but {run.dataset} has no split 'validation'")
    return Documents(train, held_out)


def _data_seed(training: DepthRouteTrainingArguments) -> int:
    return training.seed if training.data_seed is None else training.data_seed


def _validation_split(run: RunArguments) -> str | None:
    """The split of the data set to measure on: the one asked for; where nothing was, `validation` if it exists."""
    others = run.validation_files or run.validation_fraction is not None or run.validation_documents
    if run.validation_split or others or run.dataset is None or run.stream:
        return run.validation_split
    return "validation" if "validation" in split_names(run.dataset, run.dataset_config, run.cache_dir) else None


def block_size_of(run: RunArguments, config: Any) -> int:
    """T: as asked for, or the model's context, at most `DEFAULT_BLOCK_SIZE`.

    Raises:
        Refused: it exceeds the model's context.
    """
    context = config.max_position_embeddings
    block_size = min(context, DEFAULT_BLOCK_SIZE) if run.block_size is None else run.block_size
    if block_size > context:
        raise Refused(f"block_size: got {block_size}, allowed: at most {context}, max_position_embeddings of the model")
    return block_size


def make_blocks(
    documents: Documents, run: RunArguments, training: DepthRouteTrainingArguments, tokenizer: Any, config: Any
) -> tuple[PackedBlocks | StreamedBlocks, PackedBlocks | None]:
    """Training and validation examples; None where there is no validation data.

    Raises:
        Refused: too little text for one block, a block longer than the model's context, or token ids out of its vocabulary.
    """
    block_size = block_size_of(run, config)

    def blocks(rows: Dataset, where: str) -> PackedBlocks:
        packed = pack(rows, tokenizer, block_size, where)
        if (largest := int(packed.input_ids.max())) >= config.vocab_size:
            raise Refused(f"{where}: token id {largest}, allowed: below {config.vocab_size}, vocab_size of the model")
        return packed

    train: PackedBlocks | StreamedBlocks
    if isinstance(documents.train, Dataset):
        train = blocks(documents.train, "training data")
    else:
        train = StreamedBlocks(
            documents.train,
            tokenizer,
            block_size,
            training.train_batch_size,
            training.process_index,
            training.world_size,
            config.vocab_size,
        )
    return train, None if documents.held_out is None else blocks(documents.held_out, "validation data")


def data_sources(run: RunArguments) -> dict[str, Any]:
    """Where the data came from, as far as it was said: a data set by its id, files by their names."""
    sources = {
        "train_files": [Path(file).name for file in run.train_files or []],
        "validation_files": [Path(file).name for file in run.validation_files or []],
        "dataset": run.dataset if run.dataset is None or not Path(run.dataset).exists() else Path(run.dataset).name,
        "dataset_config": run.dataset_config,
        "train_split": run.train_split if run.dataset else None,
        "validation_split": _validation_split(run),
        "validation_fraction": run.validation_fraction,
        "validation_documents": run.validation_documents,
        "stream": run.stream,
        "shuffle_buffer": run.shuffle_buffer if run.stream else None,
    }
    return {name: value for name, value in sources.items() if value}
