# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a run is expected to take: tokens as Trainer counts them, work, and a warm-up that leaves no trace."""

import json
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GPT2Config, default_data_collator

from depthroute import DepthRouteConfig, cli
from depthroute.training import DepthRouteTrainer, DepthRouteTrainingArguments
from depthroute.training.data import PackedBlocks
from depthroute.training.engines import engine_file, engine_of
from depthroute.training.forecast import (
    count_steps,
    duration,
    expected_memory,
    forecast,
    measured_step,
    training_flops,
)
from depthroute.training.memory import training_memory
from depthroute.training.routing_state import freeze_base


def arguments(tmp_path, **values) -> DepthRouteTrainingArguments:
    options = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "report_to": "none"}
    return DepthRouteTrainingArguments(output_dir=str(tmp_path / "out"), **options, **values)


@pytest.mark.parametrize(
    "values",
    [
        {"num_train_epochs": 2, "per_device_train_batch_size": 2},
        {"num_train_epochs": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"num_train_epochs": 1, "per_device_train_batch_size": 2, "dataloader_drop_last": True},
        {"max_steps": 5, "per_device_train_batch_size": 4},
        {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ],
    ids=lambda values: "-".join(f"{name[:9]}={value}" for name, value in values.items()),
)
def test_tokens_and_steps_are_those_that_trainer_counts(values, graft, tmp_path):
    data = PackedBlocks(torch.arange(7 * 8).int().numpy(), None, 8)  # seven examples: the last batch is smaller
    training = arguments(tmp_path, include_num_input_tokens_seen="all", **values)
    trainer = DepthRouteTrainer(
        model=graft("delta-block"), args=training, train_dataset=data, data_collator=default_data_collator
    )
    steps, tokens = count_steps(training, len(data), 8)
    trainer.train()
    assert (steps, tokens) == (trainer.state.global_step, trainer.state.num_input_tokens_seen)


@pytest.mark.parametrize("values", [{}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}])
def test_work_is_that_of_the_products(values):
    base = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16}
    sizes = {**base, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64, **values}
    config = DepthRouteConfig.from_preset("standard", **sizes)
    config._experts_implementation = "eager"  # the counter knows no fused products, neither of experts nor of attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(97, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    # eager attention is over the whole square, of which a causal mask leaves half
    attention = 6 * 6 * 64 * 64 * ids.numel()
    assert training_flops(model, 64, ids.numel()) + attention == pytest.approx(counter.get_total_flops(), rel=0.02)
    products = training_flops(model, 64, ids.numel()) - attention
    model.requires_grad_(False)
    assert training_flops(model, 64, ids.numel()) - attention == pytest.approx(products * 2 / 3)


def test_the_warm_up_leaves_no_trace(graft, tmp_path):
    model = graft("dar").eval()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    state = torch.get_rng_state()
    seconds = measured_step(model, arguments(tmp_path, per_device_train_batch_size=2), 16)
    assert seconds > 0 and not model.training and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_estimate_is_of_the_order_of_what_a_run_takes(graft, tmp_path):
    model = graft("delta-block")
    training = arguments(tmp_path, max_steps=12, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    data = PackedBlocks((torch.arange(64 * 64) % 97).int().numpy(), None, 64)
    expected = forecast(model, training, len(data), 64)
    trainer = DepthRouteTrainer(model=model, args=training, train_dataset=data, data_collator=default_data_collator)
    taken = trainer.train().metrics["train_runtime"]
    # on a shared machine, with the optimizer's work on top: not another order of magnitude
    assert taken / 8 < expected.seconds < taken * 8
    assert expected.tokens_per_step == 4 * 64 and expected.tokens == 12 * 4 * 64


def test_memory_grows_with_what_is_trained(graft, tmp_path):
    training = arguments(tmp_path, max_steps=1)
    model = graft("delta-block")
    whole = forecast(model, training, None, 16)
    freeze_base(model)
    frozen = forecast(model, training, None, 16)
    assert frozen.trainable < whole.trainable == whole.parameters
    assert frozen.memory["total"] < whole.memory["total"]
    known = training_memory(model.config, batch_size=8, sequence_length=16, trained=whole.trainable)
    assert whole.memory == {**known._asdict(), "total": known.total}


def test_memory_of_other_models(stock, tmp_path):
    training = arguments(tmp_path, max_steps=1, bf16=True, gradient_checkpointing=True)
    known = {"batch_size": 8, "sequence_length": 16, "precision": "autocast", "checkpointing": True}
    standard = DepthRouteConfig.from_preset("standard", base=stock.config)
    assert expected_memory(stock, training, 16)["total"] == training_memory(standard, **known).total
    with torch.device("meta"):
        other = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10))
    expected = forecast(other, training, None, 16)
    assert expected.memory == {} and expected.lines()["memory per process"] == "not estimated: another family"


