# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Qwen3-MoE backbones: sparse experts under every preset, in both layouts of their weights."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from conftest import EXACT_PRESETS, PRESETS, randomize_routing, run_alone, tiny_config
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoeForSequenceClassification,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from depthroute import DepthRouteConfig, DepthRouteForCausalLM, DepthRouteForSequenceClassification


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
LAYOUTS = pytest.mark.parametrize("layout", ["per-expert", "fused"])


def tiny_moe_config(**values) -> Qwen3MoeConfig:
    """Four layers, the second of them dense, four experts of which two serve a token."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.05,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
        "max_position_embeddings": 256,
    }
    return Qwen3MoeConfig(**{**sizes, **values})


@pytest.fixture(scope="module")
def sparse():
    """A stock Qwen3-MoE with random weights. Do not change it."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(tiny_moe_config()).eval()


@pytest.fixture(scope="module")
def graft_sparse(sparse):
    def build(preset, **values):
        model = DepthRouteForCausalLM(tiny_config(preset, base=sparse.config, **values)).eval()
        result = model.load_state_dict(sparse.state_dict(), strict=False)
        assert not result.unexpected_keys and set(result.missing_keys) == set(model.routing_parameters())
        return model

    return build


@pytest.fixture(scope="module")
def folders(sparse, tmp_path_factory):
    """The stock model in both layouts, each proved to be what its name says."""
    folder = tmp_path_factory.mktemp("sparse")
    sparse.save_pretrained(folder / "per-expert")
    sparse.save_pretrained(folder / "fused", save_original_format=False)
    names = {layout: set(load_file(folder / layout / "model.safetensors")) for layout in ("per-expert", "fused")}
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names["per-expert"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names["fused"] - names["per-expert"]
    return folder


@pytest.mark.smoke
@DTYPES
@pytest.mark.parametrize("preset", ["standard", *EXACT_PRESETS])
def test_anchored_sparse_models_equal_the_source(preset, dtype, graft_sparse, sparse, token_ids):
    """Logits, loss, the balance loss of the expert routers and their logits, bit for bit."""
    values = {} if preset == "standard" else {"depth_anchored": True}
    model, source = graft_sparse(preset, **values).to(dtype), deepcopy(sparse).to(dtype)
    expected = source(token_ids, labels=token_ids, output_router_logits=True)
    output = model(token_ids, labels=token_ids, output_router_logits=True)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.aux_loss, expected.aux_loss)
    assert len(output.router_logits) == len(expected.router_logits) == 3
    assert all(map(torch.equal, output.router_logits, expected.router_logits))
    # as upstream: without being asked for, no router logits and no balance loss
    plain, expected_plain = model(token_ids, labels=token_ids), source(token_ids, labels=token_ids)
    assert plain.router_logits is None and plain.aux_loss is None
    assert torch.equal(plain.loss, expected_plain.loss) and plain.loss < output.loss
    if preset != "standard":
        randomize_routing(model)
        assert not torch.equal(model(token_ids).logits, expected.logits)


def test_sparse_mhc_reports_its_gap(graft_sparse, sparse, token_ids):
    expected = sparse(token_ids).logits
    gap = (graft_sparse("mhc")(token_ids).logits - expected).abs().max() / expected.std()
    # mHC's own eps; no token is so near to a tie that another expert takes it
    assert 0 < gap < 1e-3


def test_gradients_equal_the_source(graft_sparse, sparse, token_ids):
    model, source = graft_sparse("standard").train(), deepcopy(sparse).train()
    for either in (model, source):
        either(token_ids, labels=token_ids, output_router_logits=True).loss.backward()
    for name, parameter in source.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, parameter.grad), name


@pytest.mark.parametrize("preset", ["rd-attnres", "dar", "mhc", "layerscale"])
def test_everything_learns(preset, graft_sparse, token_ids):
    model = graft_sparse(preset).train()
    randomize_routing(model)
    model(token_ids, labels=token_ids, output_router_logits=True).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    assert model.model.layers[0].mlp.gate.weight.grad.norm() > 0


