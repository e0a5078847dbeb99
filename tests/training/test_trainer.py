# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""DepthRouteTrainer through a run: what it logs, how it resumes, what it saves, and what it warns of."""

import logging

import pytest
import torch
from conftest import randomize_routing, run_alone
from transformers import default_data_collator

from depthroute import DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.training import DepthRouteTrainer, DepthRouteTrainingArguments, routing_parameters
from depthroute.training.data import PackedBlocks
from depthroute.training.precision import stuck_fraction


@pytest.fixture(scope="module")
def blocks(tokenizer, text) -> PackedBlocks:
    """56 examples of 24 tokens."""
    return PackedBlocks(torch.tensor(tokenizer(text).input_ids, dtype=torch.int32).numpy(), None, 24)


def arguments(folder, **values) -> DepthRouteTrainingArguments:
    settings = {
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return DepthRouteTrainingArguments(output_dir=str(folder), **{**settings, **values})


def trainer_of(model, folder, blocks, **values) -> DepthRouteTrainer:
    return DepthRouteTrainer(
        model=model,
        args=arguments(folder, **values),
        train_dataset=blocks,
        eval_dataset=torch.utils.data.Subset(blocks, range(6)),
    )


def losses(trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def test_rates_losses_and_perplexity_are_logged(graft, blocks, tmp_path):
    model = graft("delta", depth_anchored=True)
    trainer = trainer_of(model, tmp_path, blocks, eval_strategy="steps", eval_steps=3)
    trainer.train()
    log = trainer.state.log_history
    rates = [(entry["learning_rate"], entry["routing_learning_rate"]) for entry in log if "loss" in entry]
    # the default schedule is linear to zero: step n of 6 runs at (6 - n) / 6
    assert [base for base, _ in rates] == pytest.approx([1e-3 * (6 - n) / 6 for n in range(6)])
    assert [routing for _, routing in rates] == pytest.approx([1e-2 * (6 - n) / 6 for n in range(6)])
    evaluations = [entry for entry in log if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [3, 6]
    for entry in evaluations:
        assert entry["eval_perplexity"] == pytest.approx(torch.tensor(entry["eval_loss"]).exp().item())
    metrics = trainer.evaluate()
    with torch.no_grad():
        rows = torch.stack([blocks[index]["input_ids"] for index in range(6)])
        expected = model.eval()(rows, labels=rows).loss.item()
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)  # float32 sums over batches of another size
    assert metrics["eval_perplexity"] == pytest.approx(torch.tensor(expected).exp().item(), rel=1e-4)
    assert losses(trainer)[6] < losses(trainer)[1]


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen-base"])
def test_resumed_run_has_the_losses_of_the_uninterrupted_one(frozen, graft, blocks, tmp_path):
    def fresh() -> DepthRouteForCausalLM:
        return graft("attnres-block", depth_anchored=True)

    options = {"freeze_base": frozen, "save_strategy": "steps", "save_steps": 3, "warmup_steps": 2}
    whole = trainer_of(fresh(), tmp_path / "out", blocks, **options)
    whole.train()
    resumed = trainer_of(fresh(), tmp_path / "out", blocks, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 6
    assert (
        resumed.state.log_history[-2]["routing_learning_rate"] == whole.state.log_history[-2]["routing_learning_rate"]
    )
    for got, want in zip(resumed.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        assert (got["lr"], got["initial_lr"], got["weight_decay"]) == (
            want["lr"],
            want["initial_lr"],
            want["weight_decay"],
        )
    for (name, got), want in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(got, want), name


LOAD = """
import sys
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    saved = load_file(folder + "/model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())
    assert any(name.endswith("query") and tensor.any() for name, tensor in saved.items())
    tokens = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("line 7", return_tensors="pt").input_ids
    assert torch.isfinite(model(tokens).logits).all()
print("alone: ok")
"""


def test_checkpoint_folders_load_by_themselves(graft, blocks, tokenizer, tmp_path):
    model = graft("delta-block", depth_anchored=True)
    args = arguments(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    trainer = DepthRouteTrainer(
        model=model, args=args, train_dataset=blocks, processing_class=tokenizer, data_collator=default_data_collator
    )
    trainer.train()
    trainer.save_model()
    folders = [tmp_path / "out" / "checkpoint-1", tmp_path / "out" / "checkpoint-2", tmp_path / "out"]
    (tmp_path / "cache").mkdir()
    result = run_alone(LOAD, *map(str, folders), cache=tmp_path / "cache")
    assert result.stdout.endswith("alone: ok\n"), result.stderr


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_frozen_base_under_checkpointing(reentrant, graft, blocks, tmp_path):
    model = graft("attnres", depth_anchored=True)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer = trainer_of(model, tmp_path, blocks, freeze_base=True, max_steps=2, **options)
    trainer.train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == routing_parameters(model).keys()
    assert [group["name"] for group in trainer.optimizer.param_groups] == ["routing"]


def test_frozen_base_with_a_model_made_late(graft, blocks, tmp_path):
    args = arguments(tmp_path, freeze_base=True)
    trainer = DepthRouteTrainer(args=args, train_dataset=blocks, model_init=lambda: graft("delta", depth_anchored=True))
    trainable = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trainable == routing_parameters(trainer.model).keys()


def test_frozen_base_without_routing_is_refused(graft, blocks, tmp_path):
    with pytest.raises(Refused, match="freeze_base: got a model without routing parameters"):
        trainer_of(graft("standard"), tmp_path, blocks, freeze_base=True)


def test_sixteen_bit_parameters_are_warned_of(graft, blocks, tmp_path, caplog):
    def warnings(model, **values) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="depthroute"):
            trainer_of(model, tmp_path, blocks, **values)
        return [record.getMessage() for record in caplog.records]

    assert warnings(graft("delta", depth_anchored=True), learning_rate=1e-5) == []
    [message] = warnings(graft("delta", depth_anchored=True).bfloat16(), learning_rate=1e-5)
    assert message.startswith("dtype: trainable parameters are bfloat16: a step of learning_rate = 1e-05")
    assert "float32" in message


def test_stuck_fraction_counts_what_a_step_leaves_as_it_is():
    layer = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 0.001, 0.0, -2.0]]))
    # spacing of bfloat16 at 1 is 2^-7 upwards and 2^-8 downwards: a step of 1e-3 is less than half of either
    assert stuck_fraction(layer, 1e-3) == 0.5
    assert stuck_fraction(layer, 1e-2) == 0.0
    assert stuck_fraction(layer.float(), 1e-3) == 0.0


def test_a_step_that_is_promised_to_be_stuck_is(graft, blocks, tmp_path):
    """bfloat16 weights under AdamW stay where the warning says; the same run in float32 moves every one."""
    unmoved = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = graft("delta", depth_anchored=True).to(dtype)
        randomize_routing(model)
        start = model.lm_head.weight.detach().clone()
        trainer_of(model, tmp_path, blocks, learning_rate=1e-5, weight_decay=0.0, max_steps=1).train()
        unmoved[dtype] = (model.lm_head.weight == start).float().mean().item()
    assert unmoved[torch.bfloat16] > 0.9
    assert unmoved[torch.float32] < 0.05
