# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute bench`: whole models of every preset beside stock Qwen3, on the same weights, in one interleaved run."""

import os
import platform
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import depthroute
from depthroute import PRESETS, DepthRouteConfig, DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.modeling.compat import CACHE_NAME
from depthroute.modeling.configuration_depthroute import MEANT_FOR, get_preset

from .measure import Work, interleaved_times, peak_bytes, quartiles, saved_bytes
from .parity import check_anchored_start, check_reads


STOCK = "qwen3"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
DECODED_TOKENS = 8


@dataclass(frozen=True)
class BenchmarkSettings:
    """What is measured; the defaults are the project's reference configuration.

    Attributes:
        presets: names of `depthroute.PRESETS`; `standard` shows how much two equal models differ.
        layers, width, heads, kv_heads, head_dim, intermediate, vocab: sizes of the model.
        block_size: layers per block for presets that always have blocks; None: ceil(L/8).
        depth_heads: H of the reads, for presets with depth reads.
        anchored: measure anchored reads.
        batch, tokens: B and T of a step; also the cached tokens before decoding.
        dtype: of weights and activations.
        threads: of torch.
        repeats, warmup: rounds that count, and rounds before them.
        seed: of weights and token ids.
    """

    presets: tuple[str, ...] = tuple(PRESETS)
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
    batch: int = 2
    tokens: int = 256
    dtype: str = "float32"
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
        if self.dtype not in DTYPES:
            raise Refused(f"dtype: got {self.dtype!r}, allowed: {', '.join(DTYPES)}")
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in ("warmup", "seed") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise Refused(f"{item.name}: got {value}, allowed: a number ≥ {least}")
        if self.heads % self.kv_heads:
            raise Refused(f"kv_heads: got {self.kv_heads}, allowed: a divisor of heads = {self.heads}")

    def command(self) -> str:
        """The command line that repeats this."""
        parts = ["depthroute bench"]
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default:
                option = "--" + item.name.replace("_", "-")
                text = ",".join(value) if isinstance(value, tuple) else value
                parts.append(option if value is True else f"{option} {text}")
        return " ".join(parts)


@dataclass
class Case:
    """One system under measurement."""

    name: str
    model: Any
    token_ids: Tensor
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
        with torch.no_grad():
            for index in range(DECODED_TOKENS):
                column = self.token_ids[:, index % self.token_ids.shape[1], None]
                self.model(input_ids=column, use_cache=True, **{CACHE_NAME: self.cache})
        self.cache.crop(-DECODED_TOKENS)


def run_benchmark(settings: BenchmarkSettings, progress: bool = False) -> dict[str, Any]:
    """Measure every preset and stock Qwen3 on the same weights and tokens.

    Before anything is timed, each preset's anchored form must equal stock bit for bit (mHC nearly), and its reads and writes
    the equations in float64.

    Args:
        settings: what to measure.
        progress: show progress bars on standard error.

    Returns:
        `command`, `settings`, `machine` and `systems`: by name, for `train_step`, `forward` and `decode_token` the median and
        quartiles in milliseconds (`ms`) and of the ratios to stock of the same round (`ratio`); `saved_bytes` (kept for
        backward, parameters not counted) and `peak_bytes` (of one train step, beyond weights), each with `ratio`.

    Raises:
        CheckFailed: a case computes something else; nothing is reported.
        Refused: a setting that is not accepted.
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

    works: dict[str, dict[str, Work]] = {
        "train_step": {name: case.train_step for name, case in cases.items()},
        "forward": {name: case.infer for name, case in cases.items()},
        "decode_token": {name: case.decode for name, case in cases.items()},
    }
    systems: dict[str, dict[str, Any]] = {name: {} for name in cases}
    console = Console(stderr=True)
    for work, runs in works.items():
        rounds = list(
            track(
                interleaved_times(runs, settings.repeats, settings.warmup),
                description=f"{work} x {len(runs)} systems",
                total=settings.repeats,
                console=console,
                disable=not progress,
            )
        )
        unit = 1e3 / (DECODED_TOKENS if work == "decode_token" else 1)
        for name, system in systems.items():
            system[work] = {
                "ms": quartiles([times[name] * unit for times in rounds]),
                "ratio": quartiles([times[name] / times[STOCK] for times in rounds]),
            }
    for name, system in systems.items():
        case = cases[name]
        case.model.zero_grad(set_to_none=True)
        system["saved_bytes"] = {"bytes": saved_bytes(case.model, case.forward)}
        case.model.zero_grad(set_to_none=True)
        system["peak_bytes"] = {"bytes": peak_bytes(case.train_step)}
        system["routing_parameters"] = 0 if name == STOCK else _count(case.model.routing_parameters())
        system["largest_read_difference"] = differences.get(name, 0.0)
    for key in ("saved_bytes", "peak_bytes"):
        for system in systems.values():
            system[key]["ratio"] = system[key]["bytes"] / systems[STOCK][key]["bytes"]
    return {
        "command": settings.command(),
        "settings": {**asdict(settings), "presets": list(settings.presets)},
        "parameters": sum(parameter.numel() for parameter in stock.model.parameters()),
        "machine": {**describe_machine(), "load_average_before": load[0] if load else None},
        "systems": systems,
    }


def _count(parameters: dict[str, nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters.values())


def build_cases(settings: BenchmarkSettings) -> dict[str, Case]:
    """Stock Qwen3 and every preset on its weights; the routing is random, as after training.

    Raises:
        Refused: sizes that a preset does not accept.
    """
    torch.manual_seed(settings.seed)
    dtype = DTYPES[settings.dtype]
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
    stock = Qwen3ForCausalLM(config).to(dtype)
    token_ids = torch.randint(settings.vocab, (settings.batch, settings.tokens))
    cases = {STOCK: Case(STOCK, stock, token_ids)}
    for name in dict.fromkeys(settings.presets):
        cases[name] = Case(name, graft(stock, preset_config(name, settings, config, settings.anchored)), token_ids)
        with torch.no_grad():
            for key, parameter in cases[name].model.routing_parameters().items():
                if key.endswith("query"):
                    parameter.normal_(std=settings.width**-0.5)
    return cases


def preset_config(name: str, settings: BenchmarkSettings, base: Qwen3Config, anchored: bool) -> DepthRouteConfig:
    """The preset on the stock model's sizes."""
    options: dict[str, Any] = {}
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
    """A model of `config` with the stock model's weights, in its dtype; the routing at its initial values."""
    model = DepthRouteForCausalLM(config).to(stock.dtype)
    model.load_state_dict(stock.state_dict(), strict=False)
    return model


def check_parity(cases: dict[str, Case], settings: BenchmarkSettings) -> dict[str, float]:
    """Largest difference of each preset's reads from float64, after everything that must hold was seen to hold.

    Raises:
        CheckFailed: something does not.
    """
    stock, differences = cases[STOCK], {}
    for name, case in cases.items():
        if name == STOCK:
            continue
        anchored = graft(stock.model, preset_config(name, settings, stock.model.config, anchored=True))
        check_anchored_start(anchored, stock.model, case.token_ids, name)
        if name != "standard":
            differences[name] = check_reads(case.model.config, case.token_ids, DTYPES[settings.dtype], name)
    return differences


def describe_machine() -> dict[str, Any]:
    """Processor, cores and versions; nothing that tells whose machine it is."""
    cpu = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8", errors="replace").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "depthroute": depthroute.__version__,
    }
