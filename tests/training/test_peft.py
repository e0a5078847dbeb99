# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Adapters on a converted model: they leave the reads alone, and `modules_to_save` keeps the routing through everything."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from depthroute.errors import Refused
from depthroute.training import (
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    load_routing,
    routing_module_names,
    routing_parameters,
    save_routing,
)


NAMES = {
    "attnres": ["attn_read", "final_read", "mlp_read"],
    "delta": ["attn_read", "mlp_read"],
    "delta-block": ["attn_read", "mlp_read"],
    "rd-attnres": ["attn_read", "final_read", "mlp_read"],
    "dar": ["attn_read", "final_read", "mlp_read"],
    "mhc": ["attn_read", "final_read", "mlp_read"],
}


def adapted(model, **values):
    """Random adapters, of a size that a trained one could have."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **values
    )
    return get_peft_model(model, config)


@pytest.mark.parametrize("preset", NAMES)
def test_all_linear_never_touches_a_read(preset, graft):
    model = adapted(graft(preset, depth_anchored=True))
    reads = [name for name, _ in model.named_parameters() if "_read" in name]
    assert reads and not any("lora" in name or "modules_to_save" in name for name in reads)
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 8 * 7  # all linear layers but the head


@pytest.mark.parametrize("preset", NAMES)
def test_routing_survives_adapter_save_load_and_merge(preset, graft, token_ids, tmp_path):
    base = graft(preset, depth_anchored=True)
    names = routing_module_names(base)
    assert names == NAMES[preset]
    plain_names = base.routing_parameters().keys()
    model = adapted(base, modules_to_save=names).eval()
    found = routing_parameters(model)
    assert found.keys() == plain_names and all(parameter.requires_grad for parameter in found.values())
    before = model(token_ids).logits
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in found.values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    trained = {name: parameter.detach().clone() for name, parameter in found.items()}
    logits = model(token_ids).logits
    assert not torch.equal(logits, before)  # the parameters found are those that run

    start = graft(preset, depth_anchored=True).routing_parameters()
    with model.disable_adapter():
        assert all(torch.equal(p, start[name]) for name, p in routing_parameters(model).items())
    save_routing(model, tmp_path / "routing.safetensors")
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(graft(preset, depth_anchored=True), tmp_path / "adapter").eval()
    for name, parameter in routing_parameters(loaded).items():
        assert torch.equal(parameter, trained[name]), name
    assert torch.equal(loaded(token_ids).logits, logits)

    merged = loaded.merge_and_unload()
    assert merged.routing_parameters().keys() == plain_names
    for name, parameter in merged.routing_parameters().items():
        assert torch.equal(parameter, trained[name]), name
    # 1e-5 of the largest logit: the low-rank products are now rounded into the weights; stock Qwen3 moves by 2e-6 of it
    torch.testing.assert_close(merged(token_ids).logits, logits, rtol=0, atol=1e-5 * logits.abs().max().item())

    fresh = graft(preset, depth_anchored=True)
    load_routing(fresh, tmp_path / "routing.safetensors")
    assert all(torch.equal(parameter, trained[name]) for name, parameter in fresh.routing_parameters().items())


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
def test_trainer_on_an_adapted_model(reentrant, graft, token_ids, tmp_path):
    model = graft("delta", depth_anchored=True)
    model = adapted(model, modules_to_save=routing_module_names(model))
    args = DepthRouteTrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=2,
        learning_rate=1e-3,
        weight_decay=0.1,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=reentrant,
        gradient_checkpointing_kwargs={"use_reentrant": True} if reentrant else None,
    )
    rows = [{"input_ids": row, "labels": row} for row in token_ids]
    start = {name: parameter.detach().clone() for name, parameter in routing_parameters(model).items()}
    trainer = DepthRouteTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert groups[-1]["name"] == "routing" and len(groups[-1]["params"]) == len(start)
    assert groups[-1]["initial_lr"] == pytest.approx(1e-2)
    assert sum(len(group["params"]) for group in groups) == sum(p.requires_grad for p in model.parameters())
    for name, parameter in routing_parameters(model).items():
        assert not torch.equal(parameter, start[name]), name
    # a checkpoint holds the adapter and the routing
    again = PeftModel.from_pretrained(graft("delta", depth_anchored=True), tmp_path / "out" / "checkpoint-2")
    for name, parameter in routing_parameters(again).items():
        assert torch.equal(parameter, routing_parameters(model)[name]), name


@pytest.mark.parametrize("preset", ["rezero", "layerscale"])
def test_scales_are_no_modules_and_go_their_own_way(preset, graft, token_ids, tmp_path):
    """PEFT saves modules only, so the names are refused; what the refusal advises keeps the scales."""
    base = graft(preset, depth_anchored=True)
    with pytest.raises(Refused, match="modules_to_save: got attn_scale and mlp_scale, .* keep them with save_routing"):
        routing_module_names(base)
    model = adapted(base)
    found = routing_parameters(model)
    assert found.keys() == graft(preset).routing_parameters().keys()
    for parameter in found.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.SGD(found.values(), lr=0.1)
    model(token_ids, labels=token_ids).loss.backward()
    optimizer.step()
    assert all((parameter != 1).any() for parameter in found.values())
    logits = model.eval()(token_ids).logits
    model.save_pretrained(tmp_path / "adapter")
    save_routing(model, tmp_path / "routing.safetensors")
    again = PeftModel.from_pretrained(graft(preset, depth_anchored=True), tmp_path / "adapter").eval()
    assert not torch.equal(again(token_ids).logits, logits)
    load_routing(again, tmp_path / "routing.safetensors")
    assert torch.equal(again(token_ids).logits, logits)


def test_a_frozen_routing_is_told(graft, tmp_path, caplog):
    base = graft("delta", depth_anchored=True)
    for parameter in routing_parameters(base).values():
        parameter.requires_grad_(False)
    args = DepthRouteTrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True)
    trainer = DepthRouteTrainer(model=base, args=args)
    assert "the routing is not trained" in caplog.text
    assert all(group.get("name") != "routing" for group in trainer.create_optimizer().param_groups)
