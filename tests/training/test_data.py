# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Reading, dividing, tokenizing and packing."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, Sequence, Value

from depthroute.errors import Refused
from depthroute.training.data import (
    PackedBlocks,
    divide,
    keep_document_columns,
    pack,
    pieces,
    read_files,
    read_split,
    split_names,
    tokenize,
)


@pytest.fixture(autouse=True)
def cache(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """The same kinds of documents in every format."""
    (tmp_path / "a.txt").write_text("first\nfile\n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"id": i, "text": f"row {i}"}) + "\n" for i in range(3)))
    (tmp_path / "c.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    Dataset.from_dict({"text": ["p", "q"], "n": [1, 2]}).to_parquet(tmp_path / "d.parquet")
    (tmp_path / "e.csv").write_text("text,n\nrow,1\n")
    return {path.suffix: str(path) for path in tmp_path.iterdir() if path.suffix}


def test_files_of_every_kind_in_their_order(files, cache):
    order = [".jsonl", ".txt", ".parquet", ".json", ".csv"]
    rows = read_files([files[suffix] for suffix in order], cache_dir=cache)
    assert rows["text"][:] == ["row 0", "row 1", "row 2", "first\nfile\n", "p", "q", "one", "two", "row"]


def test_files_of_token_ids(tmp_path, cache):
    rows = [{"input_ids": [1, 2], "labels": [-100, 2]}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    Dataset.from_list(rows).cast_column("input_ids", Sequence(Value("int16"))).to_parquet(tmp_path / "b.parquet")
    both = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")]
    assert read_files(both, cache_dir=cache)[:] == {"input_ids": [[1, 2]] * 2, "labels": [[-100, 2]] * 2}
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(Refused, match="got texts and token ids, allowed: one of the two"):
        read_files([*both, str(tmp_path / "c.txt")], cache_dir=cache)


def test_files_that_are_refused(files, tmp_path, cache):
    (tmp_path / "x.bin").write_bytes(b"\x00")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"\n{{{')
    for name, message in {
        "gone.txt": r"gone\.txt: no such file",
        "x.bin": r"x\.bin: got the suffix '\.bin', allowed: \.txt",
        "broken.jsonl": r"broken\.jsonl: not readable as json",
    }.items():
        with pytest.raises(Refused, match=message):
            read_files([str(tmp_path / name)], cache_dir=cache)


def test_columns():
    def rows(**columns) -> Dataset:
        return Dataset.from_dict(columns)

    def names(dataset: Dataset, column: str | None = None) -> list[str]:
        return keep_document_columns(dataset, column, "here").column_names

    assert names(rows(text=["a"], other=["b"])) == ["text"]
    assert names(rows(n=[1], content=["b"])) == ["text"]
    assert names(rows(n=[1], input_ids=[[1]], labels=[[1]])) == ["input_ids", "labels"]
    with pytest.raises(Refused, match="here: text_column: got none, allowed: body, title"):
        names(rows(body=["a"], title=["b"]))
    with pytest.raises(Refused, match="here: text_column: got 'contant', nearest: content"):
        names(rows(content=["a"], n=[1]), "contant")
    with pytest.raises(Refused, match="here: text_column: 'n' holds no strings, allowed: content"):
        names(rows(content=["a"], n=[1]), "n")


def test_a_named_column_wins_over_text():
    rows = Dataset.from_dict({"text": ["a"], "other": ["b"]})
    assert keep_document_columns(rows, "other", "here")["text"][:] == ["b"]


def test_data_sets_by_name_and_folder(tmp_path, cache):
    folder = tmp_path / "set"
    folder.mkdir()
    Dataset.from_dict({"text": ["a", "b"]}).to_parquet(folder / "train.parquet")
    Dataset.from_dict({"text": ["c"]}).to_parquet(folder / "validation.parquet")
    DatasetDict(train=Dataset.from_dict({"text": ["d"]})).save_to_disk(tmp_path / "saved")
    Dataset.from_dict({"text": ["e"]}).save_to_disk(tmp_path / "single")
    assert read_split(str(folder), None, "train", cache_dir=cache)["text"][:] == ["a", "b"]
    assert set(split_names(str(folder), None, cache)) == {"train", "validation"}
    assert read_split(str(tmp_path / "saved"), None, "train")["text"][:] == ["d"]
    assert read_split(str(tmp_path / "single"), None, "train")["text"][:] == ["e"]
    with pytest.raises(Refused, match="no split 'valid', nearest: validation"):
        read_split(str(folder), None, "valid", cache_dir=cache)


def test_dividing_is_by_document_and_seed():
    documents = Dataset.from_dict({"text": [str(i) for i in range(10)]})
    train, held_out = divide(documents, 0.2, seed=1)
    assert len(held_out) == 2 and sorted(train["text"][:] + held_out["text"][:]) == sorted(documents["text"][:])
    assert divide(documents, 0.2, seed=1)[1]["text"][:] == held_out["text"][:]
    assert divide(documents, 0.2, seed=2)[1]["text"][:] != held_out["text"][:]
    with pytest.raises(Refused, match=r"validation_fraction: got 0\.01 of 10 documents, which leaves one side empty"):
        divide(documents, 0.01, seed=1)
    with pytest.raises(Refused, match=r"validation_fraction: got 1\.5, allowed: between 0 and 1"):
        divide(documents, 1.5, seed=1)


def test_packing_puts_documents_end_to_end(tokenizer):
    documents = Dataset.from_dict({"text": ["abc", "", "de", "fghij"]})
    blocks = pack(documents, tokenizer, 4, "here")
    stream = "".join(tokenizer.convert_ids_to_tokens(blocks.input_ids.flatten().tolist()))
    assert stream == "abc<eos>de<eos>fghij"[: len(stream)] and blocks.input_ids.shape == (3, 4)
    assert blocks.labels is blocks.input_ids  # one token is left over, and dropped
    assert blocks[1]["input_ids"].dtype == blocks[1]["labels"].dtype == torch.int64


def test_a_document_order_given_by_indices_is_kept(tokenizer):
    documents = Dataset.from_dict({"input_ids": [[1, 2], [3, 4], [5, 6]]}).select([2, 0])
    assert pack(documents, tokenizer, 2, "here").input_ids.tolist() == [[5, 6], [1, 2]]


def test_start_token_is_kept_where_the_tokenizer_puts_one(tokenizer):
    class WithStart:
        bos_token_id, eos_token_id = 5, 0

        def __call__(self, text, **kwargs):
            encoded = tokenizer(text)
            if text == "":
                encoded["input_ids"] = [5]
            return encoded

    rows = tokenize(Dataset.from_dict({"text": ["ab"]}), WithStart())
    assert rows["input_ids"][0] == [5, *tokenizer("ab").input_ids, 0]


def test_given_labels_are_kept(tokenizer):
    documents = Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, -100, 3], [-100, 5]]})
    blocks = pack(documents, tokenizer, 2, "here")
    assert blocks.input_ids.tolist() == [[1, 2], [3, 4]]
    assert blocks.labels.tolist() == [[-100, -100], [3, -100]]
    odd = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [[1, 2], [3]]})
    with pytest.raises(Refused, match="here: labels: row 1 has not as many as input_ids"):
        pack(odd, tokenizer, 2, "here")


