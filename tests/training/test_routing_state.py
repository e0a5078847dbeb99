# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The routing by itself: saved, loaded onto a fresh conversion, and refused where it does not fit."""

import json

import pytest
import torch
from conftest import randomize_routing
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from depthroute import DepthRouteForSequenceClassification
from depthroute.errors import Refused
from depthroute.training import freeze_base, load_routing, routing_module_names, routing_parameters, save_routing


# one of every kind of routing parameter
MODELS = {
    "attnres-block": {"depth_value_projection": True, "depth_null_source": True},
    "rd-attnres": {"depth_key_norm": "none"},
    "wav": {},
    "dar": {"dual_gates": "dynamic"},
    "mhc": {"hyper_num_streams": 2},
    "rezero": {},
    "layerscale": {},
}


@pytest.mark.parametrize("preset", MODELS)
def test_saved_and_loaded_onto_a_fresh_conversion(preset, graft, token_ids, tmp_path):
    trained, fresh = (graft(preset, depth_anchored=True, **MODELS[preset]) for _ in range(2))
    randomize_routing(trained)
    assert not torch.equal(trained(token_ids).logits, fresh(token_ids).logits)
    file = tmp_path / "routing.safetensors"
    save_routing(trained, file)
    load_routing(fresh, file)
    assert torch.equal(trained(token_ids).logits, fresh(token_ids).logits)
    assert load_file(file).keys() == trained.routing_parameters().keys()
    numbers = sum(parameter.numel() for parameter in trained.routing_parameters().values())
    assert 4 * numbers <= file.stat().st_size < 4 * numbers + 16384  # the vectors and a header, none of the base


def test_names_are_the_same_with_and_without_a_head(graft, tmp_path):
    model = graft("delta", depth_anchored=True)
    randomize_routing(model)
    save_routing(model, tmp_path / "routing.safetensors")
    head = DepthRouteForSequenceClassification(model.config)
    load_routing(head, tmp_path / "routing.safetensors")
    for name, parameter in routing_parameters(head.model).items():
        assert torch.equal(parameter, model.get_parameter(name))


@pytest.mark.parametrize(
    ("preset", "values", "message"),
    [
        ("attnres-block", {"depth_block_size": 4}, "depth_block_size: 2 in the file, 4 in the model"),
        ("delta-block", {}, "depth_combine: replace in the file, add in the model"),
        ("attnres-block", {"depth_anchored": False}, "depth_anchored: True in the file, False in the model"),
    ],
)
def test_other_fields_are_refused_by_name(preset, values, message, graft, tmp_path):
    save_routing(graft("attnres-block", depth_anchored=True), tmp_path / "routing.safetensors")
    other = graft(preset, **{"depth_anchored": True, **values})
    before = {name: parameter.clone() for name, parameter in other.routing_parameters().items()}
    with pytest.raises(Refused, match=message):
        load_routing(other, tmp_path / "routing.safetensors")
    assert all(torch.equal(parameter, before[name]) for name, parameter in other.routing_parameters().items())


def test_other_tensors_and_other_files_are_refused(graft, tmp_path):
    model = graft("delta", depth_anchored=True)
    file = tmp_path / "routing.safetensors"
    save_routing(model, file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert json.loads(metadata["depthroute"])["depth_combine"] == "add"
    tensors = load_file(file)
    name = "model.layers.3.attn_read.query"

    save_file({**tensors, name: torch.zeros(5)}, file, metadata)
    with pytest.raises(Refused, match=r"model\.layers\.3\.attn_read\.query: got \[5\], allowed: \[32\]"):
        load_routing(model, file)
    save_file({key: value for key, value in tensors.items() if key != name}, file, metadata)
    with pytest.raises(Refused, match=r"not in both file and model: model\.layers\.3\.attn_read\.query"):
        load_routing(model, file)
    save_file(tensors, file)
    with pytest.raises(Refused, match="its metadata has no entry 'depthroute'"):
        load_routing(model, file)
    file.write_text("no safetensors")
    with pytest.raises(Refused, match="allowed: a safetensors file"):
        load_routing(model, file)
    with pytest.raises(Refused, match=r"gone\.safetensors: no such file"):
        load_routing(model, tmp_path / "gone.safetensors")


def test_a_model_without_routing_is_refused(graft, stock, tmp_path):
    for model in (graft("standard"), stock):
        assert routing_parameters(model) == {} and routing_module_names(model) == []
        with pytest.raises(Refused, match="without routing parameters"):
            save_routing(model, tmp_path / "routing.safetensors")
        with pytest.raises(Refused, match="freeze_base: got a model without routing"):
            freeze_base(model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("preset", ["delta-block", *MODELS])
def test_freeze_base_leaves_the_routing_trainable(preset, graft):
    model = graft(preset, depth_anchored=True, **MODELS.get(preset, {}))
    freeze_base(model)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == model.routing_parameters().keys()
