# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The way back: a conversion that was never trained returns its source's tensors byte for byte; all else says so."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import QUERY_PRESETS, tiny_qwen3_config
from conversion_helpers import edit_json, edit_weights, save_checkpoint
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from depthroute import PRESETS, DepthRouteForCausalLM, convert, revert
from depthroute.errors import Refused
from depthroute_conversion.probes import COMPARED, probe_ids
from depthroute_conversion.way_back import WAY_BACK


def stored(folder: Path) -> dict[str, tuple[str, str, list[int], bytes]]:
    """Key → file, type, shape and bytes."""
    found = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for key, item in header.items():
            begin, end = (8 + length + offset for offset in item["data_offsets"])
            found[key] = (file.name, item["dtype"], item["shape"], raw[begin:end])
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_comes_back_byte_for_byte(preset, originals, converted, tmp_path):
    report = revert(converted("qwen3", preset), tmp_path / "back")
    assert report.identical and not report.differs and not report.dropped_routing
    assert stored(tmp_path / "back") == stored(originals["qwen3"])
    # mHC computes the standard function only nearly: what is lost is measured
    assert (report.loss is not None) == (preset == "mhc")
    # one file that safetensors wrote: the file itself, and what transformers wrote beside it
    for name in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "back" / name).read_bytes() == (originals["qwen3"] / name).read_bytes(), name
    left = {path.name for path in (tmp_path / "back").iterdir()}
    assert left == {path.name for path in originals["qwen3"].iterdir()} - {"README.md"}


@pytest.mark.parametrize("name", ["llama-bf16", "moe", "moe-fused", "tied", "sharded"])
def test_every_kind_of_source_comes_back(name, originals, converted, tmp_path):
    assert revert(converted(name), tmp_path / "back").identical
    assert stored(tmp_path / "back") == stored(originals[name])
    files = sorted(path.name for path in originals[name].iterdir() if "safetensors" in path.name)
    assert files == sorted(path.name for path in (tmp_path / "back").iterdir() if "safetensors" in path.name)
    if name == "sharded":
        index = "model.safetensors.index.json"
        assert json.loads((tmp_path / "back" / index).read_text()) == json.loads((originals[name] / index).read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    source = AutoModelForCausalLM.from_pretrained(originals[name])
    assert type(model) is type(source)
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, source(ids).logits)


def test_a_tied_head_that_was_spelled_out_and_other_headers_come_back(tmp_path):
    torch.manual_seed(0)
    source = save_checkpoint(Qwen3ForCausalLM(tiny_qwen3_config(tie_word_embeddings=True)), tmp_path / "source")
    edit_weights(
        source, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}), origin="elsewhere"
    )
    convert(source, tmp_path / "out")
    assert revert(tmp_path / "out", tmp_path / "back").identical
    assert stored(tmp_path / "back") == stored(source) and "lm_head.weight" in stored(source)
    with safe_open(tmp_path / "back" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "origin": "elsewhere"}


def test_a_plain_conversion_comes_back_with_what_its_function_loses(originals, converted, tmp_path):
    report = revert(converted("qwen3", "delta-block", anchored=False), tmp_path / "back")
    assert report.identical and report.loss.relative_difference > 0.05


