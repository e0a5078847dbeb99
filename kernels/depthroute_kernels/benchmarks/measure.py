# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Time, bytes saved for backward, peak memory and operations of one piece of work, and what memory itself can do, on a CPU or a GPU."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


Work = Callable[[], Any]


def seconds(work: Work, device: str = "cpu") -> float:
    """How long `work` takes: on a GPU between two events of the stream, after all that was started before has ended."""
    if torch.device(device).type != "cuda":
        begin = perf_counter()
        work()
        return perf_counter() - begin
    torch.cuda.synchronize(device)
    with torch.cuda.device(torch.device(device)):
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        work()
        end_event.record()
    end_event.synchronize()
    return begin_event.elapsed_time(end_event) / 1e3


def interleaved_times(
    systems: Mapping[str, Work], repeats: int, warmup: int, device: str = "cpu"
) -> Iterator[dict[str, float]]:
    """Seconds of each system, round by round, `repeats` rounds after `warmup` unmeasured ones. Each round runs every system
    once and begins with another one, so that slow drifts of the machine, and places in the order, fall on all alike."""
    names = list(systems)
    for index in range(warmup + repeats):
        start = index % len(names)
        times = {name: seconds(systems[name], device) for name in names[start:] + names[:start]}
        if index >= warmup:
            yield times


def quartiles(values: list[float]) -> dict[str, float]:
    """Median, first and third quartile of one value or more."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": median, "q1": low, "q3": high}


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps for backward: each storage once, the model's own parameters and buffers left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # the reference keeps an address from being used again

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(work: Work, device: str = "cpu") -> int:
    """Largest number of bytes allocated at one time by `work`, beyond what there was before, on the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # torch's profiler would announce itself on standard error
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    now = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(work: Work) -> int:
    """How many of torch's operations `work` calls, views included: what it costs where each has little to do."""
    with _Counter() as counter:
        work()
    return counter.count


def copying(nbytes: int, device: str) -> Work:
    """The work of copying `nbytes` from one buffer into another: it moves twice as many."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)
