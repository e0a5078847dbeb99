# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""For tests that need several processes: run a function of a test file in each of them, inside one gloo group."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor


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
    running, outputs = [], [folder / f"output-{rank}" for rank in range(processes)]
    for rank in range(processes):
        command = [sys.executable, __file__, str(file), worker.__name__, str(rank), str(folder)]
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with outputs[rank].open("w") as output:
            running.append(subprocess.Popen(command, env=own, stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running) or time.monotonic() > end:
                break  # the others would wait for the one that is gone
            time.sleep(0.1)
    finally:
        codes = [process.poll() for process in running]
        for process in running:
            process.kill()
            process.wait()
    texts = "\n".join(f"process {rank}:\n{file.read_text()[-3000:]}" for rank, file in enumerate(outputs))
    assert codes == [0] * processes, f"exit codes {codes}\n{texts}"
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


def _main(file: str, name: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = getattr(module, name)(rank, Path(folder))
    (Path(folder) / f"result-{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        0
    )  # past the interpreter's teardown, in which gloo's own threads now and then abort a process that is done


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
