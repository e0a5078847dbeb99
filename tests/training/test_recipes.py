# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Recipes: their sizes against the papers', how options and recipes stand over each other, and runs from scratch."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from depthroute import PRESETS, cli, convert
from depthroute.errors import Refused
from depthroute.training import DepthRouteTrainer, parse_arguments
from depthroute.training.characters import character_tokenizer
from depthroute.training.recipes import RECIPE_FOLDER, list_recipes, read_recipe, recipe_names
from depthroute.training.run import train
from depthroute.training.starting import load_model, model_config


# millions of parameters; layers, width
PAPERS = {
    "rd-s": (120, 16, 576),
    "rd-m": (343, 24, 832),
    "delta-220m": (220, None, None),
    "delta-533m": (533, None, None),
    "delta-1044m": (1044, None, None),
    "dar-0.1b": (100, None, None),
    "dar-0.3b": (300, None, None),
    "dar-0.5b": (500, None, None),
    "dar-1b": (1000, None, None),
    "dar-7b-moe": (7000, None, None),
    "wav-12-tinystories": (None, 12, None),
    "wav-24-tinystories": (None, 24, None),
    "wav-48-tinystories": (None, 48, None),
    "wav-12-text8": (None, 12, None),
    "wav-24-text8": (None, 24, None),
    "wav-48-text8": (None, 48, None),
}


def recipe(name: str, *options: str):
    return parse_arguments([name, "--use_cpu", *options])


@pytest.mark.parametrize("name", PAPERS)
def test_from_scratch_models_have_the_papers_sizes(name):
    run, _ = recipe(name)
    config = model_config(run, vocab_size=100)  # where the recipe has none: characters
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    millions, layers, width = PAPERS[name]
    found = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    # what is not stated (vocabulary, MLP) comes in steps: 1% of sizes with three digits, 3% of those with one
    assert millions is None or found == pytest.approx(millions, rel=0.01 if millions % 100 else 0.03)
    assert (layers, width) in [(layers and config.num_hidden_layers, width and config.hidden_size)]
    assert config.preset_name == run.from_scratch["preset"] and not config.depth_anchored


def test_every_recipe_is_one_of_these_and_described():
    assert set(recipe_names()) == {*PAPERS, "retrofit", "retrofit-frozen"}
    descriptions = list_recipes()
    assert len(set(descriptions.values())) == len(descriptions)
    for name in recipe_names():
        run, training = recipe(name)
        assert run.preset or run.from_scratch["preset"] in PRESETS
        assert training.max_steps > 0 or run.train_tokens
        assert run.dataset and (run.validation_documents or run.validation_split)
        text = (RECIPE_FOLDER / f"{name}.yaml").read_text()
        assert "choice" in text or "chosen here" in text or "extends:" in text


def test_what_the_papers_state():
    run, _ = recipe("rd-m")
    assert (run.dataset, run.dataset_config) == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    assert run.train_tokens == 2_000_000_000
    assert run.eval_tokens == [250_000_000, 500_000_000, 1_000_000_000, 2_000_000_000]
    assert all(recipe(name)[1].max_steps == 10_000 for name in PAPERS if name.startswith("delta"))
    frozen = recipe("retrofit-frozen")[1]
    assert frozen.freeze_base and frozen.warmup_steps == 100 and not recipe("retrofit")[1].freeze_base


def test_options_end_what_they_take_the_place_of():
    run, training = recipe("rd-s", "--train_files", "a.txt", "--validation_files", "b.txt", "--max_steps", "7")
    assert (run.dataset, run.dataset_config, run.stream, run.validation_documents) == (None, None, False, None)
    assert run.train_tokens is None and training.max_steps == 7
    run, _ = recipe("rd-s", "--from_scratch", '{"hidden_size": 64, "head_dim": 16}', "--preset", "attnres-block")
    assert (run.from_scratch["hidden_size"], run.from_scratch["num_hidden_layers"]) == (64, 16)
    assert model_config(run, None).preset_name == "attnres-block"


