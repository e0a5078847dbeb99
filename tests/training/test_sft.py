# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""trl's SFTTrainer on depth-routed models: packing, completion-only and chunked loss, adapters, resuming."""

import copy

import pytest
import torch
from conftest import tiny_config, tiny_qwen3_config
from datasets import Dataset
from peft import LoraConfig

from depthroute import DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.training import (
    DepthRouteTrainer,
    RoutingHealthCallback,
    lora_config,
    optimizer_groups,
    routing_parameters,
)


trl = pytest.importorskip("trl")


class RoutedSFTTrainer(DepthRouteTrainer, trl.SFTTrainer):
    """As the documentation advises."""


@pytest.fixture
def padding(tokenizer):
    padding = copy.deepcopy(tokenizer)
    padding.pad_token = padding.eos_token
    return padding


@pytest.fixture
def lines(text) -> Dataset:
    return Dataset.from_dict({"text": text.splitlines()})


@pytest.fixture
def pairs(text) -> Dataset:
    """Prompt and completion: `line 7 has the square ` and `49`."""
    split = [line.rpartition(" ") for line in text.splitlines()]
    return Dataset.from_list([{"prompt": f"{start} ", "completion": end} for start, _, end in split])


def arguments(folder, **values):
    settings = {
        "output_dir": str(folder),
        "max_steps": 2,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "max_length": 40,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": 1,
        "gradient_checkpointing": False,
    }
    return trl.SFTConfig(**{**settings, **values})


def start_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


OPTIONS = {
    "padded": {},
    "packed": {"packing": True},
    "packed, wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "completion only": {"completion_only_loss": True},
    "dynamic fine-tuning": {"loss_type": "dft"},
    "checkpointing": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_routing_and_base_are_trained(options, adapters, graft, padding, lines, pairs, tmp_path):
    model = graft("delta-block", depth_anchored=True)
    config = lora_config(model, r=2) if adapters else None
    data = pairs if "completion_only_loss" in options else lines
    args = arguments(tmp_path, **options)
    trainer = RoutedSFTTrainer(model=model, args=args, train_dataset=data, processing_class=padding, peft_config=config)
    before = start_of(trainer.model)
    trainer.train()
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in trainer.state.log_history if "loss" in entry)
    group = trainer.optimizer.param_groups[-1]
    assert group["name"] == "routing" and group["initial_lr"] == pytest.approx(1e-2) and group["weight_decay"] == 0
    moved = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}
    routing = {id(parameter) for parameter in routing_parameters(trainer.model).values()}
    moved_routing = {name for name in moved if id(trainer.model.get_parameter(name)) in routing}
    assert len(moved_routing) == len(routing) == len(group["params"])
    if adapters:
        assert all("lora_" in name for name in moved - moved_routing) and any("lora_B" in name for name in moved)
    else:
        assert len(moved) == len(before)


def test_the_chunked_loss_is_the_whole_ones(graft, padding, pairs, tmp_path):
    """trl projects hidden states tile by tile through the head. The model's own loss over the completion is the same."""
    model = graft("attnres-block", depth_anchored=True)
    trainer = RoutedSFTTrainer(
        model=model,
        args=arguments(tmp_path, max_steps=1, completion_only_loss=True),
        train_dataset=pairs,
        processing_class=padding,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert 0 < (batch["labels"] != -100).sum() < batch["attention_mask"].sum() / 2  # of the completion alone
    with torch.no_grad():
        own = model(**batch, use_cache=False).loss
    # float32, other order of sums
    assert trainer.compute_loss(model, dict(batch)).item() == pytest.approx(own.item(), rel=1e-5)
    loss = trainer.compute_loss(model, dict(batch))
    loss.backward()
    assert all(parameter.grad is not None for parameter in routing_parameters(model).values())


def test_packed_documents_do_not_see_each_other(graft, padding, lines, tmp_path):
    """Packing without padding gives positions and no mask. Depth routing is per token, so a document reads as it would alone."""
    model = graft("dar", depth_anchored=True)
    args = arguments(tmp_path, packing=True, max_length=80)
    trainer = RoutedSFTTrainer(model=model, args=args, train_dataset=lines, processing_class=padding)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "attention_mask" not in batch
    first = int((batch["position_ids"][0, 1:] == 0).nonzero()[0]) + 1
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
        alone = model(input_ids=batch["input_ids"][:, :first], use_cache=False).logits[0]
        second = model(input_ids=batch["input_ids"][:, first : first + 10], use_cache=False).logits[0]
    torch.testing.assert_close(packed[:first], alone, rtol=1e-4, atol=1e-4 * alone.abs().max().item())
    torch.testing.assert_close(packed[first : first + 10], second, rtol=1e-4, atol=1e-4 * second.abs().max().item())


def test_their_trainer_takes_our_groups(graft, padding, lines, tmp_path):
    model = graft("delta-block", depth_anchored=True)
    args = arguments(tmp_path)
    optimizer = torch.optim.AdamW(optimizer_groups(model, args.learning_rate, args.weight_decay))
    trainer = trl.SFTTrainer(
        model=model, args=args, train_dataset=lines, processing_class=padding, optimizers=(optimizer, None)
    )
    trainer.train()
    assert all(p.any() for name, p in routing_parameters(model).items() if name.endswith("query"))


def test_adapters_that_drop_the_routing_are_refused(graft, padding, lines, tmp_path):
    with pytest.raises(Refused, match="modules_to_save: got none"):
        RoutedSFTTrainer(
            model=graft("delta-block", depth_anchored=True),
            args=arguments(tmp_path),
            train_dataset=lines,
            processing_class=padding,
            peft_config=LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
        )


def test_health_is_logged_beside_their_metrics(graft, padding, lines, tmp_path):
    trainer = RoutedSFTTrainer(
        model=graft("delta-block", depth_anchored=True),
        args=arguments(tmp_path, logging_steps=2, max_steps=4),
        train_dataset=lines,
        processing_class=padding,
    )
    trainer.add_callback(RoutingHealthCallback(trainer, steps=2))
    trainer.train()
    log = trainer.state.log_history
    assert [entry["step"] for entry in log if "loss" in entry and "mean_token_accuracy" in entry] == [2, 4]
    assert [entry["step"] for entry in log if "routing_max_weight/mean" in entry] == [2, 4]


def test_sparse_experts_are_adapted_beside_the_routing(padding, lines, tmp_path):
    """trl adds the balance loss of the expert routers, which the decoder's output has to have."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01}
    base = tiny_qwen3_config(num_hidden_layers=4)
    model = DepthRouteForCausalLM(tiny_config("delta-block", base=base, depth_anchored=True, **experts))
    trainer = RoutedSFTTrainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=lines,
        processing_class=padding,
        peft_config=lora_config(model, r=2),
    )
    before = start_of(trainer.model)
    trainer.train()
    moved = {name for name, parameter in trainer.model.named_parameters() if not torch.equal(parameter, before[name])}
    assert sum("experts" in name and "lora_B" in name for name in moved) == 4 * 2
    assert all(p.any() for name, p in routing_parameters(trainer.model).items() if name.endswith("query"))
    assert any(entry.get("aux_loss", 0) > 0 for entry in trainer.state.log_history)