def test_rotary_frequencies_of_old_releases_are_named(copy_of, tmp_path):
    source = copy_of("llama-bf16")
    edit_weights(source, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    convert(source, tmp_path / "out")
    report = revert(tmp_path / "out", tmp_path / "back")
    assert report.left_out == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert stored(tmp_path / "back").keys() == stored(source).keys() - set(report.left_out)


def test_nothing_in_the_folder_names_a_path(copy_of, tmp_path):
    source = copy_of("qwen3")
    edit_json(source / "config.json", _name_or_path="/home/somebody/models/x")
    convert(source, tmp_path / "out")
    for name in ("config.json", WAY_BACK):
        text = (tmp_path / "out" / name).read_text()
        assert "somebody" not in text and str(tmp_path) not in text
    assert "copy-of-qwen3" in (tmp_path / "out" / "config.json").read_text()


# -- what was trained -------------------------------------------------------------------------------------------------


def test_trained_routing_is_refused_or_dropped_with_its_loss(converted, originals, tmp_path, run_cli):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "trained"))
    key = "model.layers.3.attn_read.query"
    edit_weights(folder, lambda w: w[key].normal_())
    with pytest.raises(Refused, match=f"trained routing: 1 parameters have moved: {key}; allowed: --drop-routing"):
        revert(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    figures = tmp_path / "figures.json"
    code, out, err = run_cli("revert", folder, tmp_path / "back", "--drop-routing", "--json", figures)
    assert code == 0, err
    assert "lost with the routing" in out and "of their std), mean KL" in out and "byte for byte" in out
    assert stored(tmp_path / "back") == stored(originals["qwen3"])
    found = json.loads(figures.read_text())
    assert found["identical"] and found["dropped_routing"] == [key]
    # the loss, by an independent look at both folders
    trained, stock = (
        DepthRouteForCausalLM.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(tmp_path / "back"),
    )
    rows, largest = [], 0.0
    with torch.no_grad():
        for ids in probe_ids(trained.config.vocab_size, trained.config.max_position_embeddings, [None]):
            before, after = (model(ids).logits[:, -COMPARED:].double() for model in (trained, stock))
            largest = max(largest, (before - after).abs().max().item())
            rows.append((before.softmax(-1) * (before.log_softmax(-1) - after.log_softmax(-1))).sum(-1).flatten())
    assert found["loss"]["mean_kl"] == pytest.approx(torch.cat(rows).mean().item(), rel=1e-4)
    assert found["loss"]["max_abs_difference"] == pytest.approx(largest, rel=1e-4)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("standard", *QUERY_PRESETS)])
def test_the_baselines_routing_counts_as_routing(preset, converted, tmp_path):
    folder = Path(shutil.copytree(converted("qwen3", preset), tmp_path / "trained"))
    key = {"mhc": "model.layers.2.attn_read.gate_bias"}.get(preset, "model.layers.2.mlp_scale")
    edit_weights(folder, lambda w: w[key].add_(0.5))
    with pytest.raises(Refused, match=f"trained routing: 1 parameters have moved: {key}"):
        revert(folder, tmp_path / "back")