DIVIDED = {
    "fsdp": ({"USE_FSDP": "true"}, "the model"),
    "zero1": ({"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "1"}, "its optimizer"),
    "zero2": ({"USE_DEEPSPEED": "true"}, "its optimizer"),  # where accelerate is not told a stage
    "zero3": ({"USE_DEEPSPEED": "true", "DEEPSPEED_ZERO_STAGE": "3"}, "the model"),
}


@pytest.mark.parametrize("engine", DIVIDED)
def test_what_accelerate_divides_is_not_tried_whole(engine, graft, tmp_path, monkeypatch):
    """`accelerate launch` tells engine and precision by environment variables alone. A model that needs all devices would not fit
    one of them in a warm-up."""
    model, training = graft("delta-block"), arguments(tmp_path, max_steps=1)
    told, divided = DIVIDED[engine]
    for name, value in told.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(type(model), "forward", None)
    expected = forecast(model, training, None, 16)
    assert expected.seconds is None
    assert expected.not_measured == f"{divided} is divided among processes when training starts"
    known = training_memory(model.config, batch_size=8, sequence_length=16, engine=engine, precision="mixed")
    assert expected.memory == {**known._asdict(), "total": known.total}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("told", ["dict", "text", "file", "accelerate"])
def test_the_stage_is_the_configuration_s(told, stage, tmp_path, monkeypatch):
    entries = {"zero_optimization": {"stage": stage}}
    file = tmp_path / "deepspeed.json"
    file.write_text(json.dumps(entries))
    training = arguments(tmp_path)
    if told == "accelerate":
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    else:  # as given: making the arguments with it needs DeepSpeed
        training.deepspeed = {"dict": entries, "text": json.dumps(entries), "file": str(file)}[told]
    assert engine_of(training) == (f"zero{stage}" if stage else "single")


@pytest.mark.parametrize("name", ["zero3", "zero3-offload"])
def test_the_packaged_configurations_are_what_they_are_called(name, tmp_path):
    training = arguments(tmp_path)
    training.deepspeed = str(engine_file(name))
    assert engine_of(training) == "zero3"


def test_deepspeed_without_zero_divides_nothing(tmp_path):
    training = arguments(tmp_path)
    training.deepspeed = {"train_batch_size": 8}
    assert engine_of(training) == "single"


def test_the_warm_up_has_the_precision_that_accelerate_was_told(graft, tmp_path, monkeypatch):
    model, found = graft("delta-block"), []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *parts: found.append(parts[2].dtype))
    for told, dtype in (("no", torch.float32), ("bf16", torch.bfloat16)):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", told)
        measured_step(model, arguments(tmp_path), 16)
        assert found.pop() == dtype


def test_small_memory_is_in_small_units(graft, tmp_path):
    expected = forecast(graft("delta-block"), arguments(tmp_path, max_steps=1), None, 16)
    total = expected.memory["total"] / 2**20
    assert total > 0.01 and expected.lines()["memory per process"].startswith(f"about {total:.2f} MiB (parameters ")


def test_a_forecast_alone_makes_and_writes_nothing(monkeypatch, capsys, tmp_path):
    """Of a model of 7B, which would not fit here."""
    # as the recipe is: neither its data nor its tokenizer are here, nor needed
    options = ["--use_cpu", "--bf16", "false", "--forecast_only", "--output_dir", "out", "--preset", "dar-full"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["depthroute", "train", "dar-7b-moe", *options])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    printed, error = capsys.readouterr()
    assert not exit_.value.code, error
    assert "50,000,297,984" in printed  # 50e9 in whole steps of 512 x 1024
    assert "not estimated: the weights were not made" in printed and "memory per process" in printed
    assert not (tmp_path / "out").exists()


def test_durations():
    found = [duration(seconds) for seconds in (0.01, 5.24, 65, 3700, 100_000)]
    assert found == ["0.1 s", "5.2 s", "1 min 5 s", "1 h 1 min", "1 d 3 h"]
