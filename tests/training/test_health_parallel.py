# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Routing health on two processes: DDP, DDP over adapters with checkpointing, and FSDP2, whose parameters are shards."""

import pytest
import torch
import torch.distributed as dist
from conftest import randomize_routing, tiny_config, tiny_qwen3_config
from peft import get_peft_model
from process_helpers import run_together
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback
from transformers.distributed import DistributedConfig

from depthroute import DepthRouteForCausalLM
from depthroute.training import (
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    RoutingHealthCallback,
    lora_config,
    routing_parameters,
)
from depthroute.training.health import PATIENCE


KINDS = ["ddp", "ddp, adapted, checkpointing", "fsdp2"]


def build() -> DepthRouteForCausalLM:
    torch.manual_seed(0)
    base = tiny_qwen3_config(num_hidden_layers=4)
    model = DepthRouteForCausalLM(tiny_config("rd-attnres", base=base, depth_anchored=True))
    randomize_routing(model, scale=0.3)
    return model


def adapted():
    model = build()
    torch.manual_seed(0)
    return get_peft_model(model, lora_config(model, r=2, init_lora_weights=False))


class Kills(TrainerCallback):
    """Takes one read's gradient before it is looked at."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for name, parameter in routing_parameters(model).items():
            if "layers.2.mlp_read" in name:
                parameter.grad.zero_()


def run(model, folder, per_device: int, steps: int = 1, callbacks=(), **values) -> dict:
    """The entries of the log with routing in them, and what was warned of."""
    rows = [
        {"input_ids": row, "labels": row}
        for row in torch.randint(1, 97, (8, 9), generator=torch.Generator().manual_seed(2))
    ]
    args = DepthRouteTrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=per_device,
        max_steps=steps,
        learning_rate=1e-3,
        max_grad_norm=0,
        logging_steps=1,
        routing_health_steps=1,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
        **values,
    )
    trainer = DepthRouteTrainer(model=model, args=args, train_dataset=rows, callbacks=list(callbacks))
    trainer.train()
    [health] = [c for c in trainer.callback_handler.callbacks if isinstance(c, RoutingHealthCallback)]
    entries = [entry for entry in trainer.state.log_history if "routing_gradient_norm/total" in entry]
    parameters = routing_parameters(trainer.model).values()
    return {
        "log": entries,
        "warnings": health.warnings,
        "ddp": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "sharded": all(isinstance(parameter, DTensor) for parameter in parameters),
    }


def on_two(rank, folder):
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if rank == 0:
        build().save_pretrained(folder / "model")
    dist.barrier()

    def sharded():
        config = DistributedConfig(fsdp_size=2)
        return DepthRouteForCausalLM.from_pretrained(folder / "model", distributed_config=config, dtype=torch.float32)

    options = {"ddp_find_unused_parameters": False}
    return {
        "ddp": run(build(), folder / "ddp", 1, **options),
        "ddp, adapted, checkpointing": run(adapted(), folder / "lora", 1, **options, **checkpointing),
        "fsdp2": run(sharded(), folder / "fsdp2", 1),
        "dead under fsdp2": run(sharded(), folder / "dead", 1, PATIENCE, [Kills()]),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_together(on_two, tmp_path_factory.mktemp("health"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_norms_are_those_of_one_process(kind, outcomes, tmp_path):
    alone = run(adapted() if "adapted" in kind else build(), tmp_path, 2)
    for outcome in outcomes:
        found = outcome[kind]
        assert found["ddp"] == kind.startswith("ddp") and found["sharded"] == (kind == "fsdp2")
        assert found["warnings"] == alone["warnings"] == []
        assert len(found["log"]) == len(alone["log"]) == 1
        for name, value in alone["log"][0].items():
            if name.startswith("routing_gradient_norm"):
                # float32 through eight sublayers, summed in another order
                assert found["log"][0][name] == pytest.approx(value, rel=1e-3), name
            assert name in found["log"][0]
    # of weights each process has those of its own batch: over both, the mean is that of the whole one
    for name in ("routing_max_weight/03_mlp", "routing_normalized_entropy/03_attn/value"):
        both = sum(outcome[kind]["log"][0][name] for outcome in outcomes) / 2
        assert both == pytest.approx(alone["log"][0][name], rel=1e-4)


def test_a_dead_router_is_found_among_shards(outcomes):
    for outcome in outcomes:
        warnings = [text for text in outcome["dead under fsdp2"]["warnings"] if "the gradient of" in text]
        assert len(warnings) == 1 and warnings[0].startswith(
            "dead routers: the gradient of read 02_mlp was exactly zero"
        )
