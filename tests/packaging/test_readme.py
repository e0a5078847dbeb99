# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The README's code runs, in order, on a tiny checkpoint that stands where `Qwen/Qwen3-0.6B` would be downloaded to."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_qwen3_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from depthroute import PRESETS


README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEXT = "def add(a, b):\n    return a + b\n\n\ndef double(value):\n    return add(value, value)\n" * 40

# run elsewhere: `make test` is what runs this file, CI runs both, and installing is what the environments are made by
NOT_RUN_HERE = ("make ", "pip install ")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(0)
    stock = Qwen3ForCausalLM(tiny_qwen3_config(vocab_size=len(fast), num_hidden_layers=8, max_position_embeddings=2048))
    for saved in (stock, fast):
        saved.save_pretrained(folder / "Qwen" / "Qwen3-0.6B")
    (folder / "train.txt").write_text(TEXT)
    (folder / "validation.txt").write_text(TEXT[:400])
    return folder


def run_command(command, folder):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.timeout(900)  # a dozen fresh processes, each of which imports torch and transformers
def test_every_snippet_runs(workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    names: dict = {}
    ran = []
    for language, code in BLOCK.findall(README.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(code, str(README), "exec"), names)
            ran.append("python")
            continue
        for command in code.replace("\\\n", " ").splitlines():
            if command.startswith(NOT_RUN_HERE):
                continue
            output = run_command(command, workplace)
            ran.append(shlex.split(command)[:2][-1] if command.startswith("depthroute") else command.split()[0])
            if command.startswith("depthroute verify"):
                assert "bitwise" in output
    assert ran == [
        "convert",
        "verify",
        "python",
        "train",
        "python",
        "python",
        "eval",
        "lm_eval",
        "inspect",
        "eval",
        "python",
        "reproduce",
        "python",
    ]
    # what the snippets leave behind
    assert names["output"].routing.keys() == {
        f"model.layers.{i}.{branch}" for i in range(1, 8) for branch in ("attn_read", "mlp_read")
    }
    reads = [name for name, _ in names["adapted"].named_parameters() if "read" in name and "modules_to_save" in name]
    assert len(reads) == 2 * 14
    assert names["perplexity"]["mean_perplexity"] > 1 and "depthroute_choice" in names["scores"]["results"]
    assert names["config"].preset_name == "attnres-block" and names["model"].config is names["config"]
    assert (workplace / "routing" / "routing_heatmap.png").stat().st_size > 1000
    assert (workplace / "my-tuned" / "config.json").is_file()


def test_the_preset_table_is_complete():
    rows = re.findall(r"^\| `([a-z-]+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == list(PRESETS)


def test_the_two_commands_are_targets_and_every_link_leads_somewhere():
    text = README.read_text(encoding="utf-8")
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (README.parent / link).exists(), link
    for path in re.findall(r"^\s+(\w+\.py)\s", text, re.MULTILINE):
        assert any(list((README.parent / root).rglob(path)) for root in ("src", "kernels", "conversion")), path
