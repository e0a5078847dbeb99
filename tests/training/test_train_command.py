# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute train`: options, YAML, a run from files to a folder, and what is refused."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import randomize_routing
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from depthroute import cli
from depthroute.errors import Refused
from depthroute.training import load_routing, parse_arguments, save_routing
from depthroute.training.run import train


def command_line(monkeypatch, *arguments: str) -> int:
    """Exit code of `depthroute` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["depthroute", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0


@pytest.fixture
def options(model_folder, text, tmp_path) -> dict[str, object]:
    """A run of four steps on one text, measured on another."""
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "held out.txt").write_text(text.replace("line", "rule"))
    return {
        "model": model_folder("delta"),
        "train_files": [str(tmp_path / "train.txt")],
        "validation_files": [str(tmp_path / "held out.txt")],
        "block_size": 32,
        "output_dir": str(tmp_path / "out"),
        "cache_dir": str(tmp_path / "cache"),
        "max_steps": 4,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "disable_tqdm": True,
    }


def as_arguments(options: dict[str, object], **more) -> list[str]:
    result = []
    for name, value in {**options, **more}.items():
        if value is not None:
            result += [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]
    return result


def test_yaml_and_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: some/model\nlearning_rate: 1e-4\ntrain-files: [a.txt, b.txt]\nbf16: false\nfreeze_base: true\n"
        "gradient_checkpointing_kwargs: {use_reentrant: false}\nrouting_learning_rate: 2.0e-3\nblock_size:\n"
        f"output_dir: {tmp_path}\nuse_cpu: true\n"
    )
    run, training = parse_arguments([str(file)])
    assert (run.model, run.train_files, run.block_size) == ("some/model", ["a.txt", "b.txt"], None)
    assert (training.learning_rate, training.routing_learning_rate) == (1e-4, 2e-3)  # 1e-4 is a string to YAML
    assert training.freeze_base is True and training.bf16 is False
    run, training = parse_arguments(
        [str(file), "--learning-rate=3e-4", "--train_files", "c.txt", "--freeze-base", "false"]
    )
    assert (training.learning_rate, run.train_files, training.freeze_base) == (3e-4, ["c.txt"], False)


def test_resume_alone_means_the_newest(tmp_path):
    for written, value in {
        "--resume_from_checkpoint": "last",
        "--resume-from-checkpoint=x": "x",
        "--use_cpu": None,
    }.items():
        _, training = parse_arguments([written, "--output_dir", str(tmp_path)])
        assert training.resume_from_checkpoint == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rat", "1"], "--learning_rat: unknown option, nearest: learning_rate"),
        (["--foo"], "--foo: unknown option, nearest: none is near$"),
        (["--freze-base"], "--freze-base: unknown option, nearest: freeze_base"),
        (["--max_steps", "many"], "max_steps.*many"),
        (["--dtype", "int8"], "dtype.*int8.*float32"),
        (["--max_steps", "3", "stray"], "stray: got a value that belongs to no option"),
        (["absent.yaml"], r"absent\.yaml: .*allowed: a readable YAML file"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(Refused, match=message) as refusal:
        parse_arguments(arguments)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning-rte: 1", "learning_rte: unknown option, nearest: learning_rate"),
        ("- a", "got list, allowed: a mapping"),
        ("a: [", "allowed: a readable YAML file"),
        ("train_files: []", "train_files: got an empty list"),
    ],
)
def test_yaml_that_is_refused(text, message, tmp_path):
    (tmp_path / "run.yml").write_text(text)
    with pytest.raises(Refused, match=f"run.yml: .*{message}"):
        parse_arguments([str(tmp_path / "run.yml")])


def test_help_lists_our_options_and_theirs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["depthroute", "train", "--help"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    printed = capsys.readouterr().out
    assert not exit_.value.code
    assert all(f"--{name}" in printed for name in ("model", "train_files", "routing_learning_rate", "freeze_base"))
    assert "TrainingArguments are accepted" in printed and "per_device_train_batch_size" in printed


def test_run_from_the_command_line(options, monkeypatch, capsys, tmp_path):
    arguments = as_arguments(options, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    assert command_line(monkeypatch, "train", *arguments) == 0
    assert "validation perplexity" in capsys.readouterr().out
    out = tmp_path / "out"
    results = json.loads((out / "depthroute_run.json").read_text())
    assert (
        results["preset"] == "delta"
        and results["seed"] == 42
        and results["command"].startswith("depthroute train --model")
    )
    assert results["versions"]["torch"] == torch.__version__
    assert results["routing_learning_rate"] == pytest.approx(1e-2)
    assert results["parameters"]["trainable"] == results["parameters"]["total"]
    assert [entry["step"] for entry in results["log"] if "eval_perplexity" in entry] == [2, 4]
    validation = results["validation"]
    assert validation["eval_perplexity"] == pytest.approx(torch.tensor(validation["eval_loss"]).exp().item())
    model = AutoModelForCausalLM.from_pretrained(out)
    assert any(p.any() for n, p in model.routing_parameters().items() if n.endswith("query"))
    assert {"config.json", "modeling_depthroute.py", "tokenizer.json", "trainer_state.json"} <= {
        f.name for f in out.iterdir()
    }

    # what is there is not replaced by accident, can be gone on from, and can be replaced
    assert command_line(monkeypatch, "train", *arguments) == 2
    assert "output_dir" in capsys.readouterr().err
    more = train([*arguments, "--resume_from_checkpoint", "--max_steps", "6"])
    assert [entry["step"] for entry in more["log"] if "eval_loss" in entry] == [2, 4, 6]
    train(as_arguments(options, max_steps=1, overwrite=True))
    assert not list(out.glob("checkpoint-[246]"))


def test_freeze_base_and_the_routing_file(options, graft, tmp_path):
    results = train(as_arguments(options, freeze_base=True, save_strategy="no"))
    start = load_file(f"{options['model']}/model.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    moved = {name for name, tensor in found.items() if not torch.equal(tensor, start[name])}
    fresh = graft("delta", depth_anchored=True)
    routing = fresh.routing_parameters()
    assert moved and moved == routing.keys()
    assert (
        results["parameters"]["trainable"]
        == results["parameters"]["routing"]
        == sum(p.numel() for p in routing.values())
    )
    file = tmp_path / "out" / "routing.safetensors"
    load_routing(fresh, file)
    assert all(torch.equal(parameter, found[name]) for name, parameter in fresh.routing_parameters().items())

    # and a run that starts from it
    again = as_arguments(options, routing=str(file), output_dir=str(tmp_path / "again"), learning_rate=0.0, max_steps=1)
    assert train(again)["validation"]["eval_loss"] == pytest.approx(results["validation"]["eval_loss"], rel=1e-6)


def test_sixteen_bit_checkpoints_are_trained_in_float32(options, graft, tmp_path):
    model = graft("delta", depth_anchored=True).bfloat16()
    randomize_routing(model)
    model.save_pretrained(options["model"])
    train(as_arguments(options, max_steps=1, save_strategy="no"))
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}


def test_an_ordinary_model_trains_as_a_control(options, stock, tokenizer, tmp_path):
    stock.save_pretrained(tmp_path / "stock")
    tokenizer.save_pretrained(tmp_path / "stock")
    results = train(as_arguments(options, model=str(tmp_path / "stock"), max_steps=2, save_strategy="no"))
    assert results["preset"] is None and results["routing_learning_rate"] is None
    assert results["parameters"]["routing"] == 0
    with pytest.raises(Refused, match="freeze_base: .* has no routing parameters"):
        train(as_arguments(options, model=str(tmp_path / "stock"), freeze_base=True, overwrite=True))


def test_data_set_with_its_validation_split(options, text, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train", "validation"):
        (folder / f"{split}.txt").write_text(text)
    results = train(
        as_arguments({**options, "train_files": None, "validation_files": None}, dataset=str(folder), max_steps=1)
    )
    assert results["data"]["validation_blocks"] > 0 and results["validation"]["eval_loss"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": None}, "model: got none"),
        ({"model": "./absent/model"}, r"absent/model: not a folder"),
        (
            {"model": "nope"},
            "model: got 'nope', no local folder, .*; allowed: a model folder or the id of a reachable hub",
        ),
        ({"model": ""}, "model: got"),
        ({"output_dir": f"{__file__}/x"}, "is a file, allowed: a path of folders"),
        ({"train_files": None}, "train_files, dataset: got both or neither"),
        ({"train_files": ["absent.txt"]}, r"absent\.txt: no such file"),
        ({"validation_fraction": 0.5}, "validation_files, validation_fraction: got 2 sources"),
        ({"validation_files": None, "eval_strategy": "epoch"}, "eval_strategy: got 'epoch' without validation data"),
        ({"block_size": 1}, "block_size: got 1, allowed: at least 2"),
        ({"block_size": 300}, "block_size: got 300, allowed: at most 256, max_position_embeddings"),
        ({"text_column": "txet"}, "text_column: got 'txet', nearest: text"),
        ({"resume_from_checkpoint": "last"}, "resume_from_checkpoint: no checkpoint in"),
        ({"resume_from_checkpoint": "absent"}, "resume_from_checkpoint: absent: no such folder"),
        ({"routing": "absent.safetensors"}, r"absent\.safetensors: no such file"),
        ({"optim": "lomo"}, "optim: got lomo"),
    ],
)
def test_runs_that_are_refused_leave_nothing(change, message, options, tmp_path):
    with pytest.raises(Refused, match=message):
        train(as_arguments({**options, **change}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("package", "change", "message"),
    [
        ("flash_attn", {"attn_implementation": "flash_attention_2"}, "flashattention2"),
        ("wandb", {"report_to": "wandb"}, "report_to: got 'wandb', allowed: none, or what is installed"),
        ("deepspeed", {"deepspeed": "absent.json"}, "deepspeed"),
    ],
)
def test_packages_that_are_not_installed_are_named_in_one_line(package, change, message, options, monkeypatch, capsys):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    code = command_line(monkeypatch, "train", *as_arguments({**options, **change}))
    unset_hf_deepspeed_config()  # which transformers keeps until the refused arguments are collected
    assert code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("depthroute: refused: ") and message in last.lower()
    assert not Path(str(options["output_dir"])).exists()


def test_a_checkpoint_that_lacks_weights_is_refused(options):
    file = Path(str(options["model"])) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(Refused, match=r"missing weights: model\.layers\.3\.mlp\.down_proj\.weight"):
        train(as_arguments(options))


def test_a_routing_file_of_another_model_is_refused(options, graft, tmp_path):
    save_routing(graft("attnres", depth_anchored=True), tmp_path / "other.safetensors")
    with pytest.raises(Refused, match="depth_combine: replace in the file, add in the model"):
        train(as_arguments(options, routing=str(tmp_path / "other.safetensors")))


def test_a_tokenizer_of_another_model_is_refused(options, graft, tokenizer):
    config = graft("delta").config
    rows = {"input_ids": list(range(90, config.vocab_size + 3)) * 4}
    file = Path(str(options["train_files"][0])).with_suffix(".json")
    file.write_text(json.dumps([rows]))
    with pytest.raises(Refused, match=f"token id {config.vocab_size + 2}, allowed: below {config.vocab_size}"):
        train(as_arguments(options, train_files=[str(file)]))
