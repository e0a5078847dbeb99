# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Two gigabytes are converted, and verified, in the memory of a shard and 500 MB. And how much there is to use."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import torch
from conversion_helpers import tiny_moe_config
from transformers import Qwen3MoeForCausalLM

import depthroute_conversion.memory as memory
import depthroute_conversion.verification as verification
from depthroute_conversion.experts import apart
from depthroute_conversion.headers import StoredTensor


BOUND = 500 * 10**6
"""Anonymous bytes above the idle process, besides the largest shard."""

MEASURED = textwrap.dedent(
    """
    import json, sys, threading
    import torch
    torch.set_num_threads(1)
    from depthroute import convert
    import depthroute_conversion  # what an idle process has loaded

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

    idle = peak = anonymous()
    done = threading.Event()

    def watch():
        global peak
        while not done.wait(0.02):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    report = convert(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
    done.set()
    watcher.join()
    print(json.dumps([peak - idle, report.verification.bitwise_equal]))
    """
)


@pytest.fixture(scope="module")
def two_gigabytes(tmp_path_factory) -> Path:
    """Sparse experts of zeros but for the last layer's, in shards of 100 MB where zeros are holes in the files: quick to make and to compute with, and
    read as any other bytes."""
    config = tiny_moe_config(
        vocab_size=4096, hidden_size=512, num_hidden_layers=21, num_experts=64, moe_intermediate_size=512, mlp_only_layers=[],
        initializer_range=0.02, dtype="bfloat16",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("large") / "source"
    folder.mkdir()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    shards, size = [[]], 0
    for key, tensor in apart(model.state_dict().items()):
        if size + tensor.nbytes > 10**8:
            shards.append([])
            size = 0
        shards[-1].append((key, tensor))
        size += tensor.nbytes
    places = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header, end = {}, 0
        for key, tensor in tensors:
            header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
            places[key] = name
            end += tensor.nbytes
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            start = stream.tell()
            for key, tensor in tensors:
                if "experts" not in key or key.startswith("model.layers.20."):
                    values = torch.ones(tensor.shape) if "norm" in key else torch.randn(tensor.shape) / 8
                    stream.seek(start + header[key]["data_offsets"][0])
                    stream.write(values.bfloat16().view(torch.uint8).numpy())
            stream.truncate(start + end)
    index = {"metadata": {"total_size": sum(t.nbytes for s in shards for _, t in s)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert 2 * 10**9 < index["metadata"]["total_size"] < 2.2 * 10**9 and len(shards) > 20
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="measured with Linux's /proc")
def test_two_gigabytes_in_the_memory_of_a_shard(two_gigabytes, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = json.dumps({"max_shard_size": "100MB"})
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(two_gigabytes), str(tmp_path / "out"), options],
        capture_output=True, text=True, timeout=250, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    peak, equal = json.loads(done.stdout.splitlines()[-1])
    largest = max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert largest <= 101 * 10**6 and len(list((tmp_path / "out").glob("*.safetensors"))) > 20
    assert equal
    print(f"peak {peak / 1e6:.0f} MB above idle")
    assert peak < largest + BOUND, f"{peak / 1e6:.0f} MB above idle"


def test_a_model_of_one_file_is_verified_whole_and_a_larger_one_layer_by_layer(monkeypatch):
    def stored(*files: str) -> dict[str, StoredTensor]:
        return {str(i): StoredTensor(Path(file), (1000,), torch.float32, 0) for i, file in enumerate(files)}

    assert verification.fits(stored("a", "a"), torch.float32)
    assert not verification.fits(stored("a", "b"), torch.float32)
    # in another type: where it takes half of the room, and may be in memory twice while it is cast
    assert verification.fits(stored("a", "b"), torch.bfloat16)
    monkeypatch.setattr(verification, "SPARE", 0)
    assert not verification.fits(stored("a", "b"), torch.bfloat16)
    assert verification.fits(stored("a"), torch.float32, {torch.float32})
    assert not verification.fits(stored("a"), torch.float32, {torch.float32, torch.bfloat16})  # the source's
    monkeypatch.setattr(verification, "available_memory", lambda: 15_999)
    assert not verification.fits(stored("a", "a"), torch.float32)


def test_a_containers_limit_counts(tmp_path, monkeypatch):
    free = psutil.virtual_memory().available
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_memory() == pytest.approx(free, rel=0.5)
    for name, text in {
        "memory.max": "1000000\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 5\ninactive_file 100000\nactive_file 50000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory.available_memory() == 450_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() == pytest.approx(free, rel=0.5)
