# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The routing has an optimizer group of its own, with its rate and without weight decay; and it moves."""

import logging

import pytest
import torch
from conftest import PRESETS, ROUTED_PRESETS
from transformers import Trainer, TrainingArguments

from depthroute import DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.training import DepthRouteTrainer, DepthRouteTrainingArguments, optimizer_groups


FACTORS = {
    "standard": None,
    "attnres": 2,
    "attnres-block": 2,
    "attnres-states": 2,
    "delta": 10,
    "delta-block": 10,
    "rd-attnres": 2,
    "wav": 2,
    "dar": 2,
    "dar-full": 2,
    "mhc": 1,
    "rezero": 1,
    "layerscale": 1,
}


def ids(parameters) -> set[int]:
    return {id(parameter) for parameter in parameters}


def training_arguments(tmp_path, **values) -> DepthRouteTrainingArguments:
    return DepthRouteTrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, disable_tqdm=True, **values)


def test_every_preset_has_a_stated_factor():
    assert FACTORS.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_groups_and_default_rates(preset, graft):
    model = graft(preset)
    groups = optimizer_groups(model, learning_rate=1e-3, weight_decay=0.1)
    held = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(held) == len(set(held)) and set(held) == ids(model.parameters())
    decayed, plain, *routing = groups
    assert decayed["weight_decay"] == 0.1 and plain["weight_decay"] == 0
    base = [p for p in model.parameters() if id(p) not in ids(model.routing_parameters().values())]
    assert ids(decayed["params"]) == ids(p for p in base if p.dim() == 2)
    assert ids(plain["params"]) == ids(p for p in base if p.dim() == 1)
    if FACTORS[preset] is None:
        assert not routing
        return
    assert ids(routing[0]["params"]) == ids(model.routing_parameters().values())
    assert routing[0]["weight_decay"] == 0
    assert routing[0]["lr"] == pytest.approx(FACTORS[preset] * 1e-3)


@pytest.mark.parametrize(
    ("preset", "values"),
    [("delta-block", {"depth_detail_bases": ["phase"]}), ("attnres", {"depth_value_projection": True, "depth_null_source": True}),
     ("dar", {"dual_gates": "dynamic"})],
)  # fmt: skip
def test_options_of_a_residual_belong_to_its_routing(preset, values, graft):
    model = graft(preset, **values)
    extra = model.routing_parameters().keys() - graft(preset).routing_parameters().keys()
    group = optimizer_groups(model, 1e-3, 0.1)[-1]
    assert extra and ids(model.get_parameter(name) for name in extra) <= ids(group["params"])
    assert group["lr"] == pytest.approx(FACTORS[preset] * 1e-3) and group["weight_decay"] == 0


def test_a_given_rate_wins(graft):
    assert optimizer_groups(graft("delta"), 1e-3, 0.1, routing_learning_rate=7e-4)[-1]["lr"] == 7e-4


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_trainer_builds_the_same_groups(optim, graft, tmp_path):
    model = graft("attnres-block")
    args = training_arguments(tmp_path, learning_rate=1e-3, weight_decay=0.1, optim=optim)
    optimizer = DepthRouteTrainer(model=model, args=args).create_optimizer()
    wanted = optimizer_groups(model, 1e-3, 0.1)
    assert len(optimizer.param_groups) == len(wanted)
    for got, want in zip(optimizer.param_groups, wanted, strict=True):
        assert ids(got["params"]) == ids(want["params"])
        assert (got["lr"], got["weight_decay"]) == (want["lr"], want["weight_decay"])


def test_base_groups_are_those_of_transformers_trainer(graft, tmp_path):
    model = graft("standard")
    args = TrainingArguments(output_dir=str(tmp_path), weight_decay=0.1, use_cpu=True)
    theirs = Trainer(model=model, args=args).create_optimizer().param_groups
    ours = optimizer_groups(model, args.learning_rate, 0.1)
    assert [ids(g["params"]) for g in ours] == [ids(g["params"]) for g in theirs]
    # plain TrainingArguments, and a model without routing: the control of an experiment
    control = DepthRouteTrainer(model=model, args=args).create_optimizer().param_groups
    assert [ids(g["params"]) for g in control] == [ids(g["params"]) for g in theirs]


def test_given_optimizer_is_left_alone(graft, tmp_path):
    model = graft("delta")
    given = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = DepthRouteTrainer(model=model, args=training_arguments(tmp_path), optimizers=(given, None))
    assert trainer.create_optimizer() is given and len(given.param_groups) == 1


def test_fused_updates_are_refused(graft, tmp_path):
    with pytest.raises(Refused, match=r"optim: got lomo, allowed: .*groups"):
        DepthRouteTrainer(model=graft("delta"), args=training_arguments(tmp_path, optim="lomo"))


def test_negative_rate_is_refused(tmp_path):
    with pytest.raises(ValueError, match="routing_learning_rate: got -1.0"):
        training_arguments(tmp_path, routing_learning_rate=-1.0)


def test_a_rate_with_large_logit_steps_is_warned_of(graft, caplog):
    model = graft("delta")  # width 32: one step moves a logit by up to 32 times the rate
    with caplog.at_level(logging.WARNING, logger="depthroute"):
        optimizer_groups(model, 1e-3, 0.0, routing_learning_rate=0.03)
        assert not caplog.records
        optimizer_groups(model, 1e-3, 0.0, routing_learning_rate=0.04)
    assert "routing_learning_rate: got 0.04" in caplog.text
    caplog.clear()
    optimizer_groups(graft("layerscale"), 1e-3, 0.0, routing_learning_rate=0.04)  # no queries, no logits
    assert not caplog.records


MOVING = {"mhc": "gate_bias", "rezero": "scale", "layerscale": "scale"}


@pytest.mark.parametrize("preset", ROUTED_PRESETS)
def test_every_query_has_a_gradient_and_moves(preset, graft, token_ids):
    """Anchored, three AdamW steps from the start of a conversion; of the baselines the gates and scales."""
    model: DepthRouteForCausalLM = graft(preset, depth_anchored=True).train()
    moving = MOVING.get(preset, "query")
    queries = {name: p for name, p in model.routing_parameters().items() if name.endswith(moving)}
    starts = {name: parameter.detach().clone() for name, parameter in queries.items()}
    assert queries and (moving != "query" or all(not parameter.any() for parameter in queries.values()))
    optimizer = torch.optim.AdamW(optimizer_groups(model, learning_rate=1e-4, weight_decay=0.1))
    for step in range(3):
        model(token_ids, labels=token_ids).loss.backward()
        if step == 0:
            assert all(parameter.grad.norm() > 0 for parameter in queries.values())
        optimizer.step()
        optimizer.zero_grad()
    rate = optimizer.param_groups[-1]["lr"]
    for name, parameter in queries.items():
        moved = (parameter - starts[name]).abs().max().item()
        # AdamW moves an entry by at most about its rate in each of the first steps
        assert 0.5 * rate < moved < 3.5 * rate, name
