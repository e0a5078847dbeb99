# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What `--resume_from_checkpoint` goes on from: whole checkpoints, with steps left or without."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from depthroute.errors import Refused
from depthroute.training import DepthRouteTrainer, DepthRouteTrainingArguments
from depthroute.training.checkpoints import newest_checkpoint
from depthroute.training.run import summary, train


LENGTHS = {
    "inside an epoch": {"max_steps": 2},
    "at an epoch's end": {"num_train_epochs": 1},
    "stream": {"max_steps": 2, "stream": True},
}
"""Of a run on 43 blocks, 16 a step: an epoch is three steps. transformers counts the epochs of each in another way."""


@pytest.fixture
def arguments(model_folder, text, tmp_path) -> list[str]:
    """A run that keeps a checkpoint of every step. Documents are many, for a stream to have an order."""
    for name, content in (("train", text), ("held-out", text.replace("line", "rule"))):
        lines = [json.dumps({"text": line}) for line in content.splitlines()]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    options = {
        "model": model_folder("delta"), "train_files": tmp_path / "train.jsonl",
        "validation_files": tmp_path / "held-out.jsonl", "block_size": 32, "output_dir": tmp_path / "out",
        "cache_dir": tmp_path / "cache", "per_device_train_batch_size": 16, "learning_rate": 1e-2,
        "routing_learning_rate": 1e-2, "lr_scheduler_type": "constant", "use_cpu": True, "disable_tqdm": True,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 1,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in options.items()]


def with_options(arguments: list[str], options: dict[str, object]) -> list[str]:
    return [*arguments, *(f"--{name}={value}" for name, value in options.items())]


def killed_before_the_end(out: Path) -> None:
    """Leave of a finished run what is there between its last checkpoint and its saving."""
    for file in out.iterdir():
        if file.is_file():
            file.unlink()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def by_steps(results) -> list[dict]:
    """The log without times, and without the entry of the whole run."""
    times = ("_runtime", "_per_second")
    entries = [{k: v for k, v in e.items() if not k.endswith(times)} for e in results["log"]]
    return [entry for entry in entries if "total_flos" not in entry]


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: metrics[name] for name in ("eval_loss", "eval_perplexity")}


@pytest.mark.parametrize("named", ["last", "by its folder"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_run_killed_behind_its_last_checkpoint_is_finished_without_a_step(named, length, arguments, tmp_path):
    arguments = with_options(arguments, LENGTHS[length])
    whole, expected = train(arguments), weights(tmp_path / "out")
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    killed_before_the_end(tmp_path / "out")
    last = tmp_path / "out" / f"checkpoint-{whole['forecast']['steps']}"
    finished = train([*arguments, f"--resume_from_checkpoint={'last' if named == 'last' else last}"])

    assert equal(weights(tmp_path / "out"), expected) and equal(weights(last), expected)
    assert by_steps(finished) == by_steps(whole) and untimed(finished["validation"]) == untimed(whole["validation"])
    assert finished["routing_learning_rate"] == whole["routing_learning_rate"]
    again = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert all(again[name] == state[name] for name in ("global_step", "max_steps", "num_train_epochs", "epoch"))
    # the mean over no step is not the run's loss
    assert "train_loss" not in finished["train"] and "train_loss" in whole["train"]
    assert summary(finished)["training loss"] == "no step was left to train"
    assert json.loads((tmp_path / "out" / "depthroute_run.json").read_text())["validation"] == finished["validation"]
    assert not (tmp_path / "out" / f"checkpoint-{whole['forecast']['steps'] + 1}").exists()


def test_more_steps_than_the_checkpoint_had_go_on_from_it(arguments, tmp_path):
    whole = train([*arguments, "--max_steps=3"])
    expected = weights(tmp_path / "out")
    part = train([*arguments, "--max_steps=2", "--overwrite"])
    assert part["train"]["train_loss"] > 0
    more = train([*arguments, "--max_steps=3", "--resume_from_checkpoint=last"])
    assert equal(weights(tmp_path / "out"), expected) and by_steps(more) == by_steps(whole)


@pytest.mark.parametrize("state", [None, "", '{"global_step": 2, "max_st', "[]", "{}"])
def test_what_is_whole(state, tmp_path):
    for step in (2, 9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (tmp_path / "checkpoint-best").mkdir()  # the user's own
    assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-10", [])
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()
    if state is not None:
        (tmp_path / "checkpoint-10" / "trainer_state.json").write_text(state)
    assert newest_checkpoint(tmp_path) == (tmp_path / "checkpoint-9", [tmp_path / "checkpoint-10"])


def test_last_passes_over_checkpoints_that_are_not_whole(arguments, tmp_path, caplog):
    arguments = [*arguments, "--max_steps=2"]
    train(arguments)
    expected = weights(tmp_path / "out")
    broken = tmp_path / "out" / "checkpoint-7"
    (tmp_path / "out" / "checkpoint-2").rename(broken)
    (broken / "trainer_state.json").unlink()
    with caplog.at_level(logging.WARNING):
        resumed = train([*arguments, "--resume_from_checkpoint=last"])
    assert f"{broken} is passed over: it has no readable trainer_state.json" in caplog.messages
    assert equal(weights(tmp_path / "out"), expected)
    assert broken.is_dir() and [entry["step"] for entry in by_steps(resumed) if "loss" in entry] == [1, 2]


def test_checkpoints_that_are_refused(arguments, tmp_path):
    arguments = [*arguments, "--max_steps=2"]
    out = tmp_path / "out"
    train(arguments)

    def refusal(*more: str) -> str:
        with pytest.raises(Refused) as refused:
            train([*arguments, *more])
        assert "\n" not in str(refused.value)
        return str(refused.value)

    behind = f"resume_from_checkpoint: {out / 'checkpoint-2'} is at step 2, allowed: at most 1, the steps of this run"
    assert refusal("--max_steps=1", "--resume_from_checkpoint=last").startswith(behind)
    (out / "checkpoint-2" / "trainer_state.json").write_text("{")
    line = refusal(f"--resume_from_checkpoint={out / 'checkpoint-2'}")
    assert line.startswith(
        f"resume_from_checkpoint: {out / 'checkpoint-2'} has no readable trainer_state.json, allowed"
    )
    shutil.rmtree(out / "checkpoint-1")
    line = refusal("--resume_from_checkpoint=last")
    assert line.startswith(f"resume_from_checkpoint: no checkpoint in {out} (checkpoint-2: not whole), allowed")
    assert (out / "checkpoint-2").is_dir()


@pytest.mark.smoke
def test_a_trainer_by_itself_does_no_step_too_many(graft, tokenizer, text, tmp_path):
    ids = torch.tensor(tokenizer(text).input_ids[: 40 * 32]).view(40, 32)

    def trainer():
        arguments = DepthRouteTrainingArguments(
            output_dir=str(tmp_path), max_steps=2, save_steps=2, per_device_train_batch_size=8, use_cpu=True,
            report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        torch.manual_seed(0)
        return DepthRouteTrainer(graft("delta"), arguments, train_dataset=[{"input_ids": i, "labels": i} for i in ids])

    whole, resumed = trainer(), trainer()
    whole.train()
    assert not equal(whole.model.state_dict(), resumed.model.state_dict())
    assert resumed.train(resume_from_checkpoint=True).global_step == 2
    assert equal(whole.model.state_dict(), resumed.model.state_dict())
