# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: no network, one thread budget, and tiny models that are built once."""

import os
import subprocess
import sys
from pathlib import Path


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# before anything imports Triton, whose functions are made for one or the other once and for all
os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from depthroute import PRESETS, DepthRouteConfig, DepthRouteForCausalLM


torch.set_num_threads(1)

ROUTED_PRESETS = [name for name in PRESETS if name != "standard"]
QUERY_PRESETS = [
    name for name, preset in PRESETS.items() if preset.fields["residual_type"] in ("depth_attention", "dual_stream")
]
# mHC's published form adds an eps to its gates: its start is the standard function only up to that
EXACT_PRESETS = [name for name in ROUTED_PRESETS if name != "mhc"]


def tiny_qwen3_config(**values) -> Qwen3Config:
    """A Qwen3 of 8 layers and width 32 whose activations are far from the rms eps, unlike those of a fresh 0.02 init."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "max_position_embeddings": 256,
    }
    return Qwen3Config(**{**sizes, **values})


def tiny_config(preset: str, base: Qwen3Config | None = None, **values) -> DepthRouteConfig:
    """The preset on `tiny_qwen3_config`, with blocks of 2 layers where the preset has blocks."""
    if PRESETS[preset].blocks == "always":
        values.setdefault("depth_block_size", 2)
    return DepthRouteConfig.from_preset(preset, base=base or tiny_qwen3_config(), **values)


def float64_loss(model, token_ids: torch.Tensor, **arguments) -> torch.Tensor:
    """A language model's loss; transformers' own rounds logits to float32."""
    logits = model(token_ids, use_cache=False, **arguments).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten())


def randomize_routing(model, seed: int = 0, scale: float = 0.5) -> None:
    """Set every routing parameter to random values, so that routing is far from its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.routing_parameters().items():
            centre = 1.0 if name.endswith("key_norm") else 0.0
            noise = torch.randn(parameter.shape, generator=generator) * scale + centre
            parameter.copy_(noise)


_HIDE_THE_PACKAGE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("depthroute", "depthroute_kernels", "depthroute_conversion"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def run_alone(code: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess:
    """Run code in a fresh process that cannot import this project, offline, with `cache` as its cache of remote code."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(cache)}
    command = [sys.executable, "-c", _HIDE_THE_PACKAGE + code, *arguments]
    return subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, timeout=240)


@pytest.fixture
def float64_norms(monkeypatch) -> None:
    """Qwen3's norms in the dtype of what they read. Upstream they round to float32, and of two float64 computations one may
    round up where the other rounds down."""

    def forward(self, hidden_states):
        mean = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


@pytest.fixture(scope="session")
def stock() -> Qwen3ForCausalLM:
    """A stock Qwen3 with random weights, in evaluation mode. Do not change it."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(tiny_qwen3_config()).eval()


@pytest.fixture(scope="session")
def token_ids() -> torch.Tensor:
    """[2, 13] token ids."""
    return torch.randint(1, 97, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def graft(stock):
    """Build a preset's model on the stock model's weights: `graft("delta", depth_anchored=True)`."""

    def build(preset: str, **values) -> DepthRouteForCausalLM:
        model = DepthRouteForCausalLM(tiny_config(preset, base=stock.config, **values)).eval()
        result = model.load_state_dict(stock.state_dict(), strict=False)
        assert not result.unexpected_keys and set(result.missing_keys) == set(model.routing_parameters())
        return model

    return build