@LAYOUTS
def test_both_layouts_load(layout, folders, sparse, token_ids):
    config = tiny_config("dar", base=folders / layout, depth_anchored=True)
    model, report = DepthRouteForCausalLM.from_pretrained(folders / layout, config=config, output_loading_info=True)
    assert set(report["missing_keys"]) == set(model.routing_parameters())
    assert not report["unexpected_keys"] and not report["mismatched_keys"]
    assert torch.equal(model.eval()(token_ids).logits, sparse(token_ids).logits)


ALONE = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)  # as where the expected logits were made
for folder in map(Path, sys.argv[1:]):
    expected = torch.load(folder.parent / "expected.pt")
    model, report = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    assert not any(report.values()), report
    assert torch.equal(model.eval()(expected["ids"]).logits, expected["logits"]), folder
    again = folder.parent / (folder.name + "-again")
    model.save_pretrained(again)
    model, report = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(model.eval()(expected["ids"]).logits, expected["logits"]), again
print("alone: ok")
"""


@pytest.mark.smoke
def test_saved_and_loaded_with_the_package_and_without(graft_sparse, token_ids, tmp_path):
    # what is loaded without the package computes by the reference
    model = graft_sparse("rd-attnres", depth_backend="reference")
    randomize_routing(model)
    logits = model(token_ids).logits.detach()
    torch.save({"ids": token_ids, "logits": logits}, tmp_path / "expected.pt")
    paths = {layout: tmp_path / layout for layout in ("per-expert", "fused")}
    model.save_pretrained(paths["per-expert"])
    model.save_pretrained(paths["fused"], save_original_format=False)
    assert "model.layers.3.mlp.experts.0.down_proj.weight" in load_file(paths["per-expert"] / "model.safetensors")
    assert "model.layers.3.mlp.experts.down_proj" in load_file(paths["fused"] / "model.safetensors")
    for path in paths.values():
        for load in (DepthRouteForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
            loaded = load(path).eval()
            assert type(loaded) is DepthRouteForCausalLM
            for name, tensor in model.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], tensor), name
            assert torch.equal(loaded(token_ids).logits, logits)
    done = run_alone(ALONE, *map(str, paths.values()), cache=tmp_path)
    assert done.returncode == 0 and "alone: ok" in done.stdout, done.stderr[-3000:]


# what the backbone says → which of its four layers are sparse
SPARSE_LAYERS = {
    "all": ({"mlp_only_layers": []}, [0, 1, 2, 3]),
    "but two": ({"mlp_only_layers": [0, 3]}, [1, 2]),
    "every second": ({"mlp_only_layers": [], "decoder_sparse_step": 2}, [1, 3]),
    "both rules": ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [3]),
}


@pytest.mark.parametrize("case", SPARSE_LAYERS)
def test_which_layers_are_sparse(case, token_ids):
    values, expected = SPARSE_LAYERS[case]
    torch.manual_seed(0)
    source = Qwen3MoeForCausalLM(tiny_moe_config(**values)).eval()
    model = DepthRouteForCausalLM(tiny_config("delta-block", base=source.config, depth_anchored=True)).eval()
    kinds = [type(layer.mlp) for layer in model.model.layers]
    assert kinds == [Qwen3MoeSparseMoeBlock if layer in expected else Qwen3MLP for layer in range(4)]
    model.load_state_dict(source.state_dict(), strict=False)
    assert torch.equal(model(token_ids).logits, source(token_ids).logits)


def test_a_sparse_backbone_keeps_its_settings(tmp_path):
    base = tiny_moe_config(tie_word_embeddings=True, num_experts=6, output_router_logits=True)
    base.save_pretrained(tmp_path)
    for source in (base, tmp_path):
        config = DepthRouteConfig.from_preset("wav", base=source)
        for name in (
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "mlp_only_layers",
            "decoder_sparse_step",
            "norm_topk_prob",
            "router_aux_loss_coef",
            "output_router_logits",
            "tie_word_embeddings",
        ):
            assert getattr(config, name) == getattr(base, name), name
        assert config.qk_norm and config.preset_name == "wav" and not hasattr(config, "num_local_experts")
    config.save_pretrained(tmp_path / "ours")
    assert DepthRouteConfig.from_pretrained(tmp_path / "ours").num_experts == 6
    # and from one of ours the experts stay as the backbone's they are
    assert DepthRouteConfig.from_preset("delta", base=config).num_experts == 6


def test_a_sliding_window_is_every_layer_s(token_ids):
    """Qwen3-MoE has one mask for all layers, where Qwen3 counts layers from `max_window_layers` on."""
    torch.manual_seed(0)
    source = Qwen3MoeForCausalLM(tiny_moe_config(use_sliding_window=True, sliding_window=3)).eval()
    model = DepthRouteForCausalLM(tiny_config("standard", base=source.config)).eval()
    model.load_state_dict(source.state_dict())
    expected = source(token_ids).logits
    assert torch.equal(model(token_ids).logits, expected)
    source.config.sliding_window = None
    for layer in source.model.layers:
        layer.self_attn.sliding_window = None
    assert not torch.equal(source(token_ids).logits, expected)  # the window is shorter than the text


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("preset", ["delta-block", "dar"])
def test_checkpointing_changes_no_gradient(preset, reentrant, graft_sparse, token_ids, float64_norms):
    model = graft_sparse(preset, depth_anchored=True).double().train()
    randomize_routing(model)
    model.set_experts_implementation("eager")  # grouped products have no float64

    def gradients():
        model.zero_grad()
        # reentrant, router logits have no gradient in upstream's models either: recorded where gradients are off
        balance = {} if reentrant else {"output_router_logits": True}
        model(token_ids, labels=token_ids, use_cache=False, **balance).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=reentrant))
    for name, gradient in gradients().items():
        # float64, but upstream's expert router and loss round to float32
        torch.testing.assert_close(
            gradient, expected[name], rtol=0, atol=1e-6 * expected[name].abs().max().item(), msg=name
        )


@pytest.mark.parametrize("preset", ["attnres-block", "rd-attnres", "dar", "mhc"])
def test_generation(preset, graft_sparse, token_ids):
    model = graft_sparse(preset)
    randomize_routing(model)
    greedy = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(token_ids, use_cache=True, **greedy)
    assert torch.equal(cached, model.generate(token_ids, use_cache=False, **greedy))


def test_routing_beside_router_logits(graft_sparse, token_ids):
    model = graft_sparse("rd-attnres")
    output = model(token_ids, output_routing=True, output_router_logits=True)
    assert len(output.router_logits) == 3 and output.router_logits[0].shape == (26, 4)
    assert output.routing["model.layers.2.attn_read"].value_weights is not None
    inner = model.model(token_ids, output_router_logits=True)
    assert all(map(torch.equal, inner.router_logits, output.router_logits))


def test_a_head_on_a_sparse_decoder(token_ids, tmp_path):
    torch.manual_seed(0)
    source = Qwen3MoeForSequenceClassification(tiny_moe_config(pad_token_id=0, num_labels=3)).eval()
    model = DepthRouteForSequenceClassification(tiny_config("wav", base=source.config, depth_anchored=True)).eval()
    weights = {name.replace("transformer.", "model."): tensor for name, tensor in source.state_dict().items()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) == set(model.routing_parameters())
    assert torch.equal(model(token_ids).logits, source(token_ids).logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_dense_models_have_no_experts():
    config = tiny_config("delta")
    assert config.num_experts == 0 and not any(config.is_sparse(layer) for layer in range(8))
    assert all(isinstance(layer.mlp, Qwen3MLP) for layer in DepthRouteForCausalLM(config).model.layers)
    assert set(PRESETS) == {"standard", "mhc", *EXACT_PRESETS}
