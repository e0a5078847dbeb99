# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Gradients under checkpointing, with a frozen base, and when a step is accumulated."""

import pytest
import torch
from conftest import ROUTED_PRESETS, float64_loss, randomize_routing

from depthroute.training import DepthRouteTrainer, DepthRouteTrainingArguments, freeze_base, routing_parameters


def gradients(model, token_ids) -> dict[str, torch.Tensor]:
    model.zero_grad()
    float64_loss(model, token_ids).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "frozen-base"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("preset", ROUTED_PRESETS)
def test_checkpointing_changes_no_gradient(preset, reentrant, frozen, graft, token_ids, float64_norms):
    model = graft(preset, depth_anchored=True).double().train()
    randomize_routing(model)
    if frozen:
        freeze_base(model)
    expected = gradients(model, token_ids)
    if frozen:
        assert expected.keys() == routing_parameters(model).keys()
    model._set_gradient_checkpointing(
        True, lambda f, *a, **k: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=reentrant, **k)
    )
    calls = count_layer_calls(model)
    found = gradients(model, token_ids)
    assert calls["n"] == 2 * model.config.num_hidden_layers  # each layer ran again in the backward pass
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # float64: without checkpointing several layers' reads are one product, whose sums have another order
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-11 * gradient.abs().max().item(), msg=name)


def count_layer_calls(model) -> dict[str, int]:
    calls = {"n": 0}
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.update(n=calls["n"] + 1))
    return calls


class Rows(torch.utils.data.Dataset):
    """Four rows of 12 tokens with 11, 9, 2 and 5 labels that count."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, 97, (4, 12), generator=generator)
        self.labels = self.ids.clone()
        for row, count in enumerate((11, 9, 2, 5)):
            self.labels[row, : 12 - count] = -100

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


@pytest.mark.parametrize("preset", ["attnres-block", "delta"])
def test_accumulation_with_uneven_labels_equals_one_step(preset, graft, tmp_path):
    """SGD, so that the weights after one step show the gradient itself."""

    def start() -> torch.nn.Module:
        model = graft(preset, depth_anchored=True)
        randomize_routing(model)  # at q = 0 a key norm has no gradient
        return model

    def after_one_step(batch: int, accumulate: int) -> dict[str, torch.Tensor]:
        model = start()
        args = DepthRouteTrainingArguments(
            output_dir=str(tmp_path / f"{batch}"),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            learning_rate=0.01,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        DepthRouteTrainer(model=model, args=args, train_dataset=Rows()).train()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    before = dict(start().named_parameters())
    whole, accumulated = after_one_step(4, 1), after_one_step(1, 4)
    for name, value in whole.items():
        step = (value - before[name]).abs().max().item()
        assert step > 0, name
        # sums of four parts in another order: float32 rounding of the gradient, far below what a wrong mean would give
        torch.testing.assert_close(accumulated[name], value, rtol=0, atol=1e-4 * step + 1e-7, msg=name)
