# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""For tests that need several processes: run a function of a test file in each of them, inside one gloo group; and what those of
data parallelism have in common."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from conftest import PRESETS, randomize_routing, tiny_config, tiny_qwen3_config
from torch.distributed.tensor import DTensor

from depthroute import DepthRouteForCausalLM


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CASES = {**{preset: (preset, {}) for preset in PRESETS}, "delta-block with experts": ("delta-block", EXPERTS)}
"""Preset and further fields of what `build` makes."""


def build(case: str) -> DepthRouteForCausalLM:
    """A model of four layers whose routing is far from its start, the same in every process; it is in training."""
    preset, fields = CASES[case]
    torch.manual_seed(0)
    model = DepthRouteForCausalLM(tiny_config(preset, base=tiny_qwen3_config(num_hidden_layers=4), **fields)).train()
    randomize_routing(model, scale=0.3)
    return model


def tokens() -> torch.Tensor:
    """[2 processes, 2, 9]."""
    return torch.randint(1, 97, (2, 2, 9), generator=torch.Generator().manual_seed(1))


def loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def run_together(worker: Callable[..., Any], folder: Path, processes: int = 2, timeout: float = 240) -> list[Any]:
    """Run `worker(rank, folder)` in each process, from the file that defines it.

    Args:
        worker: a function at the top of a test file. What it returns is written as JSON.
        folder: where the processes meet, and for the worker's own files.

    Returns:
        What each worker returned, by rank.

    Raises:
        AssertionError: a process failed, with the end of what all of them printed; the others are then stopped.
    """
    file = sys.modules[worker.__module__].__file__
    environment = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",  # asked for by accelerate, and not used: the processes have met already
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, str(file), worker.__name__, str(folder)]
    outputs = [folder / f"output-{rank}" for rank in range(processes)]
    with (folder / "output").open("w") as output:
        # a session of its own, with which the processes that it forks are stopped too
        parent = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            parent.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            code = parent.poll()
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
            parent.wait()
    texts = [f"{file.name}:\n{file.read_text()[-3000:]}" for file in (folder / "output", *outputs) if file.is_file()]
    assert code == 0, f"exit code {code}\n" + "\n".join(texts)
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be divided among processes, put together; all of them have to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_gaps(model, reference) -> dict[str, float]:
    """For each trainable parameter of `reference`, how far `model`'s gradient is from its own, of its largest entry.

    Gradients are compared, put together, parameter by parameter; one that is missing on one side alone is infinitely far.
    """
    gaps = {}
    for (name, expected), (other, found) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert other.removeprefix("module.") == name, (name, other)
        if expected.grad is None or found.grad is None:
            gaps[name] = 0.0 if expected.grad is found.grad else float("inf")
            continue
        difference = (whole(found.grad) - expected.grad).abs().max()
        gaps[name] = (difference / expected.grad.abs().max().clamp(min=1e-3)).item()
    return gaps


def _main(file: str, name: str, folder: Path) -> int:
    """Import once, which takes most of the time, and fork; 0 where all processes ended well, and the others stopped where one did
    not: they would wait for it."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    running = {_forked(getattr(module, name), rank, folder) for rank in range(int(os.environ["WORLD_SIZE"]))}
    failed = False
    while running:
        process, status = os.wait()
        running.discard(process)
        if status and not failed:
            failed = True
            for other in running:
                os.kill(other, signal.SIGKILL)
    return int(failed)


def _forked(worker: Callable[..., Any], rank: int, folder: Path) -> int:
    """The id of a new process in which `worker` runs as `rank` of the group."""
    if process := os.fork():
        return process
    code = 1
    try:
        output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
        )
        result = worker(rank, folder)
        (folder / f"result-{rank}.json").write_text(json.dumps(result))
        torch.distributed.barrier()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # past the interpreter's teardown, in which gloo's own threads now and then abort a process that is done
        os._exit(code)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
