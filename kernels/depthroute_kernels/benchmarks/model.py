# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute bench`: whole models of every preset beside stock Qwen3, on the same weights, in one interleaved run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from depthroute import PRESETS, DepthRouteConfig, DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.modeling.compat import CACHE_NAME
from depthroute.modeling.configuration_depthroute import MEANT_FOR

from .backend_parity import check_backend
from .machine import describe_machine
from .measure import interleaved_times, operations, peak_bytes, quartiles, saved_bytes
from .parity import check_anchored_start, check_reads
from .settings import DTYPES, BenchmarkSettings, implementation_of


STOCK = "qwen3"
DECODED_TOKENS = 8
CHECKED_TOKENS = (2, 256)
"""Sequences, and tokens of each, that parity is checked on at most: it is checked in float64."""


@dataclass
class Case:
    """One system under measurement; `implementation` computes its depth reads ("" where it has none)."""

    name: str
    model: Any
    token_ids: Tensor
    preset: str = ""
    implementation: str = ""
    cache: DynamicCache = field(init=False)

    def forward(self) -> Tensor:
        return self.model(input_ids=self.token_ids, labels=self.token_ids, use_cache=False).loss

    def train_step(self) -> None:
        """Forward and backward; what the optimizer does afterwards is the same for all."""
        self.model.zero_grad(set_to_none=True)
        self.forward().backward()

    def infer(self) -> None:
        with torch.no_grad():
            self.model(input_ids=self.token_ids, use_cache=False)

    def fill_cache(self) -> None:
        self.cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(input_ids=self.token_ids, use_cache=True, **{CACHE_NAME: self.cache})

    def decode(self) -> None:
        """`DECODED_TOKENS` single steps behind the cached tokens, which are all that is left in the cache afterwards."""
        for index in range(DECODED_TOKENS):
            self.step(index)
        self.cache.crop(-DECODED_TOKENS)

    def step(self, index: int = 0) -> None:
        """One more token behind the cached ones."""
        with torch.no_grad():
            column = self.token_ids[:, index % self.token_ids.shape[1], None]
            self.model(input_ids=column, use_cache=True, **{CACHE_NAME: self.cache})