def test_trained_weights_are_refused_or_returned_as_they_are(converted, tmp_path):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "trained"))
    key = "model.layers.2.mlp.up_proj.weight"
    edit_weights(folder, lambda w: w[key][0].add_(1))
    with pytest.raises(Refused, match=f"not the source's bytes: 1 tensors have changed since: {key}; allowed: --as-is"):
        revert(folder, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    report = revert(folder, tmp_path / "back", as_is=True)
    assert not report.identical and report.loss is None
    assert stored(tmp_path / "back")[key][3] == stored(folder)[key][3]


def test_a_folder_that_a_trainer_saved_still_knows_what_it_was(converted, originals, tmp_path):
    model = DepthRouteForCausalLM.from_pretrained(converted("llama-bf16"))
    with torch.no_grad():
        model.model.layers[3].mlp_read.query.normal_()
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(Refused, match=f"{WAY_BACK} is missing, the model was saved anew since; allowed: --as-is"):
        revert(tmp_path / "trained", tmp_path / "back", drop_routing=True)
    report = revert(tmp_path / "trained", tmp_path / "back", drop_routing=True, as_is=True)
    assert report.architecture == "LlamaForCausalLM" and report.loss.max_abs_difference > 0
    ours = {key: item[1:] for key, item in stored(tmp_path / "back").items()}
    assert ours == {key: item[1:] for key, item in stored(originals["llama-bf16"]).items()}
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def saved_anew(folder: Path, out: Path, change) -> Path:
    """A conversion as a trainer leaves it, changed."""
    model = DepthRouteForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        change(model)
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize("routing", [False, True])
def test_a_vocabulary_that_has_grown_comes_along(routing, converted, tmp_path):
    def grow(model) -> None:
        model.resize_token_embeddings(120, mean_resizing=False)
        if routing:
            model.model.layers[3].mlp_read.query.normal_()

    folder = saved_anew(converted("qwen3"), tmp_path / "trained", grow)
    report = revert(folder, tmp_path / "back", as_is=True, drop_routing=routing)
    assert "configuration: vocab_size = 120" in report.differs
    assert (report.loss is not None) == routing
    ids = torch.arange(97, 120)[None]
    back, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back"), DepthRouteForCausalLM.from_pretrained(folder)
    assert torch.equal(back(ids).logits, ours(ids).logits) != routing


@pytest.mark.parametrize("name", ["qwen3", "llama-bf16", "tied"])
def test_other_positions_come_along(name, originals, converted, copy_of, tmp_path):
    def stretch(model) -> None:
        model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 77.0, "factor": 4.0}

    source = copy_of(name)
    rope = json.loads((source / "config.json").read_text())["rope_parameters"]
    edit_json(source / "config.json", rope_parameters=None, rope_scaling=None, rope_theta=rope["rope_theta"])
    convert(source, tmp_path / "out", verify=False)
    folder = saved_anew(tmp_path / "out", tmp_path / "trained", stretch)
    report = revert(folder, tmp_path / "back", as_is=True)
    assert any(line.startswith("configuration: rope_parameters = ") for line in report.differs)
    assert not {"rope_theta", "rope_scaling"} & set(json.loads((tmp_path / "back" / "config.json").read_text()))
    ids = torch.arange(40)[None]
    back, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "back"), DepthRouteForCausalLM.from_pretrained(folder)
    assert torch.equal(back(ids).logits, ours(ids).logits)


def test_what_the_stock_class_cannot_be_is_refused(converted, tmp_path):
    folder = Path(shutil.copytree(converted("llama-bf16"), tmp_path / "trained"))
    (folder / WAY_BACK).unlink()
    edit_json(folder / "config.json", use_sliding_window=True, sliding_window=8, layer_types=None, max_window_layers=0)
    with pytest.raises(Refused, match="which LlamaForCausalLM has no place for"):
        revert(folder, tmp_path / "back", as_is=True)
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]


# -- what has no way back ---------------------------------------------------------------------------------------------


def test_another_type_is_refused(originals, tmp_path):
    convert(originals["qwen3"], tmp_path / "out", dtype="bfloat16")
    with pytest.raises(Refused, match=r"not the source's bytes: dtype: torch.float32 became torch.bfloat16"):
        revert(tmp_path / "out", tmp_path / "back")
    report = revert(tmp_path / "out", tmp_path / "back", as_is=True)
    assert not report.identical
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="auto").dtype == torch.bfloat16


def test_a_cast_to_the_type_it_has_is_none(originals, tmp_path):
    convert(originals["qwen3"], tmp_path / "out", dtype="float32")
    assert revert(tmp_path / "out", tmp_path / "back").identical


def test_what_is_no_conversion_is_refused(originals, converted, tmp_path):
    with pytest.raises(Refused, match="got model_type 'qwen3'"):
        revert(originals["qwen3"], tmp_path / "back")
    DepthRouteForCausalLM(
        DepthRouteForCausalLM.config_class.from_preset("delta", base=tiny_qwen3_config())
    ).save_pretrained(tmp_path / "scratch")
    with pytest.raises(Refused, match="config.json: no converted_from, allowed: a conversion of a stock model"):
        revert(tmp_path / "scratch", tmp_path / "back")
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "damaged"))
    (folder / WAY_BACK).write_text("{")
    with pytest.raises(Refused, match=f"{WAY_BACK}: JSONDecodeError"):
        revert(folder, tmp_path / "back")
    with pytest.raises(Refused, match="the output is the source"):
        revert(converted("qwen3"), converted("qwen3"), overwrite=True)


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors", "config.json"])
def test_a_record_cannot_reach_outside(name, converted, tmp_path):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "edited"))
    entries = json.loads((folder / WAY_BACK).read_text())
    entries["files"] = {name: entries["files"]["model.safetensors"]}
    (folder / WAY_BACK).write_text(json.dumps(entries))
    with pytest.raises(Refused, match=f"{WAY_BACK}: ValueError"):
        revert(folder, tmp_path / "back")


