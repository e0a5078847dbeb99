# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Routing parameters survive every way of saving and loading, with the package and without it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import randomize_routing, run_alone, tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import depthroute
from depthroute import DepthRouteForCausalLM, DepthRouteModel
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
    for name in found:
        if name.endswith(("query", "key_norm")):
            assert name in expected, name

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


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder per preset, whose name has dots, with every routing parameter set to random values."""
    folder = tmp_path_factory.mktemp("trained")
    models = {}
    for preset in ("attnres", "delta-block"):
        torch.manual_seed(0)
        model = DepthRouteForCausalLM(tiny_config(preset, depth_anchored=True)).eval()
        randomize_routing(model)
        model.save_pretrained(folder / f"tiny.{preset}-v0.1")
        models[preset] = model
    return folder, models


@pytest.mark.smoke
def test_through_our_class_and_through_auto_classes(trained, token_ids):
    folder, models = trained
    for preset, model in models.items():
        path = folder / f"tiny.{preset}-v0.1"
        for load in (DepthRouteForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
            loaded = load(path).eval()
            assert type(loaded) is DepthRouteForCausalLM
            assert loaded.state_dict().keys() == model.state_dict().keys()
            for name, tensor in model.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], tensor), name
            assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)
        assert type(AutoModel.from_pretrained(path)) is DepthRouteModel
        assert AutoConfig.from_pretrained(path).preset_name == preset


@pytest.mark.smoke
def test_alone_with_trust_remote_code(trained, tmp_path):
    folder, models = trained
    copies = [shutil.copytree(folder / f"tiny.{preset}-v0.1", tmp_path / f"tiny.{preset}-v0.1") for preset in models]
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
    for name, parameter in model.routing_parameters().items():
        start = torch.ones_like(parameter) if name.endswith("key_norm") else torch.zeros_like(parameter)
        assert torch.equal(parameter, start), name
    assert model.routing_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_initial_values(dtype, stock, tmp_path):
    config = tiny_config("attnres", base=stock.config)
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