def test_too_little_text_is_refused(tokenizer):
    with pytest.raises(Refused, match="here: got no text"):
        pack(Dataset.from_dict({"text": ["", ""]}), tokenizer, 4, "here")
    with pytest.raises(Refused, match="here: block_size: got 9, allowed: at most 4, the tokens in the data"):
        pack(Dataset.from_dict({"text": ["abc"]}), tokenizer, 9, "here")
    with pytest.raises(Refused, match="block_size: got 3, allowed: at most 2"):
        PackedBlocks(np.array([1, 2], np.int32), None, 3)


def test_a_tokenizer_without_end_token_is_refused():
    class Nothing:
        eos_token_id = None

    with pytest.raises(Refused, match="tokenizer: got no eos_token"):
        tokenize(Dataset.from_dict({"text": ["a"]}), Nothing())


@pytest.mark.parametrize("text", ["", "a", "ab\ncd\nef\n", "abcdefgh\nx", "\n\n\n\n\n\n", "ab\ncd\nno end"])
def test_pieces_are_the_text_and_end_at_line_ends(text):
    parts = list(pieces(text, limit=4))
    assert "".join(parts) == text
    assert all(part.endswith("\n") for part in parts[:-1]) and all(parts)
    assert all(len(part) <= 4 or "\n" not in part[3:-1] for part in parts[:-1])
