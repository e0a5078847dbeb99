# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Time, bytes saved for backward and peak memory of one piece of work on the CPU."""

import os
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


Work = Callable[[], Any]


def interleaved_times(systems: dict[str, Work], repeats: int, warmup: int) -> Iterator[dict[str, float]]:
    """Seconds of each system, round by round, `repeats` rounds after `warmup` unmeasured ones. Each round runs every system
    once and begins with another one, so that slow drifts of the machine, and places in the order, fall on all alike."""
    names = list(systems)
    for index in range(warmup + repeats):
        times = {}
        start = index % len(names)
        for name in names[start:] + names[:start]:
            begin = perf_counter()
            systems[name]()
            times[name] = perf_counter() - begin
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


def peak_bytes(work: Work) -> int:
    """Largest number of bytes allocated at one time by `work`, beyond what there was before, on the CPU."""
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
