# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Routing parameters survive every way of saving and loading, with the package and without it."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import randomize_routing, run_alone, tiny_config, tiny_qwen3_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import depthroute
from depthroute import PRESETS, DepthRouteForCausalLM, DepthRouteModel
from depthroute.modeling.configuration_depthroute import AUTO_MAP


MODELING = Path(depthroute.__file__).parent / "modeling"

# Runs where the package cannot be imported: loads each folder, saves it again, loads that after the first is gone.
ALONE = """
import os, shutil, sys
from pathlib import Path
from safetensors.torch import load_file
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

def check(model, expected):
    found = model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert not any("_read." in name or "_scale" in name for name in found.keys() - expected.keys())

torch.set_num_threads(1)
ids = torch.arange(1, 14).view(1, -1)
for folder in map(Path, sys.argv[1:]):
    expected = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules"), type(model)
    check(model, expected)
    logits = model(ids, output_routing=True).logits
    again = folder.parent / (folder.name + "-again")
    model.save_pretrained(again)
    shutil.rmtree(folder)
    model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
    check(model, expected)
    assert torch.equal(model(ids).logits, logits)
    if "attnres-v" not in again.name:
        continue
    os.chdir(again)
    model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True).eval()
    check(model, expected)
    assert torch.equal(model(ids).logits, logits)
    head = AutoModelForSequenceClassification.from_pretrained(".", trust_remote_code=True, num_labels=3)
    check(head.model, {name.removeprefix("model."): tensor for name, tensor in expected.items() if name != "lm_head.weight"})
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(".", trust_remote_code=True), trust_remote_code=True)
    assert all(p.abs().max() == 0 for n, p in fresh.named_parameters() if n.endswith("query"))
print("alone: ok")
"""


# every preset, and every kind of parameter that none of them has
SAVED = {
    **{preset: (preset, {"depth_anchored": True}) for preset in PRESETS},
    "custom": ("wav", {"depth_value_route": "average", "depth_value_projection": True, "depth_null_source": True}),
    "dar-dynamic": ("dar", {"dual_gates": "dynamic"}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder per preset, whose name has dots, with every routing parameter set to random values."""
    folder = tmp_path_factory.mktemp("trained")
    models = {}
    base = tiny_qwen3_config(num_hidden_layers=4)
    for name, (preset, values) in SAVED.items():
        torch.manual_seed(0)
        model = DepthRouteForCausalLM(tiny_config(preset, base=base, **values)).eval()
        randomize_routing(model)
        model.save_pretrained(folder / f"tiny.{name}-v0.1")
        models[name] = model
    return folder, models


@pytest.mark.smoke
@pytest.mark.parametrize("name", SAVED)
def test_through_our_class_and_through_auto_classes(name, trained, token_ids):
    folder, models = trained
    model, path = models[name], folder / f"tiny.{name}-v0.1"
    for load in (DepthRouteForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        loaded = load(path).eval()
        assert type(loaded) is DepthRouteForCausalLM
        assert loaded.state_dict().keys() == model.state_dict().keys()
        for key, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), key
        # a copy: what lies in a file is aligned to nothing, and products with one vector are rounded by where it lies
        assert torch.equal(deepcopy(loaded)(token_ids).logits, model(token_ids).logits)
    assert type(AutoModel.from_pretrained(path)) is DepthRouteModel
    assert AutoConfig.from_pretrained(path).preset_name == model.config.preset_name
    assert name not in PRESETS or model.config.preset_name == name


@pytest.mark.smoke
def test_alone_with_trust_remote_code(trained, tmp_path):
    folder, models = trained
    copies = [shutil.copytree(folder / f"tiny.{name}-v0.1", tmp_path / f"tiny.{name}-v0.1") for name in models]
    done = run_alone(ALONE, *map(str, copies), cache=tmp_path)
    assert done.returncode == 0 and "alone: ok" in done.stdout, done.stderr[-3000:]


def test_an_old_transformers_gives_one_line_alone_too(trained, tmp_path):
    folder, _ = trained
    code = """
import sys, transformers
transformers.__version__ = "5.16.2"
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""
    done = run_alone(code, str(folder / "tiny.attnres-v0.1"), cache=tmp_path)
    assert done.returncode != 0
    assert "DepthRoute needs transformers ≥ 5.17, found 5.16.2" in done.stderr.splitlines()[-1]


def test_a_saved_folder_holds_its_code_and_its_whole_auto_map(trained):
    folder = trained[0] / "tiny.attnres-v0.1"
    assert json.loads((folder / "config.json").read_text())["auto_map"] == AUTO_MAP
    copied = {path.name for path in folder.glob("*.py")}
    assert copied == {path.name for path in MODELING.glob("*.py")} - {"__init__.py"}
    for name in copied:
        assert (folder / name).read_bytes() == (MODELING / name).read_bytes()


def test_one_missing_parameter_leaves_its_neighbours_trained(trained, tmp_path):
    folder, models = trained
    shutil.copytree(folder / "tiny.attnres-v0.1", tmp_path / "copy")
    tensors = load_file(tmp_path / "copy" / "model.safetensors")
    lost = "model.layers.3.mlp_read.query"
    del tensors[lost]
    save_file(tensors, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    loaded = DepthRouteForCausalLM.from_pretrained(tmp_path / "copy").state_dict()
    assert loaded[lost].abs().max() == 0
    for name, tensor in models["attnres"].state_dict().items():
        assert name == lost or torch.equal(loaded[name], tensor), name


def assert_at_start(model):
    """By the last part of its name, what a parameter starts at; `gate_bias` and LayerScale have tests of their own."""
    start = {"key_norm": 1.0, "detail_bias": -2.0, "gate_scale": 0.01}
    elsewhere = ("gate_bias", "gate_logits", "attn_scale", "mlp_scale")
    fresh = DepthRouteForCausalLM(model.config)  # no meta device, no checkpoint
    assert model.routing_parameters()
    for name, parameter in model.routing_parameters().items():
        part = name.split(".")[-1]
        if part in elsewhere:
            expected = fresh.get_parameter(name).to(parameter.dtype)
            assert expected.abs().max() > 0 or part == "attn_scale" or len(expected) == 1, name
        elif part == "value_proj":
            expected = torch.eye(len(parameter), dtype=parameter.dtype)
        else:
            expected = torch.full_like(parameter, start.get(part, 0.0))
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["attnres", "custom", "dar-dynamic", "mhc", "layerscale"])
def test_initial_values(name, dtype, stock, tmp_path):
    preset, values = SAVED[name]
    config = tiny_config(preset, base=stock.config, **{**values, "depth_anchored": False})
    assert_at_start(AutoModelForCausalLM.from_config(config, dtype=dtype))
    stock.save_pretrained(tmp_path)
    # plain base weights; from_pretrained itself builds the model on the meta device
    assert_at_start(DepthRouteForCausalLM.from_pretrained(tmp_path, config=config, dtype=dtype))
    with torch.device("meta"):
        model = DepthRouteForCausalLM(config)
    model.to_empty(device="cpu").to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.init_weights()
    assert_at_start(model)
