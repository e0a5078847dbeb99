# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Sources and conversions that are made once, and the command line in this process."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_qwen3_config
from conversion_helpers import save_checkpoint, tiny_llama_config, tiny_moe_config
from transformers import LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM

from depthroute import cli


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> dict[str, Path]:
    """Read-only sources by name; convert them, do not change them."""
    root = tmp_path_factory.mktemp("sources")
    torch.manual_seed(0)
    qwen3, llama = Qwen3ForCausalLM(tiny_qwen3_config()), LlamaForCausalLM(tiny_llama_config())
    moe = Qwen3MoeForCausalLM(tiny_moe_config(num_hidden_layers=4))
    tied = Qwen3ForCausalLM(tiny_qwen3_config(tie_word_embeddings=True, initializer_range=0.1))
    return {
        "qwen3": save_checkpoint(qwen3, root / "tiny-qwen3"),
        "llama": save_checkpoint(llama, root / "tiny-llama"),
        # transformers writes experts one by one, unless told otherwise
        "moe": save_checkpoint(moe, root / "tiny-moe"),
        "moe-fused": save_checkpoint(moe, root / "tiny-moe-fused", save_original_format=False),
        "moe-bf16": save_checkpoint(moe.to(torch.bfloat16), root / "tiny-moe-bf16"),
        "qwen3-bf16": save_checkpoint(qwen3.to(torch.bfloat16), root / "tiny-qwen3-bf16"),
        "llama-bf16": save_checkpoint(llama.to(torch.bfloat16), root / "tiny-llama-bf16"),
        "tied": save_checkpoint(tied, root / "tiny-tied"),
        "sharded": save_checkpoint(tied, root / "tiny-sharded", max_shard_size="40kB"),
    }


@pytest.fixture
def copy_of(originals, tmp_path):
    """A copy of a source that a test may damage: `copy_of("qwen3")`."""
    return lambda name: Path(shutil.copytree(originals[name], tmp_path / f"copy-of-{name}"))


@pytest.fixture(scope="session")
def converted(originals, tmp_path_factory):
    """A conversion, made once: `converted("qwen3", "delta-block", anchored=False)`. Do not change it."""
    from depthroute import convert

    root, made = tmp_path_factory.mktemp("converted"), {}

    def make(name: str, preset: str = "delta-block", **options) -> Path:
        key = (name, preset, *sorted(options.items()))
        if key not in made:
            made[key] = root / f"number-{len(made)}"
            convert(originals[name], made[key], preset, **options)
        return made[key]

    return make


@pytest.fixture
def run_cli(monkeypatch, capsys):
    """Run the command line in this process: `code, out, err = run_cli("convert", SRC, OUT)`."""

    def run(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthroute", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as leaving:
            code = leaving.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
