# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a weight file, an index and a recorded hash may say, and what is refused before anything is read or allocated."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from conversion_helpers import edit_weights
from safetensors.torch import load_file, save_file

from depthroute import convert
from depthroute.errors import Refused
from depthroute_conversion.hashes import recorded_hashes
from depthroute_conversion.headers import DTYPES, read_header
from depthroute_conversion.weights import (
    INDEX,
    is_finite,
    read_headers,
    read_range,
    read_tensor,
    size_note,
    weight_files,
)


def entry(shape: list, begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(file: Path, header, data: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return file


A, B = entry([2, 2], 0, 16), entry([4], 16, 32)

DAMAGED = {
    "overlap": ({"a": A, "b": entry([4], 12, 28)}, 28, "a and b overlap at byte"),
    "the same bytes twice": ({"a": A, "b": entry([4], 0, 16)}, 16, "a and b overlap at byte"),
    "a gap": ({"a": A, "b": entry([4], 20, 36)}, 36, "a and b leave a gap at byte"),
    "a gap before the first": ({"b": B}, 32, "the header and b leave a gap at byte"),
    "bytes behind the last": ({"a": A, "b": B}, 40, "and tensors up to byte"),
    "too few bytes": ({"a": A, "b": B}, 31, "tensors up to byte"),
    "a shape of another size": ({"a": entry([2, 3], 0, 16)}, 16, "a: got 16 bytes for shape [2, 3] of F32"),
    "a shape beyond any memory": ({"a": entry([2**62, 2**62], 0, 16)}, 16, "a: got 16 bytes for shape"),
    "a negative size": ({"a": entry([-2, -2], 0, 16)}, 16, "a: got shape [-2, -2]"),
    "a size that is no number": ({"a": entry([True, 4], 0, 16)}, 16, "a: got shape [True, 4]"),
    "offsets the wrong way round": ({"a": entry([0], 16, 0)}, 16, "a: got shape [0], data_offsets [16, 0]"),
    "one offset": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}}, 16, "a: got shape [4]"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [4]}}, 16, "a: got {'dtype'"),
    "an entry that is no object": ({"a": 3}, 0, "a: got 3, allowed: dtype, shape and data_offsets"),
    "a list": ([], 0, "its header is a list"),
    "metadata that is no table": ({"__metadata__": {"format": 3}, "a": A}, 16, "its metadata is no table of texts"),
    "a name twice": (b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2), 16, "its header is no JSON: 'a' is named twice"),
    "no JSON": (b"{", 0, "its header is no JSON"),
    "no UTF-8": (b'{"\xff": 1}', 0, "its header is no JSON"),
    "nested without end": (b'{"a":' + b"[" * 100_000, 0, "its header is no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused_by_name(case, tmp_path):
    header, data, message = DAMAGED[case]
    file = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(Refused) as refusal:
        read_header(file)
    text = str(refusal.value)
    assert text.startswith(f"{file}: no whole safetensors file (truncated or damaged): ") and message in text
    assert len(text) < 1000


@pytest.mark.parametrize("length", [2**63, 10**8 + 1, 9])
def test_a_header_longer_than_the_file_is_not_read(length, tmp_path):
    (tmp_path / "x").write_bytes(length.to_bytes(8, "little") + b"{}      ")
    with pytest.raises(Refused, match=rf"got 16 bytes, and a header of {length} bytes"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize(
    "dtype, size, message",
    [
        ("I8", 4, r"a: dtype: got I8, allowed: F64, F32, BF16, F16 \(unquantized weights\)"),
        ("F8_E4M3", 4, "a: dtype: got F8_E4M3"),
        ("F99", 4, "a: dtype: got 'F99', allowed: F64, F32, BF16, F16"),
    ],
)
def test_other_types_are_refused(dtype, size, message, tmp_path):
    file = write(tmp_path / "x", {"a": entry([4], 0, size, dtype)}, size)
    with pytest.raises(Refused, match=message):
        read_header(file)


def test_what_safetensors_writes_is_read_tensor_by_tensor(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.tensor(2.5, dtype=torch.float64),
        "d": torch.zeros(0, 4, dtype=torch.float16),
        "e": torch.randn(2, 2, 2).half(),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    stored = read_header(tmp_path / "x.safetensors")
    assert set(stored) == set(tensors) and {item.dtype for item in stored.values()} == set(DTYPES.values())
    for key, tensor in tensors.items():
        got = read_tensor(key, stored[key])
        assert got.dtype == tensor.dtype and torch.equal(got, tensor)
        # memory of its own: arithmetic may depend on how it is aligned
        assert got.data_ptr() % 64 == 0 or got.numel() == 0
    assert torch.equal(read_range("a", stored["a"], 4, 3), tensors["a"].flatten()[4:7])


def test_a_file_that_becomes_shorter_is_noticed(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", 300)
    with pytest.raises(Refused, match="x.safetensors: a: ends at byte 300, it was longer when it was opened"):
        read_tensor("a", stored["a"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_one_value_that_is_not_finite_is_found(value, dtype):
    tensor = torch.randn(5, 1001).to(dtype)
    assert is_finite(tensor) and is_finite(tensor[:0])
    tensor[3, 700] = value
    assert not is_finite(tensor)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(4)}, folder / "one.safetensors")
    save_file({"b": torch.ones(4)}, folder / "two.safetensors")
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def write_index(folder: Path, places, **metadata) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": places}))


INDEXES = {
    "a shard that holds more": ({"a": "one.safetensors"}, None),
    "a key of another shard": ({"a": "two.safetensors", "b": "two.safetensors"}, "two.safetensors: .* names 1 keys that it does not hold: a"),
    "a parent": ({"a": "one.safetensors", "b": "../two.safetensors"}, r"got \.\./two.safetensors, allowed: shards in the folder itself"),
    "an absolute path": ({"a": "/etc/passwd"}, "got /etc/passwd, allowed: shards in the folder itself"),
    "a shard that is missing": ({"a": "three.safetensors"}, "missing shards, .*three.safetensors"),
    "a number": ({"a": 3}, "allowed: a readable index with a weight_map"),
    "nothing": ({}, "allowed: a readable index with a weight_map"),
}  # fmt: skip


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_that_does_not_fit_is_refused(case, sharded):
    places, message = INDEXES[case]
    write_index(sharded, places)
    if message is None:
        (sharded / "two.safetensors").unlink()
        save_file({"a": torch.ones(4), "c": torch.ones(1)}, sharded / "one.safetensors")
        message = "one.safetensors: holds 1 keys that .* does not name: c"
    with pytest.raises(Refused, match=message):
        read_headers(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded):
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, sharded / "two.safetensors")
    with pytest.raises(Refused, match="two.safetensors: a: also in one.safetensors; allowed: one shard"):
        read_headers(sharded)


def test_an_index_that_names_a_key_twice_is_refused(sharded):
    text = (sharded / INDEX).read_text()
    (sharded / INDEX).write_text(text.replace('{"a"', '{"a": "two.safetensors", "a"'))
    with pytest.raises(Refused, match="'a' is named twice"):
        read_headers(sharded)


def test_a_link_out_of_the_folder_is_refused(sharded, tmp_path):
    (sharded / "two.safetensors").rename(tmp_path / "elsewhere")
    (sharded / "two.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Refused, match="two.safetensors: links to .*elsewhere, outside the folder"):
        read_headers(sharded)


def test_a_link_inside_the_folder_is_followed(sharded):
    (sharded / "two.safetensors").rename(sharded / "data")
    (sharded / "two.safetensors").symlink_to("data")
    assert set(read_headers(sharded)) == {"a", "b"}


def test_another_total_size_is_noted(sharded):
    assert size_note(sharded, read_headers(sharded)) is None
    for given, note in ((32, None), (31, "total_size: got 31, its tensors have 32 bytes"), ("x", "got 'x'")):
        write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors"}, total_size=given)
        found = size_note(sharded, read_headers(sharded))
        assert found is None if note is None else note in found


# -- recorded hashes --------------------------------------------------------------------------------------------------


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


RECORDS = {
    "sha256sum": lambda f: (f.parent / "SHA256SUMS").write_text(f"{'0' * 64}  other\n{sha256(f)}  {f.name}\n"),
    "binary": lambda f: (f.parent / "SHA256SUMS").write_text(f"{sha256(f).upper()} *./{f.name}\n"),
    "bsd": lambda f: (f.parent / "sha256sums.txt").write_text(f"SHA256 ({f.name}) = {sha256(f)}\n"),
    "beside": lambda f: f.with_name(f.name + ".sha256").write_text(f"{sha256(f)}\n"),
}


@pytest.mark.parametrize("form", RECORDS)
def test_a_weight_that_is_not_what_was_recorded_is_refused(form, copy_of, tmp_path):
    source = copy_of("qwen3")
    file = source / "model.safetensors"
    RECORDS[form](file)
    assert recorded_hashes(weight_files(source)) == {file: sha256(file)}
    convert(source, tmp_path / "out", verify=False)
    expected = sha256(file)
    edit_weights(source, lambda w: w["model.norm.weight"].mul_(1.5))
    with pytest.raises(Refused, match=rf"model.safetensors: sha256: got {sha256(file)}, recorded {expected}"):
        convert(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_records_that_disagree_and_records_without_a_hash_are_refused(copy_of):
    source = copy_of("qwen3")
    file = source / "model.safetensors"
    RECORDS["bsd"](file)
    (source / "model.safetensors.sha256").write_text("0" * 64)
    with pytest.raises(Refused, match=r"recorded differently in model.safetensors.sha256 and sha256sums.txt"):
        recorded_hashes([file])
    (source / "model.safetensors.sha256").write_text("soon")
    with pytest.raises(Refused, match="model.safetensors.sha256: got 0 hashes, allowed: one"):
        recorded_hashes([file])


def test_the_hubs_cache_records_the_hash_in_a_blobs_name(originals, tmp_path):
    cache = tmp_path / "models--owner--name"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in originals["qwen3"].iterdir():
        blob = blobs / sha256(file)
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    report = convert(snapshot, tmp_path / "out")
    assert report.verification.bitwise_equal
    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(Refused, match=f"model.safetensors: sha256: got .*, recorded {blob.name}"):
        convert(snapshot, tmp_path / "other")


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3-bf16", "tied"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_by_file_and_key(name, value, copy_of, tmp_path, run_cli):
    source = copy_of(name)
    edit_weights(source, lambda w: w["model.layers.3.mlp.up_proj.weight"].view(-1)[7:8].fill_(value))
    code, _, err = run_cli("convert", source, tmp_path / "out")
    expected = f"{source}/model.safetensors: model.layers.3.mlp.up_proj.weight: got values that are NaN or infinite"
    assert code == 2 and expected in err.splitlines()[-1]
    assert os.listdir(tmp_path) == [source.name]


def test_a_weight_file_that_cannot_be_read_is_named(copy_of, tmp_path, run_cli, monkeypatch):
    source = copy_of("qwen3")
    opened = Path.open

    def closed(self, *rest, **options):
        if self.name == "model.safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *rest, **options)

    monkeypatch.setattr(Path, "open", closed)
    code, _, err = run_cli("convert", source, tmp_path / "out")
    assert code == 2 and f"{source}/model.safetensors: cannot be read: Permission denied" in err.splitlines()[-1]


def test_a_cast_is_that_of_torch_for_tensors_larger_than_a_piece(copy_of, tmp_path, monkeypatch):
    monkeypatch.setattr("depthroute_conversion.weights.CHUNK", 100)
    source = copy_of("qwen3")
    report = convert(source, tmp_path / "out", dtype="bfloat16", max_shard_size="20kB")
    assert report.verification.bitwise_equal
    expected = load_file(source / "model.safetensors")
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    written = {key: value for f in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(f).items()}
    assert set(index["weight_map"]) == set(written)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in written.values())
    assert all(torch.equal(written[key], tensor.bfloat16()) for key, tensor in expected.items())
    assert report.copied_parameters + report.added_parameters == index["metadata"]["total_parameters"]


def test_a_shard_size_that_is_none(originals, tmp_path, run_cli):
    code, _, err = run_cli("convert", originals["qwen3"], tmp_path / "out", "--max-shard-size", "some")
    assert code == 2 and "max_shard_size: got 'some', allowed: bytes, or such as 5GB or 500MB" in err.splitlines()[-1]
