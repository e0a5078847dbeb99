# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A resumed run is the uninterrupted one: parameters bit for bit, the optimizer's state, the order of the data, the log."""

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from depthroute.training import (
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    lora_config,
    optimizer_groups,
    routing_parameters,
)


trl = pytest.importorskip("trl")

ROWS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(1, 97, (24, 12), generator=torch.Generator().manual_seed(5))
]


class Batches(TrainerCallback):
    """Every batch that the model is given, by step."""

    def __init__(self, model):
        self.seen: dict[int, list[torch.Tensor]] = {}
        self.model = model

    def on_train_begin(self, args, state, control, **kwargs):
        self.state = state
        embedding = self.model.get_input_embeddings()
        self.hook = embedding.register_forward_pre_hook(
            lambda module, inputs: self.seen.setdefault(self.state.global_step, []).append(inputs[0].clone())
        )

    def on_train_end(self, args, state, control, **kwargs):
        self.hook.remove()


def settings(folder) -> dict:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 9,  # past the end of the first epoch, at 6
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 4,
        "use_cpu": True,
        "disable_tqdm": True,
    }


def ours(model, folder):
    return DepthRouteTrainer(
        model=model, args=DepthRouteTrainingArguments(**settings(folder), routing_health_steps=4), train_dataset=ROWS
    )


def adapted(model, folder):
    torch.manual_seed(0)
    model = get_peft_model(model, lora_config(model, r=2, lora_dropout=0.1))
    return DepthRouteTrainer(model=model, args=DepthRouteTrainingArguments(**settings(folder)), train_dataset=ROWS)


def frozen(model, folder):
    args = DepthRouteTrainingArguments(**settings(folder), freeze_base=True)
    return DepthRouteTrainer(model=model, args=args, train_dataset=ROWS)


def theirs(model, folder):
    args = TrainingArguments(**settings(folder))
    optimizer = torch.optim.AdamW(optimizer_groups(model, args.learning_rate, args.weight_decay))
    return Trainer(model=model, args=args, train_dataset=ROWS, optimizers=(optimizer, None))


class RoutedSFTTrainer(DepthRouteTrainer, trl.SFTTrainer):
    pass


def supervised(tokenizer):
    def make(model, folder):
        torch.manual_seed(0)
        tokenizer.pad_token = tokenizer.eos_token
        data = Dataset.from_dict({"text": [f"line {i} has the square {i * i}" for i in range(24)]})
        args = trl.SFTConfig(**settings(folder), bf16=False, max_length=32, gradient_checkpointing=False)
        return RoutedSFTTrainer(
            model=model, args=args, train_dataset=data, processing_class=tokenizer, peft_config=lora_config(model, r=2)
        )

    return make


MAKERS = {
    "DepthRouteTrainer": lambda _: ours,
    "adapters": lambda _: adapted,
    "frozen base": lambda _: frozen,
    "Trainer": lambda _: theirs,
    "SFTTrainer, adapters": supervised,
}


def log_of(trainer) -> dict[int, tuple[float, float, float | None]]:
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {e["step"]: (e["loss"], e["learning_rate"], e.get("routing_learning_rate")) for e in entries}


def state_by_name(trainer) -> dict[str, dict[str, torch.Tensor]]:
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return {names[id(parameter)]: state for parameter, state in trainer.optimizer.state.items()}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_resumed_equals_uninterrupted(make, graft, tokenizer, tmp_path):
    def run(checkpoint: str | None):
        model = graft("attnres-block", depth_anchored=True)
        trainer = make(tokenizer)(model, tmp_path / "out")
        batches = Batches(trainer.model)
        trainer.add_callback(batches)
        if checkpoint:  # what is trained comes from the checkpoint, wherever the model was
            with torch.no_grad():
                for parameter in trainer.model.parameters():
                    if parameter.requires_grad:
                        parameter.fill_(0.25)
        torch.rand(3 if checkpoint else 1)  # another state of the generator, of the same seed
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer, batches.seen

    whole, whole_batches = run(None)
    resumed, resumed_batches = run(str(tmp_path / "out" / "checkpoint-4"))

    assert whole_batches.keys() == set(range(9)) and resumed_batches.keys() == set(range(4, 9))
    for step, batches in resumed_batches.items():
        assert len(batches) == 2
        assert all(torch.equal(got, want) for got, want in zip(batches, whole_batches[step], strict=True)), step
    assert log_of(resumed) == log_of(whole) and len(log_of(whole)) == 9

    wanted = dict(whole.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    trained = {name for name, parameter in wanted.items() if parameter.requires_grad}
    expected, found = state_by_name(whole), state_by_name(resumed)
    assert expected.keys() == found.keys() == trained
    for name, state in expected.items():
        assert state.keys() == found[name].keys()
        assert all(
            torch.equal(torch.as_tensor(value), torch.as_tensor(found[name][key])) for key, value in state.items()
        ), name
    for got, want in zip(resumed.optimizer.param_groups, whole.optimizer.param_groups, strict=True):
        assert {k: v for k, v in got.items() if k != "params"} == {k: v for k, v in want.items() if k != "params"}
    assert resumed.optimizer.param_groups[-1]["name"] == "routing"
    routing = routing_parameters(resumed.model)
    assert len(resumed.optimizer.param_groups[-1]["params"]) == len(routing)
    start = graft("attnres-block", depth_anchored=True).routing_parameters()
    assert all(not torch.equal(parameter, start[name]) for name, parameter in routing.items())