def test_recipes_extend_each_other(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: rd-s\nfrom-scratch: {hidden_size: 128}\nmax_steps: 5\nseed: 9\n")
    (tmp_path / "more.yaml").write_text("extends: mine.yaml\nseed: 10\n")
    entries = read_recipe(str(tmp_path / "more.yaml"))
    assert entries["seed"] == 10 and entries["max_steps"] == 5 and "train_tokens" not in entries
    assert entries["from_scratch"] == {**read_recipe("rd-s")["from_scratch"], "hidden_size": 128}
    (tmp_path / "mine.yaml").write_text("extends: more.yaml\n")
    with pytest.raises(Refused, match=r"extends: comes back to itself"):
        read_recipe(str(tmp_path / "more.yaml"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rd-x"], "recipe: got 'rd-x', nearest: rd-s, rd-m"),
        (["rd-s", "--from_scratch", "[1]"], r"from_scratch: got '\[1\]', allowed: a JSON object"),
        (["rd-s", "--from_scratch", "{"], "from_scratch: got '{', allowed: a JSON object"),
        (["rd-s", "--from_scratch", '{"hiden_size": 3}'], "from_scratch: hiden_size: unknown field, nearest: hidden_size"),
        (["rd-s", "--preset", "rd-atnres"], "from_scratch: preset: got 'rd-atnres', nearest: rd-attnres"),
        (["rd-s", "--model", "x"], r"model, from_scratch: got both \(x\)"),
        (["rd-s", "--routing", "x"], "routing: got a file for a model from scratch"),
        (["rd-s", "--tokenizer", "no/such"], "tokenizer: got 'no/such', no local folder"),
        (["--from_scratch", '{"preset": "delta"}', "--train_files", "x"], "tokenizer: got none for a model from scratch"),
        (["rd-s", "--tokenizer", "characters", "--train_tokens", "0"], "train_tokens: got 0, allowed: at least 1"),
        (["rd-s", "--tokenizer", "characters", "--eval_tokens", "9999"], "eval_tokens: got 9999, allowed: 1 to 512, .* 4 steps"),
        (["rd-s", "--global_batch_size", "33"], "global_batch_size: got 33, allowed: a multiple of 32"),
        (["rd-s", "--validation_fraction", "0.1"], "validation_fraction: got a stream"),
    ],
)  # fmt: skip
def test_recipes_that_are_refused(arguments, message, tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    files = {"train_files": str(tmp_path / "t.txt"), "validation_files": str(tmp_path / "t.txt")}
    if "characters" in arguments:
        small = {"hidden_size": 16, "head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 97}
        options = {**files, "from_scratch": json.dumps(small), "per_device_train_batch_size": "1", "block_size": "32",
                   "global_batch_size": "4"}  # fmt: skip
        options |= {} if "--train_tokens" in arguments else {"max_steps": "4"}
        arguments = [*arguments, *(part for name, value in options.items() for part in (f"--{name}", value))]
        if "--eval_tokens" not in arguments:
            arguments += ["--eval_tokens", "64"]
    with pytest.raises(Refused, match=message) as refusal:
        train([*arguments, "--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path / "out")])
    assert "\n" not in str(refusal.value) and not (tmp_path / "out").exists()


def test_list_of_recipes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["depthroute", "train", "--list-recipes"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr().out
    assert all(name in printed and text in printed for name, text in list_recipes().items())


def test_character_tokenizer_gives_the_text_back():
    tokenizer = character_tokenizer(["b a\nß", "a"])
    assert len(tokenizer) == 2 + 5 and tokenizer.eos_token_id == 0
    assert tokenizer.decode(tokenizer("a ß\nb").input_ids) == "a ß\nb"
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id]
    with pytest.raises(Refused, match="tokenizer: got no text"):
        character_tokenizer([""])


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}


@pytest.fixture
def small_run(tmp_path):
    """A recipe that makes a tiny character model and streams its documents."""
    lines = [json.dumps({"text": f"line {i} has the square {i * i}\n"}) for i in range(80)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    entries = {
        "extends": "wav-12-tinystories", "from_scratch": SMALL, "train_files": [str(tmp_path / "lines.jsonl")],
        "stream": True, "shuffle_buffer": 16, "validation_documents": 8, "block_size": 32, "train_tokens": 500,
        "eval_tokens": [128, 500], "per_device_train_batch_size": 2, "global_batch_size": 4, "bf16": False, "use_cpu": True,
        "learning_rate": 1e-2, "warmup_steps": 0, "eval_strategy": "no", "save_steps": 2, "logging_steps": 1, "disable_tqdm": True,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(entries))
    return str(tmp_path / "run.yaml")


def losses(results) -> list[float]:
    return [entry["loss"] for entry in results["log"] if "loss" in entry]


def test_a_run_from_scratch_streams_measures_and_resumes_exactly(small_run, tmp_path):
    whole = train([small_run, "--output_dir", str(tmp_path / "whole")])
    assert whole["forecast"]["tokens"] == 512 and whole["data"]["tokens_per_step"] == 128  # 500, in whole steps
    assert [entry["step"] for entry in whole["log"] if "eval_loss" in entry] == [1, 4]
    assert whole["preset"] == "wav" and losses(whole)[-1] < losses(whole)[0]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert model.config.vocab_size == len(tokenizer) and tokenizer.decode(tokenizer("line 7").input_ids) == "line 7"

    # the same command again, in two parts and with workers: the same batches, the same weights
    part = [small_run, "--output_dir", str(tmp_path / "part"), "--dataloader_num_workers", "2"]
    results = train([*part, "--max_steps", "2", "--eval_tokens", "128", "--lr_scheduler_type", "cosine"])
    assert losses(results)[:1] == losses(whole)[:1]
    whole_state = tmp_path / "whole" / "checkpoint-2"
    resumed = train([*part, "--overwrite", "--resume_from_checkpoint", str(whole_state)])
    assert losses(resumed) == losses(whole)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "part"))
    assert all(torch.equal(one[name], other[name]) for name in one)  # bitwise: the same operations in the same order


def test_two_processes_train_on_the_same_steps_as_one(small_run, tmp_path):
    """Each with its own half of every step: the gradients' mean is that of the whole step. Started by torchrun; accelerate's
    launcher is tried with `depthroute eval`."""
    whole = train([small_run, "--output_dir", str(tmp_path / "whole"), "--save_strategy", "no"])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "depthroute",
    ]
    command += ["train", small_run, "--output_dir", str(tmp_path / "halves"), "--save_strategy", "no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert (tmp_path / "halves" / "depthroute_run.json").is_file(), done.stdout[-1500:] + done.stderr[-3000:]
    halves = json.loads((tmp_path / "halves" / "depthroute_run.json").read_text())
    assert (halves["processes"], whole["processes"]) == (2, 1)
    assert halves["data"] == whole["data"] and halves["forecast"]["tokens"] == whole["forecast"]["tokens"]
    assert done.stdout.count("memory per process") == 1  # printed by one of them
    # float32 sums in another order, through three optimizer steps
    assert losses(halves) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_presets_are_compared_on_the_same_batches(stream, small_run, tmp_path, monkeypatch):
    seen: list[torch.Tensor] = []
    step = DepthRouteTrainer.training_step
    monkeypatch.setattr(
        DepthRouteTrainer,
        "training_step",
        lambda self, *given: seen.append(given[1]["input_ids"]) or step(self, *given),
    )
    batches = {}
    for preset in ("wav", "standard"):
        options = ["--stream", stream, "--preset", preset, "--max_steps", "2", "--save_strategy", "no"]
        train([small_run, *options, "--eval_tokens", "128", "--output_dir", str(tmp_path / preset)])
        batches[preset] = torch.stack(seen)
        seen.clear()
    assert len(batches["wav"]) == len(batches["wav"].unique(dim=0)) == 4
    assert torch.equal(batches["standard"], batches["wav"])


def test_presets_are_compared_on_the_same_base_weights(small_run, tmp_path):
    found = {}
    for preset in ("wav", "attnres-block", "standard"):
        run, training = parse_arguments([small_run, "--preset", preset, "--output_dir", str(tmp_path / preset)])
        tokenizer = character_tokenizer(["".join(map(chr, range(32, 127)))])
        found[preset] = dict(load_model(run, tokenizer, training.seed).named_parameters())
        assert found[preset].keys() >= found["wav"].keys() - {n for n in found["wav"] if "_read" in n}
    base = found["standard"]
    assert len(found["wav"]) > len(found["attnres-block"]) > len(base)
    assert all(torch.equal(base[name], found[preset][name]) for preset in found for name in base)


@pytest.mark.parametrize("preset", ["delta-block", "dar", "layerscale", "standard"])
def test_a_retrofit_is_a_conversion(preset, stock, tokenizer, tmp_path, token_ids):
    stock.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run, _ = recipe("retrofit", "--model", str(tmp_path / "base"), "--preset", preset)
    model = load_model(run).eval()
    assert torch.equal(model(token_ids).logits, stock(token_ids).logits)
    convert(tmp_path / "base", tmp_path / "converted", preset, verify=False)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    weights = dict(converted.named_parameters())
    assert (
        model.config.preset_name == converted.config.preset_name
        and weights.keys() == dict(model.named_parameters()).keys()
    )
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    run.model = str(tmp_path / "converted")
    with pytest.raises(Refused, match=f"preset: got '{preset}', but .*converted has routing already"):
        load_model(run)
