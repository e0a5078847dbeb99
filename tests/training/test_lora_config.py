# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`lora_config` and its check: adapters on the projections, the routing kept through saving, merging and switching."""

import pytest
import torch
from conftest import ROUTED_PRESETS, randomize_routing, tiny_config, tiny_qwen3_config
from peft import (
    AutoPeftModelForCausalLM,
    IA3Config,
    LoKrConfig,
    LoraConfig,
    PeftModel,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from depthroute import DepthRouteForCausalLM, DepthRouteForSequenceClassification, DepthRouteModel
from depthroute.errors import Refused
from depthroute.training import (
    DepthRouteTrainer,
    DepthRouteTrainingArguments,
    check_adapter_config,
    lora_config,
    routing_module_names,
    routing_parameters,
)


PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
MODULE_PRESETS = [preset for preset in ROUTED_PRESETS if preset not in ("rezero", "layerscale")]


def sparse(preset: str = "delta-block") -> DepthRouteForCausalLM:
    """Four layers, the first dense, the others with four experts; the same weights on every call."""
    torch.manual_seed(0)
    base = tiny_qwen3_config(num_hidden_layers=4)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    return DepthRouteForCausalLM(tiny_config(preset, base=base, depth_anchored=True, **experts)).eval()


def shake(model, scale: float = 0.1, seed: int = 0) -> None:
    """Move whatever is trainable, as training would: adapters and the routing that is in use."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def routing_of(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in routing_parameters(model).items()}


def assert_routing(model, expected: dict[str, torch.Tensor]) -> None:
    found = routing_parameters(model)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.smoke
@pytest.mark.parametrize("preset", MODULE_PRESETS)
def test_projections_are_adapted_and_reads_are_trained_whole(preset, graft, token_ids):
    model = graft(preset, depth_anchored=True)
    expected = model(token_ids).logits
    config = lora_config(model, r=2)
    assert set(config.target_modules) == PROJECTIONS and config.target_parameters is None
    assert config.modules_to_save == routing_module_names(model)
    adapted = get_peft_model(model, config).eval()
    # adapters start at zero, the reads as copies: the start of a conversion stays exact
    assert torch.equal(adapted(token_ids).logits, expected)
    trainable = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    low_rank = {name for name in trainable if "lora_" in name}
    assert len(low_rank) == 2 * 8 * 7 and not any("_read" in name or "lm_head" in name for name in low_rank)
    routing = routing_parameters(adapted)
    assert len(trainable) == len(low_rank) + len(routing) and all(p.requires_grad for p in routing.values())


OPTIONS = {
    "sizes, rslora": {"r": 3, "lora_alpha": 5, "lora_dropout": 0.1, "rank_pattern": {"q_proj": 1}, "use_rslora": True},
    "dora, excluded": {"use_dora": True, "exclude_modules": ["o_proj", "attn_read"]},
    "biases, head": {"bias": "all", "modules_to_save": ["lm_head"]},
    "some layers": {"layers_to_transform": [1, 3], "target_modules": ["q_proj"]},
    "pattern": {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|v)_proj"},
    "all-linear": {"target_modules": "all-linear"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_pass_and_routing_survives_save_load_merge_and_save_again(options, graft, token_ids, tmp_path):
    def fresh() -> DepthRouteForCausalLM:
        return graft("wav", depth_anchored=True)  # its reads have biases, which `bias="all"` looks for by name

    config = lora_config(fresh(), **options)
    for name, value in options.items():
        if name != "modules_to_save" and not isinstance(value, list):
            assert getattr(config, name) == value, name
    assert set(config.modules_to_save) == {*routing_module_names(fresh()), *options.get("modules_to_save", [])}
    model = get_peft_model(fresh(), config).eval()
    shake(model)
    trained = routing_of(model)
    logits = model(token_ids).logits
    assert not torch.allclose(logits, fresh()(token_ids).logits, atol=1e-2)

    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(fresh(), tmp_path / "adapter").eval()
    assert_routing(loaded, trained)
    assert torch.equal(loaded(token_ids).logits, logits)

    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_routing(merged, trained)
    # 1e-5 of the largest logit: low-rank products are rounded into the weights
    torch.testing.assert_close(merged(token_ids).logits, logits, rtol=0, atol=1e-5 * logits.abs().max().item())


def test_experts_are_adapted_through_their_parameters(token_ids, tmp_path):
    config = lora_config(sparse(), r=2)
    assert set(config.target_parameters) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    model = get_peft_model(sparse(), config).eval()
    assert torch.equal(model(token_ids).logits, sparse()(token_ids).logits)
    names = [name for name, parameter in model.named_parameters() if "lora_A" in name and parameter.requires_grad]
    # 4 layers of attention, 3 projections of the dense layer, 2 tensors of experts in each of the others
    assert len(names) == 4 * 4 + 3 + 3 * 2 and not any("mlp.gate." in name for name in names)
    shake(model, 0.05)
    trained, logits = routing_of(model), model(token_ids).logits
    model.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(sparse(), tmp_path / "adapter").eval()
    assert torch.equal(loaded(token_ids).logits, logits)
    merged = loaded.merge_and_unload()
    assert_routing(merged, trained)
    torch.testing.assert_close(merged(token_ids).logits, logits, rtol=0, atol=1e-5 * logits.abs().max().item())


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=["dora", "dropout"])
def test_what_experts_cannot_have_is_refused_with_the_way_out(option, token_ids):
    [name] = option
    with pytest.raises(Refused, match=rf"{name}: got .* with adapters on experts.*allowed: .*target_parameters=\[\]"):
        lora_config(sparse(), **option)
    model = get_peft_model(sparse(), lora_config(sparse(), target_parameters=[], **option))
    model(token_ids, labels=token_ids).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "lora_B" in name)


BAD = {
    "none": ({}, r"modules_to_save: got none, without attn_read, mlp_read the routing is frozen and not saved"),
    "one of two": ({"modules_to_save": ["attn_read"]}, r"modules_to_save: got attn_read, without mlp_read .*allowed: with"),
    "head alone": ({"modules_to_save": ["lm_head"]}, r"modules_to_save: got lm_head, without attn_read, mlp_read"),
    "target": ({"target_modules": ["q_proj", "mlp_read"]}, r"target_modules: got mlp_read, q_proj, which hits model\.layers\.0\.mlp_read"),
    "pattern": ({"target_modules": r".*\.(q_proj|attn_read)"}, r"target_modules: got .*, which hits model\.layers\.1\.attn_read"),
    "parameter": ({"target_parameters": ["mlp_read.query"]}, r"target_parameters: got mlp_read.query, which hits"),
    "replicated": ({"layer_replication": [(0, 8), (4, 8)]}, r"layer_replication: got \[\(0, 8\), \(4, 8\)\], allowed: None"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "message"), BAD.values(), ids=BAD)
def test_configurations_that_freeze_or_drop_the_routing_are_refused(values, message, graft):
    model = graft("delta", depth_anchored=True)
    config = LoraConfig(**{"target_modules": ["q_proj"], **values})
    with pytest.raises(Refused, match=message) as caught:
        check_adapter_config(model, config)
    assert "\n" not in str(caught.value)
    if "modules_to_save" not in values and values:  # `lora_config` adds modules_to_save, and refuses the rest
        with pytest.raises(Refused, match=message):
            lora_config(model, **values)


def test_good_configurations_pass(graft):
    model = graft("delta", depth_anchored=True)
    check_adapter_config(model, LoraConfig(target_modules="all-linear", modules_to_save=["attn_read", "mlp_read"]))
    check_adapter_config(model, LoKrConfig(target_modules=["q_proj"], modules_to_save=["attn_read", "mlp_read"]))
    check_adapter_config(model, IA3Config(modules_to_save=["attn_read", "mlp_read", "lm_head"]))
    check_adapter_config(graft("standard"), LoraConfig(target_modules=["q_proj"]))


def test_methods_without_modules_to_save_are_refused(graft):
    with pytest.raises(Refused, match="modules_to_save: got none"):
        check_adapter_config(graft("dar", depth_anchored=True), PromptTuningConfig(num_virtual_tokens=2))


@pytest.mark.parametrize("preset", ["rezero", "layerscale"])
def test_scales_are_refused(preset, graft):
    model = graft(preset, depth_anchored=True)
    with pytest.raises(Refused, match="modules_to_save: got attn_scale and mlp_scale, .*which PEFT cannot save"):
        lora_config(model)
    with pytest.raises(Refused, match="which PEFT cannot save"):
        check_adapter_config(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["attn_scale", "mlp_scale"]))


def test_a_model_without_routing_needs_none_of_it(graft):
    with pytest.raises(Refused, match="model: got one without routing"):
        lora_config(graft("standard"))


def test_trainer_refuses_adapters_that_drop_the_routing(graft, tmp_path):
    args = DepthRouteTrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True)
    bad = get_peft_model(graft("delta", depth_anchored=True), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(Refused, match="modules_to_save: got none"):
        DepthRouteTrainer(model=bad, args=args)
    # the adapter in use counts
    model = graft("delta", depth_anchored=True)
    model = get_peft_model(model, lora_config(model))
    model.add_adapter("bad", LoraConfig(target_modules=["q_proj"]))
    DepthRouteTrainer(model=model, args=args)
    model.set_adapter("bad")
    with pytest.raises(Refused, match="modules_to_save: got none"):
        DepthRouteTrainer(model=model, args=args)
    # transformers' own Trainer trains beside a routing that is to stay as it is
    Trainer(model=model, args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True))


def test_heads_of_other_tasks(graft):
    config = tiny_config("delta")
    config.num_labels = 3
    model = DepthRouteForSequenceClassification(config)
    made = lora_config(model)
    assert made.task_type == "SEQ_CLS"
    saved = {n for n, p in get_peft_model(model, made).named_parameters() if p.requires_grad and "lora_" not in n}
    assert any("score.modules_to_save" in name for name in saved) and any("attn_read" in name for name in saved)
    bare = DepthRouteModel(config)
    assert lora_config(bare).task_type == "FEATURE_EXTRACTION"
    with pytest.raises(Refused, match=r"which hits layers\.1\.attn_read"):
        lora_config(bare, target_modules=r"layers\.\d+\.attn_read")


def test_auto_class_finds_base_and_adapter(model_folder, token_ids, tmp_path):
    folder = model_folder("rd-attnres")
    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, lora_config(base)).eval()
    shake(model)
    trained, logits = routing_of(model), model(token_ids).logits
    model.save_pretrained(tmp_path / "adapter")
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert_routing(again, trained)
    assert torch.equal(again(token_ids).logits, logits)
    # to train on: the routing of the loaded adapter requires gradients again
    further = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", is_trainable=True)
    assert all(parameter.requires_grad for parameter in routing_parameters(further).values())


def test_each_adapter_has_its_own_routing_and_none_the_base_models(graft, token_ids, tmp_path):
    base = graft("attnres-block", depth_anchored=True)
    randomize_routing(base)
    start, plain = routing_of(base), base(token_ids).logits
    model = get_peft_model(base, lora_config(base), adapter_name="first").eval()
    model.add_adapter("second", lora_config(model))
    routing, logits = {}, {}
    for seed, name in enumerate(("first", "second")):
        model.set_adapter(name)
        assert_routing(model, start)  # copies of the base model's, also the second
        shake(model, seed=seed)
        routing[name], logits[name] = routing_of(model), model(token_ids).logits
    assert not torch.allclose(logits["first"], logits["second"], atol=1e-2)
    for name in ("first", "second"):
        model.set_adapter(name)
        assert_routing(model, routing[name])
        assert torch.equal(model(token_ids).logits, logits[name])
        assert all(parameter.requires_grad for parameter in routing_parameters(model).values())
    with model.disable_adapter():
        assert_routing(model, start)
        assert torch.equal(model(token_ids).logits, plain)
    with pytest.raises(ValueError, match="multiple|one adapter"):
        model.base_model.set_adapter(["first", "second"])  # there is one routing at a time

    model.save_pretrained(tmp_path)
    fresh = graft("attnres-block", depth_anchored=True)
    randomize_routing(fresh)
    loaded = PeftModel.from_pretrained(fresh, tmp_path / "first", adapter_name="first").eval()
    loaded.load_adapter(tmp_path / "second", adapter_name="second")
    for name in ("second", "first"):
        loaded.set_adapter(name)
        assert torch.equal(loaded(token_ids).logits, logits[name])
    loaded.delete_adapter("first")
    loaded.set_adapter("second")
    assert_routing(loaded, routing["second"])
