# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Two hundred random corruptions of a valid folder: a conversion refuses with one line, or writes exactly what the folder now
says. Where hashes are recorded, a changed file is always refused."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import tiny_qwen3_config
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from depthroute import DepthRouteConfig, convert
from depthroute.errors import CheckFailed, Refused


SEEDS = range(8)
EACH = 25
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> Path:
    """Two layers in several shards."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(tiny_qwen3_config(num_hidden_layers=2, layer_types=None))
    folder = tmp_path_factory.mktemp("valid") / "source"
    model.save_pretrained(folder, max_shard_size="20kB")
    assert len(shards(folder)) > 3
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def hashes_of(folder: Path) -> dict[str, str]:
    files = [*shards(folder), *folder.glob("*.json")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def header_length(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def flip(data: bytes, position: int, rng: random.Random) -> bytes:
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


def flip_in_header(folder: Path, rng: random.Random) -> None:
    file = rng.choice(shards(folder))
    data = file.read_bytes()
    file.write_bytes(flip(data, rng.randrange(8 + header_length(data)), rng))


def flip_in_data(folder: Path, rng: random.Random) -> None:
    file = rng.choice(shards(folder))
    data = file.read_bytes()
    file.write_bytes(flip(data, rng.randrange(8 + header_length(data), len(data)), rng))


def truncate(folder: Path, rng: random.Random) -> None:
    file = rng.choice(shards(folder))
    data = file.read_bytes()
    file.write_bytes(data[: rng.choice([0, 3, 8, rng.randrange(len(data)), len(data) - 1])])


def lengthen(folder: Path, rng: random.Random) -> None:
    with rng.choice(shards(folder)).open("ab") as stream:
        stream.write(rng.randbytes(rng.choice([1, 8, 4096])))


def swap_shards(folder: Path, rng: random.Random) -> None:
    one, other = rng.sample(shards(folder), 2)
    one.rename(folder / "aside")
    other.rename(one)
    (folder / "aside").rename(other)


def copy_a_shard_over_another(folder: Path, rng: random.Random) -> None:
    one, other = rng.sample(shards(folder), 2)
    shutil.copyfile(one, other)


def edit_header(folder: Path, rng: random.Random) -> None:
    """A well-formed header that says something else."""
    file = rng.choice(shards(folder))
    data = file.read_bytes()
    end = 8 + header_length(data)
    entries = json.loads(data[8:end])
    keys = [key for key in entries if key != "__metadata__"]
    key = rng.choice(keys)
    entry = entries[key]
    change = rng.choice(["dtype", "shape", "shift", "grow", "alias", "drop", "rename"])
    if change == "dtype":
        entry["dtype"] = rng.choice(["F16", "I32", "F64", "F8_E4M3", "X9", "U32"])
    elif change == "shape":
        entry["shape"] = rng.choice(
            [entry["shape"][::-1], [*entry["shape"], 1], [2**62, 2**62], [-1, *entry["shape"][1:]], []]
        )
    elif change == "shift":
        entry["data_offsets"] = [offset + rng.choice([4, -4, 1 << 40]) for offset in entry["data_offsets"]]
    elif change == "grow":
        entry["data_offsets"][1] += 4
    elif change == "alias":
        entry["data_offsets"] = entries[rng.choice(keys)]["data_offsets"]
    elif change == "drop":
        del entries[key]
    else:
        entries[rng.choice(["model.extra", key + ".x", rng.choice(keys)])] = entries.pop(key)
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def edit_index(folder: Path, rng: random.Random) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    places = index["weight_map"]
    key = rng.choice(list(places))
    change = rng.choice(["move", "drop", "add", "outside", "number", "size", "twice", "flip"])
    if change == "move":
        places[key] = rng.choice(list(places.values()))
    elif change == "drop":
        del places[key]
    elif change == "add":
        places["model.extra.weight"] = places[key]
    elif change == "outside":
        places[key] = rng.choice(["../x.safetensors", "/etc/passwd", "", ".", "..", "a/b", "\0"])
    elif change == "number":
        places[key] = rng.choice([3, None, [], {}])
    elif change == "size":
        index["metadata"] = rng.choice([{"total_size": 7}, {}, None, 3, {"total_size": "x"}])
    text = json.dumps(index)
    if change == "twice":
        text = text.replace('"weight_map": {', f'"weight_map": {{"{key}": "{rng.choice(list(places.values()))}", ')
    data = text.encode()
    path.write_bytes(flip(data, rng.randrange(len(data)), rng) if change == "flip" else data)


def edit_config(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    data = path.read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(flip(data, rng.randrange(len(data)), rng))
        return
    entries = json.loads(data)
    name = rng.choice(sorted(entries))
    value = entries[name]
    other = [None, "x", -1, 0, 1e9, [], {}, [3]] + ([value + 1, value * 2] if isinstance(value, (int, float)) else [])
    entries[name] = rng.choice(other)
    path.write_text(json.dumps(entries))


CORRUPTIONS = [
    flip_in_header,
    flip_in_data,
    truncate,
    lengthen,
    swap_shards,
    copy_a_shard_over_another,
    edit_header,
    edit_index,
    edit_config,
]


def says(folder: Path) -> dict[str, torch.Tensor]:
    """What a folder says, by safetensors alone; `convert` has no part in it."""
    found = {}
    for name in sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values())):
        with safe_open(folder / name, framework="pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys()}
    return found


def check_output(out: Path, source: Path) -> None:
    with safe_open(out / "model.safetensors", framework="pt") as tensors:
        written = {key: tensors.get_tensor(key) for key in tensors.keys()}
    expected = says(source)
    for key, tensor in expected.items():
        assert written[key].dtype == tensor.dtype and written[key].shape == tensor.shape, key
        assert torch.equal(written[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert all("_read." in key for key in set(written) - set(expected))
    config, stock = DepthRouteConfig.from_pretrained(out), Qwen3Config.from_pretrained(source)
    left = {"architectures", "model_type", "dtype", "transformers_version", "auto_map"}
    for name, value in stock.to_dict().items():
        if name not in left:
            assert config.to_dict()[name] == value, name


def refusal_of(source: Path, out: Path, verify: bool) -> str | None:
    """Convert; the message where that is refused, or where it was found that the configuration leaves nothing to route. Anything
    else that is raised is a failure."""
    try:
        convert(source, out, block_size=1, verify=verify)
    except Refused as error:
        return str(error)
    except CheckFailed as error:
        return f"{source.name}: {error}" if "negative control" in str(error) else pytest.fail(str(error))
    return None


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, int]]:
    found = {"refused": 0, "converted": 0}
    yield found
    # corruptions that are always refused, or never, would test one half only
    assert sum(found.values()) != len(SEEDS) * EACH or min(found.values()) > 20, found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_corrupted_folder_is_refused_or_converted_as_it_is(seed, valid, outcomes, tmp_path):
    for number in range(EACH):
        rng = random.Random(1000 * seed + number)
        corrupt = CORRUPTIONS[(EACH * seed + number) % len(CORRUPTIONS)]
        recorded = rng.random() < 0.3
        source, out = tmp_path / f"source-{number}", tmp_path / f"out-{number}"
        shutil.copytree(valid, source)
        hashes = hashes_of(source)
        if recorded:
            (source / "SHA256SUMS").write_text("".join(f"{value}  {name}\n" for name, value in hashes.items()))
        corrupt(source, rng)
        what = f"{corrupt.__name__}, seed {1000 * seed + number}"
        # weights are compared below, by other means; what a configuration does is seen where the model computes
        refusal = refusal_of(source, out, verify=corrupt is edit_config)
        outcomes["converted" if refusal is None else "refused"] += 1
        if refusal is not None:
            assert len(refusal.splitlines()) == 1, what
            assert source.name in refusal, what  # which file it is
            assert sorted(os.listdir(tmp_path)) == [source.name], what
        else:
            check_output(out, source)
            assert not recorded or hashes_of(source) == hashes, what
            shutil.rmtree(out)
        shutil.rmtree(source)