def run_benchmark(settings: BenchmarkSettings, progress: bool = False) -> dict[str, Any]:
    """Measure every preset, with every backend asked for, and stock Qwen3 on the same weights and tokens.

    Before anything is timed, each preset's anchored form must equal stock bit for bit (mHC nearly), its reads and writes the
    equations in float64, and the whole model with the measured backend the same model with the reference.

    Args:
        settings: what to measure.
        progress: show progress bars on standard error.

    Returns:
        `command`, `settings`, `machine` and `systems`: by name, for `train_step`, `forward` and `decode_token` the median and
        quartiles in milliseconds (`ms`) and of the ratios to stock of the same round (`ratio`); `decode_operations` (calls of
        torch's operations for one decoded token, `count`); `saved_bytes` (kept for
        backward, parameters not counted) and `peak_bytes` (of one train step, beyond weights), each with `ratio`. With
        checkpointing, `train_step`, `saved_bytes` and `peak_bytes` once more under names that end in `_checkpointed`: ratios
        to stock with checkpointing.

    Raises:
        CheckFailed: a case computes something else; nothing is reported.
        Refused: a setting that is not accepted, or a backend that cannot run here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        return _run(settings, progress)
    finally:
        torch.set_num_threads(threads)


def _run(settings: BenchmarkSettings, progress: bool) -> dict[str, Any]:
    load = os.getloadavg() if hasattr(os, "getloadavg") else None
    cases = build_cases(settings)
    stock = cases[STOCK]
    differences = check_parity(cases, settings)
    for case in cases.values():
        case.fill_cache()

    systems: dict[str, dict[str, Any]] = {name: {} for name in cases}
    console = Console(stderr=True)

    def time(work: str, run: Callable[[Case], None], key: str) -> None:
        runs = {name: (lambda case=case: run(case)) for name, case in cases.items()}
        rounds = list(
            track(
                interleaved_times(runs, settings.repeats, settings.warmup, settings.device),
                description=f"{key} x {len(runs)} systems",
                total=settings.repeats,
                console=console,
                disable=not progress,
            )
        )
        unit = 1e3 / (DECODED_TOKENS if work == "decode_token" else 1)
        for name, system in systems.items():
            system[key] = {
                "ms": quartiles([times[name] * unit for times in rounds]),
                "ratio": quartiles([times[name] / times[STOCK] for times in rounds]),
            }

    def count_memory(suffix: str = "") -> None:
        for name, case in cases.items():
            case.model.zero_grad(set_to_none=True)
            systems[name]["saved_bytes" + suffix] = {"bytes": saved_bytes(case.model, case.forward)}
            case.model.zero_grad(set_to_none=True)
            systems[name]["peak_bytes" + suffix] = {"bytes": peak_bytes(case.train_step, settings.device)}
            case.model.zero_grad(set_to_none=True)  # the next system's peak must not find these
        for key in ("saved_bytes" + suffix, "peak_bytes" + suffix):
            for system in systems.values():
                system[key]["ratio"] = system[key]["bytes"] / systems[STOCK][key]["bytes"]

    time("train_step", Case.train_step, "train_step")
    time("forward", Case.infer, "forward")
    time("decode_token", Case.decode, "decode_token")
    for name, case in cases.items():
        count = operations(case.step)
        case.cache.crop(-1)
        systems[name]["decode_operations"] = {"count": count}
        systems[name]["decode_operations"]["ratio"] = count / systems[STOCK]["decode_operations"]["count"]
    count_memory()
    if settings.checkpointing:
        with checkpointing(cases):
            time("train_step", Case.train_step, "train_step_checkpointed")
            count_memory("_checkpointed")
    for name, system in systems.items():
        case = cases[name]
        system["preset"], system["implementation"] = case.preset, case.implementation
        system["routing_parameters"] = 0 if name == STOCK else _count(case.model.routing_parameters())
        system |= differences.get(name, {"largest_read_difference": 0.0, "largest_backend_difference": 0.0})
    return {
        "command": settings.command(),
        "settings": {**asdict(settings), "presets": list(settings.presets), "backend": list(settings.backend)},
        "parameters": sum(parameter.numel() for parameter in stock.model.parameters()),
        "machine": {**describe_machine(settings.device), "load_average_before": load[0] if load else None},
        "systems": systems,
    }


@contextmanager
def checkpointing(cases: dict[str, Case]) -> Iterator[None]:
    """Gradient checkpointing of every layer, in every model."""
    # what transformers 5.24 calls activation checkpointing was gradient checkpointing before, and warns under that name
    kind = "activation" if hasattr(Qwen3ForCausalLM, "activation_checkpointing_enable") else "gradient"
    for case in cases.values():
        options = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(case.model, f"{kind}_checkpointing_enable")(**options)
    try:
        yield
    finally:
        for case in cases.values():
            getattr(case.model, f"{kind}_checkpointing_disable")()


def _count(parameters: dict[str, nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters.values())


def build_cases(settings: BenchmarkSettings) -> dict[str, Case]:
    """Stock Qwen3 and every preset on its weights, with every backend; the routing is random, as after training.

    Raises:
        Refused: sizes that a preset does not accept, or a backend that cannot run here.
    """
    torch.manual_seed(settings.seed)
    dtype, device = DTYPES[settings.dtype], torch.device(settings.device)
    config = Qwen3Config(
        vocab_size=settings.vocab,
        hidden_size=settings.width,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=max(1024, settings.tokens + DECODED_TOKENS),
    )
    with device:  # where filling a large model with random numbers takes no time
        stock = Qwen3ForCausalLM(config).to(dtype)
    token_ids = torch.randint(settings.vocab, (settings.batch, settings.tokens)).to(device)
    cases = {STOCK: Case(STOCK, stock, token_ids)}
    for preset in dict.fromkeys(settings.presets):
        routed = PRESETS[preset].fields["residual_type"] in MEANT_FOR["depth_num_heads"]
        trained: dict[str, Tensor] = {}
        for backend in dict.fromkeys(settings.backend if routed else ("auto",)):
            implementation = ""
            if routed:
                try:
                    implementation = implementation_of(backend, device, dtype)
                except ValueError as error:
                    raise Refused(str(error)) from error
            model = graft(stock, preset_config(preset, settings, config, settings.anchored, backend))
            with torch.no_grad():
                for key, parameter in model.routing_parameters().items():
                    if key.endswith("query"):
                        if key not in trained:
                            trained[key] = torch.randn(parameter.shape) * settings.width**-0.5
                        parameter.copy_(trained[key])
            name = preset if backend == "auto" else f"{preset} ({backend})"
            cases[name] = Case(name, model, token_ids, preset, implementation)
    return cases


def preset_config(
    name: str, settings: BenchmarkSettings, base: Qwen3Config, anchored: bool, backend: str = "auto"
) -> DepthRouteConfig:
    """The preset on the stock model's sizes."""
    options: dict[str, Any] = {"depth_backend": backend}
    if name != "standard":
        options["depth_anchored"] = anchored
    if PRESETS[name].fields["residual_type"] in MEANT_FOR["depth_num_heads"]:
        options["depth_num_heads"] = settings.depth_heads
    if PRESETS[name].blocks == "always":
        options["depth_block_size"] = settings.block_size
    try:
        return DepthRouteConfig.from_preset(name, base=base, **options)
    except ValueError as error:
        raise Refused(f"{name}: {error}") from error


def graft(stock: Qwen3ForCausalLM, config: DepthRouteConfig) -> DepthRouteForCausalLM:
    """A model of `config` with the stock model's weights, in its dtype, where it is; the routing at its initial values."""
    with stock.device:
        model = DepthRouteForCausalLM(config).to(stock.dtype)
    model.load_state_dict(stock.state_dict(), strict=False)
    return model


def check_parity(cases: dict[str, Case], settings: BenchmarkSettings) -> dict[str, dict[str, float]]:
    """Largest differences of each system's reads from float64, and of the whole model from the reference, after everything
    that must hold was seen to hold.

    Raises:
        CheckFailed: something does not.
    """
    stock, differences = cases[STOCK], {}
    dtype = DTYPES[settings.dtype]
    token_ids = stock.token_ids[: CHECKED_TOKENS[0], : CHECKED_TOKENS[1]]
    for name, case in cases.items():
        if name == STOCK:
            continue
        backend = case.model.config.depth_backend
        config = preset_config(case.preset, settings, stock.model.config, anchored=True, backend=backend)
        check_anchored_start(graft(stock.model, config), stock.model, token_ids, name)
        if case.preset != "standard":
            reads = check_reads(case.model.config, token_ids, dtype, name)
            whole = 0.0
            if case.implementation not in ("", "reference"):
                whole = check_backend(case.model, token_ids, name)
            differences[name] = {"largest_read_difference": reads, "largest_backend_difference": whole}
    return differences
