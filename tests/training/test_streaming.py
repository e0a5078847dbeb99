# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Blocks out of streamed documents: their order, who gets which, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from depthroute.errors import Refused
from depthroute.training.streaming import LANES, StreamedBlocks, open_stream


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Ninety documents of 1 to 60 characters, each told by its first ones, in two files; there are more than `LANES`."""
    rows = [{"text": f"{i}:" + "abc def "[: i % 8] * (i % 7)} for i in range(90)]
    for name, part in (("a", rows[:50]), ("b", rows[50:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return [str(tmp_path / f"{name}.jsonl") for name in "ab"]


def stream(files: list[str], **options):
    return open_stream(files=files, **{"buffer_size": 20, "seed": 3, **options})


def blocks(
    files, tokenizer, count: int, workers: int = 0, batch_size: int = 2, rank: int = 0, processes: int = 1, **options
):
    """The first `count` batches [count, B, T] that a data loader gives."""
    data = StreamedBlocks(stream(files, **options), tokenizer, 8, batch_size, rank, processes)
    loader = DataLoader(data, batch_size=batch_size, num_workers=workers)
    found = []
    for batch in loader:
        found.append(batch["input_ids"])
        if len(found) == count:
            break
    return torch.stack(found)


def test_same_ids_for_the_same_seed_and_any_number_of_workers(files, tokenizer):
    expected = blocks(files, tokenizer, 40)
    assert expected.shape == (40, 2, 8) and expected.dtype == torch.int64
    assert torch.equal(blocks(files, tokenizer, 40), expected)
    for workers in (1, 2):
        assert torch.equal(blocks(files, tokenizer, 40, workers), expected)
    assert not torch.equal(blocks(files, tokenizer, 40, seed=4), expected)
    assert not torch.equal(blocks(files, tokenizer, 40, buffer_size=1), expected)


def test_processes_and_batch_sizes_divide_one_order(files, tokenizer):
    whole = blocks(files, tokenizer, 24, batch_size=4).flatten(0, 1)
    parts = [blocks(files, tokenizer, 24, workers, 2, rank, 2) for rank, workers in ((0, 2), (1, 0))]
    assert torch.equal(torch.stack(parts, 1).flatten(0, 2), whole)
    assert torch.equal(blocks(files, tokenizer, 32, batch_size=3).flatten(0, 1), whole)


def test_every_document_is_packed_once_in_a_pass(files, tokenizer):
    data = StreamedBlocks(stream(files), tokenizer, 8)
    seen = [document["text"] for _, document in zip(range(90), (d for _, d in data._dealt()))]
    assert sorted(seen) == sorted(
        row["text"] for row in (json.loads(line) for file in files for line in Path(file).read_text().splitlines())
    )
    # each lane is its documents end to end: lane 0 as the first blocks of it show
    lane = "".join(document["text"] + "<eos>" for index, document in _dealt(data, 300) if index == 0)
    found = blocks(files, tokenizer, 3 * LANES, batch_size=1)[::LANES, 0]
    assert lane.startswith("".join(tokenizer.convert_ids_to_tokens(found.flatten().tolist())))


def _dealt(data, count):
    return [pair for _, pair in zip(range(count), data._dealt())]


def test_a_worker_tokenizes_its_own_lanes_only(files, tokenizer, monkeypatch):
    read = []
    encode = "depthroute.training.streaming.encode_document"
    monkeypatch.setattr(encode, lambda text, given: read.append(text) or given(text).input_ids + [0])
    blocks(files, tokenizer, 4, batch_size=1, rank=1, processes=4)
    lanes = {
        index for index, document in _dealt(StreamedBlocks(stream(files), tokenizer, 8), 90) if document["text"] in read
    }
    assert read and lanes <= {1, 5, 9, 13, 17, 21, 25, 29}


def test_documents_come_again_in_another_order(files, tokenizer):
    data = StreamedBlocks(stream(files), tokenizer, 8)
    texts = [document["text"] for _, document in _dealt(data, 180)]
    assert sorted(texts[:90]) == sorted(texts[90:]) and texts[:90] != texts[90:]


def test_held_out_documents_are_never_trained_on(files, tokenizer):
    opened = stream(files, held_out=10)
    kept_out = [document["text"] for document in opened.validation_documents()]
    assert [text.partition(":")[0] for text in kept_out] == [str(i) for i in range(10)]
    trained = {document["text"] for _, document in _dealt(StreamedBlocks(opened, tokenizer, 8), 200)}
    assert len(trained) == 80 and not trained & set(kept_out)


def test_token_ids_and_labels_are_taken_as_they_are(tmp_path, tokenizer):
    rows = [{"input_ids": [i, i + 1, i + 2, i + 3], "labels": [-100, i + 1, i + 2, i + 3]} for i in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = StreamedBlocks(stream([str(tmp_path / "a.jsonl")]), tokenizer, 4, vocab_size=63)
    example = next(iter(data))
    assert example["labels"].tolist() == [-100, *example["input_ids"][1:].tolist()]
    with pytest.raises(Refused, match=r"a\.jsonl: token id \d+, allowed: below 5, vocab_size"):
        list(zip(range(60), StreamedBlocks(stream([str(tmp_path / "a.jsonl")]), tokenizer, 4, vocab_size=5)))


def test_streams_that_are_refused(files, tmp_path, tokenizer):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "a.bin").write_text("")
    (tmp_path / "a.txt").write_text("text")
    for names, message in {
        ("a.bin",): r"train_files: got the suffix '\.bin', allowed: \.",
        ("a.txt", "b.jsonl"): "train_files: got json and text to stream, allowed: files of one kind",
        ("gone.txt",): r"train_files: got '.*gone\.txt', which cannot be streamed",
    }.items():
        with pytest.raises(Refused, match=message) as refusal:
            open_stream(files=[str(tmp_path / name) for name in names])
        assert "\n" not in str(refusal.value)
    with pytest.raises(Refused, match="dataset: got 'no/such', which cannot be streamed .*--train_files"):
        open_stream(dataset="no/such")
    with pytest.raises(Refused, match="text_column: got 'txet', nearest: text"):
        stream(files, text_column="txet")
    with pytest.raises(Refused, match="got no text behind the documents that are held out"):
        next(iter(StreamedBlocks(stream(files, held_out=90), tokenizer, 8)))
