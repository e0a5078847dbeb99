# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What both benchmarks' settings have in common: checks, and the command line that repeats them."""

from dataclasses import dataclass, fields
from typing import Any

import torch

from depthroute import PRESETS
from depthroute.errors import Refused
from depthroute.modeling.configuration_depthroute import get_preset

from ..dispatch import BACKENDS, backend_for
from .machine import check_device


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BACKEND_NAMES = ("auto", "reference", *BACKENDS)


def implementation_of(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of what computes depth reads under a `depth_backend`.

    Raises:
        ValueError: one is asked for by name and cannot run here.
    """
    if backend == "reference":
        return backend
    chosen = backend_for(backend, device, dtype)
    return next((name for name, module in BACKENDS.items() if module is chosen), "reference")


def check_choices(name: str, got: tuple[Any, ...], allowed: tuple[str, ...]) -> None:
    """Raises:
    Refused: nothing, or something that is not allowed.
    """
    unknown = [one for one in got if one not in allowed]
    if unknown or not got:
        shown = repr(unknown[0]) if unknown else "none"
        raise Refused(f"{name}: got {shown}, allowed: {', '.join(allowed)}")


def check_numbers(settings: Any, zero: tuple[str, ...] = ("warmup", "seed")) -> None:
    """Raises:
    Refused: an int field, or a number of a field that holds several, below 1 (0 for the fields in `zero`).
    """
    for item in fields(settings):
        value, least = getattr(settings, item.name), 0 if item.name in zero else 1
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool) and number < least:
                raise Refused(f"{item.name}: got {number}, allowed: a number ≥ {least}")


def command_line(start: str, settings: Any) -> str:
    """`start` and an option for every field that is not at its default."""
    parts = [start]
    for item in fields(settings):
        value = getattr(settings, item.name)
        if value != item.default:
            option = "--" + item.name.replace("_", "-")
            text = ",".join(map(str, value)) if isinstance(value, tuple) else value
            parts.append(option if value is True else f"{option} {text}")
    return " ".join(parts)


@dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured of models; the defaults are the project's reference configuration.

    Attributes:
        presets: names of `depthroute.PRESETS`; `standard` shows how much two equal models differ.
        backend: values of `depth_backend`. Each preset with depth reads is measured with each of them.
        layers, width, heads, kv_heads, head_dim, intermediate, vocab: sizes of the model.
        block_size: layers per block for presets that always have blocks; None: ceil(L/8).
        depth_heads: H of the reads, for presets with depth reads.
        anchored: measure anchored reads.
        checkpointing: measure train steps with gradient checkpointing too.
        batch, tokens: B and T of a step; also the cached tokens before decoding.
        dtype: of weights and activations.
        device: cpu, cuda or cuda:N.
        threads: of torch.
        repeats, warmup: rounds that count, and rounds before them.
        seed: of weights and token ids.
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    backend: tuple[str, ...] = ("auto",)
    layers: int = 12
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    intermediate: int = 768
    vocab: int = 1024
    block_size: int | None = None
    depth_heads: int = 1
    anchored: bool = False
    checkpointing: bool = False
    batch: int = 2
    tokens: int = 256
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    repeats: int = 15
    warmup: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.presets:
            raise Refused(f"presets: got none, allowed: {', '.join(PRESETS)}")
        for name in self.presets:
            try:
                get_preset(name)
            except ValueError as error:
                raise Refused(str(error)) from error
        check_choices("backend", self.backend, BACKEND_NAMES)
        check_choices("dtype", (self.dtype,), tuple(DTYPES))
        check_numbers(self)
        check_device(self.device)
        if self.heads % self.kv_heads:
            raise Refused(f"kv_heads: got {self.kv_heads}, allowed: a divisor of heads = {self.heads}")

    def command(self) -> str:
        """The command line that repeats this."""
        return command_line("depthroute bench", self)