FILE = "model.safetensors"


@pytest.mark.parametrize("damage", [
    lambda e: e["files"][FILE]["keys"].pop(),
    lambda e: e["files"][FILE]["keys"].append(e["files"][FILE]["keys"][0]),
    lambda e: e["files"][FILE]["keys"].append("x"),
    lambda e: e["files"][FILE].update(keys=5),
    lambda e: e["tensors"].popitem(),
    lambda e: e.update(files={}),
    lambda e: e.update(index=[]),
    lambda e: e.update(differs=[1]),
    lambda e: e.update(format=3),
    lambda e: e.clear(),
])  # fmt: skip
def test_a_damaged_record_is_refused_in_one_line(damage, converted, tmp_path):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "edited"))
    entries = json.loads((folder / WAY_BACK).read_text())
    damage(entries)
    (folder / WAY_BACK).write_text(json.dumps(entries))
    with pytest.raises(Refused, match=f"{WAY_BACK}: .*, allowed: as `depthroute convert` wrote it"):
        revert(folder, tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["edited"]


@pytest.mark.parametrize("damage", [
    lambda e: 5,
    lambda e: {},
    lambda e: {**e, "config": "abc"},
    lambda e: {**e, "architecture": ["Qwen3ForCausalLM"]},
    lambda e: {**e, "more": 1},
])  # fmt: skip
def test_a_damaged_entry_of_the_configuration_is_refused_in_one_line(damage, converted, tmp_path):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "edited"))
    before = json.loads((folder / "config.json").read_text())["converted_from"]
    edit_json(folder / "config.json", converted_from=damage(before))
    with pytest.raises(Refused, match="config.json: converted_from: .*, allowed: as `depthroute convert` wrote it"):
        revert(folder, tmp_path / "back")


def test_what_a_model_was_is_written_once_and_old_folders_that_have_it_twice_are_read(converted, originals, tmp_path):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "old"))
    record, config = (json.loads((folder / name).read_text()) for name in (WAY_BACK, "config.json"))
    assert "origin" not in record and "config" not in record and config["converted_from"]["source"] == "tiny-qwen3"
    (folder / WAY_BACK).write_text(json.dumps({**record, "format": 1, "origin": config["converted_from"]}))
    assert revert(folder, tmp_path / "back").identical and stored(tmp_path / "back") == stored(originals["qwen3"])
    # and handed on as it is written today
    convert(folder, tmp_path / "wav", "wav", verify=False)
    assert "origin" not in json.loads((tmp_path / "wav" / WAY_BACK).read_text())
    assert revert(tmp_path / "wav", tmp_path / "again").identical
    assert stored(tmp_path / "again") == stored(originals["qwen3"])


def test_a_record_without_a_tensor_does_not_pass_for_whole(converted, tmp_path):
    folder = Path(shutil.copytree(converted("qwen3"), tmp_path / "edited"))
    entries = json.loads((folder / WAY_BACK).read_text())
    entries["tensors"].pop("model.norm.weight")
    entries["files"][FILE]["keys"].remove("model.norm.weight")
    (folder / WAY_BACK).write_text(json.dumps(entries))
    with pytest.raises(Refused, match=f"1 tensors are none of its source's, as {WAY_BACK} has them: model.norm.weight"):
        revert(folder, tmp_path / "back")
