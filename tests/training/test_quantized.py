# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What 8-bit and 4-bit loading would quantise, asked of the function with which transformers chooses: projections only, whatever
the preset and the head. Nothing is quantised here, so neither a GPU nor bitsandbytes is needed."""

import pytest
import torch
from conftest import PRESETS, tiny_config, tiny_qwen3_config
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from depthroute import (
    DepthRouteForCausalLM,
    DepthRouteForQuestionAnswering,
    DepthRouteForSequenceClassification,
    DepthRouteForTokenClassification,
    DepthRouteModel,
)


PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
HEADS = {
    DepthRouteForCausalLM: "lm_head",
    DepthRouteForSequenceClassification: "score",
    DepthRouteForTokenClassification: "score",
    DepthRouteForQuestionAnswering: "qa_outputs",
    DepthRouteModel: None,
}


def chosen(model) -> set[str]:
    """Paths of the modules that would be quantised."""
    skipped = HfQuantizer.get_modules_to_not_convert(model, None, model._keep_in_fp32_modules)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {name for name in linear if should_convert_module(name, skipped)}


def assert_projections_alone(model, layers: int, per_layer: int = 7) -> None:
    names = chosen(model)
    assert {name.rpartition(".")[2] for name in names} == PROJECTIONS
    assert len(names) == layers * per_layer
    quantised = {f"{name}.{leaf}" for name in names for leaf, _ in model.get_submodule(name).named_parameters()}
    assert not quantised & model.routing_parameters().keys()


CASES = {name: (name, {}) for name in PRESETS} | {
    "dynamic gates": ("dar", {"dual_gates": "dynamic"}),  # a parameter that is named like a projection
    "value projection, null source": ("attnres", {"depth_value_projection": True, "depth_null_source": True}),
}


@pytest.mark.smoke
@pytest.mark.parametrize(("preset", "values"), CASES.values(), ids=CASES)
def test_projections_alone_are_quantised(preset, values):
    assert_projections_alone(DepthRouteForCausalLM(tiny_config(preset, **values)), 8)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", HEADS, ids=lambda kind: kind.__name__)
def test_heads_are_left_alone(kind, tied):
    base = tiny_qwen3_config(num_hidden_layers=4, tie_word_embeddings=tied)
    model = kind(tiny_config("dar", base=base, dual_gates="dynamic"))
    assert_projections_alone(model, 4)
    if HEADS[kind] is not None:
        assert isinstance(model.get_submodule(HEADS[kind]), nn.Linear)  # the control: it would have been a candidate


def test_routers_and_experts_are_left_alone():
    """Fused experts are one parameter for all; bitsandbytes quantises modules."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = DepthRouteForCausalLM(tiny_config("delta-block", **experts))
    assert {name.rpartition(".")[2] for name in chosen(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("kind", [DepthRouteForTokenClassification, DepthRouteForQuestionAnswering])
def test_heads_with_a_bias_still_save_and_load(kind, tmp_path):
    torch.manual_seed(0)
    model = kind(tiny_config("delta"))
    torch.nn.init.normal_(model.get_parameter(f"{HEADS[kind]}.bias"))
    model.save_pretrained(tmp_path)
    again, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())
