# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The model card: metadata that the hub reads, the figures of the verification, and no path of this machine."""

import shlex

import huggingface_hub
import pytest
from conversion_helpers import edit_json
from huggingface_hub import ModelCard

from depthroute import PRESETS, DepthRouteConfig, convert
from depthroute.errors import Refused
from depthroute_conversion.card import sections_of, template, topics_of
from depthroute_conversion.record import Facts


@pytest.fixture
def hub(originals, monkeypatch):
    """A stand-in for the hub that serves one local folder; the list of what was asked for."""
    asked = []

    def snapshot_download(repo_id, allow_patterns, ignore_patterns):
        asked.append((repo_id, allow_patterns))
        return str(originals["qwen3"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_card_of_a_local_source(originals, converted):
    card = ModelCard.load(converted("qwen3", anchored=False) / "README.md")
    assert card.data.library_name == "transformers" and card.data.pipeline_tag == "text-generation"
    assert card.data.license == "mit" and card.data.language == ["en"]
    assert set(card.data.tags) == {"depthroute", "delta-block", "custom_code"}
    assert card.data.base_model is None
    assert "not equal to the source at step 0" in card.text and "| `depth_block_size` | `1` |" in card.text
    assert "x = h + Σ p_i v_i" in card.text and "reads are plain" in card.text and "2605.18855" in card.text
    assert card.text.count("trust_remote_code=True") == 2
    assert "$" not in card.text and str(originals["qwen3"].parent) not in card.text


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_card_s_fields_are_of_the_routing(name, converted):
    """Not what hosts the backbone: that the output projection would have biases, if a Llama's attention had any."""
    text = (converted(name) / "README.md").read_text()
    assert "attention_output_bias" not in text and "qk_norm" not in text
    _, _, fields = text.partition("## Fields\n")
    assert "| `depth_block_size` | `1` |" in fields and "| `depth_anchored` | `True` |" in fields
    assert "attention_bias" not in fields


def test_card_of_a_hub_source(hub, tmp_path):
    report = convert("owner/tiny-model", tmp_path / "out")
    assert report.source == "owner/tiny-model"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.base_model == "owner/tiny-model" and "bitwise equal to the source" in card.text
    assert "The reads are anchored" in card.text
    # the configuration alone first: a source that is refused costs no download
    assert [patterns == ["config.json"] for _, patterns in hub] == [True, False]
    assert "*.safetensors" in hub[1][1] and not any("bin" in pattern for pattern in hub[1][1])


def test_a_hub_source_is_refused_before_its_weights_travel(hub, copy_of, tmp_path, monkeypatch):
    source = copy_of("qwen3")
    edit_json(source / "config.json", quantization_config={"quant_method": "awq"})
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo_id, **options: (asked.append(options), source)[1]
    )
    with pytest.raises(Refused, match="got 'awq'"):
        convert("owner/quantized", tmp_path / "out")
    assert len(asked) == 1


def test_the_command_on_the_card_repeats_the_conversion(originals, tmp_path, monkeypatch, run_cli):
    fields = {"depth_logit_scale": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    options = {"block_size": 3, "num_heads": 2, "dtype": "bfloat16", "anchored": False, "fields": fields}
    convert(originals["qwen3"], tmp_path / "out", "attnres-states", verify=False, **options)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "was not verified" in text
    command = next(line.strip() for line in text.splitlines() if line.startswith("    depthroute convert"))
    monkeypatch.chdir(originals["qwen3"].parent)
    arguments = shlex.split(command)[1:]
    assert arguments[1:3] == ["tiny-qwen3", "out"]
    arguments[2] = str(tmp_path / "again")
    code, _, err = run_cli(*arguments)
    assert code == 0, err
    first, again = (DepthRouteConfig.from_pretrained(tmp_path / name).to_dict() for name in ("out", "again"))
    assert first == again
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


# a phrase of each section, and the presets (with options) on whose card it stands
SECTIONS = {
    "The residual is the standard one": {"standard"},
    "The reads are anchored": {"attnres", "delta", "delta-block", "rd-attnres", "wav", "dar", "moe", "custom"},
    "The reads are plain": {"plain"},
    "No preset is spelled by its fields": {"custom"},
    "softmax p over what earlier depths wrote": {
        "attnres",
        "delta",
        "delta-block",
        "rd-attnres",
        "wav",
        "plain",
        "custom",
    },
    "### Value route": {"rd-attnres"},
    "### Details": {"wav"},
    "Two streams run through depth": {"dar", "moe"},
    "hyper_num_streams": {"mhc"},
    "its learned scale": {"rezero", "layerscale", "rezero plain"},
    "The scales start at one": {"rezero", "layerscale"},
    "The scales start at the paper's small values": {"rezero plain"},
    "### Experts": {"moe"},
    "output_routing": {"attnres", "delta", "delta-block", "rd-attnres", "wav", "dar", "moe", "plain", "custom"},
}
CARDS = {
    **{name: ("qwen3", name, {}) for name in PRESETS if name not in ("attnres-block", "attnres-states", "dar-full")},
    "moe": ("moe", "dar", {}),
    "plain": ("qwen3", "attnres-block", {"anchored": False}),
    "rezero plain": ("qwen3", "rezero", {"anchored": False}),
    "custom": ("qwen3", "delta-block", {"fields": {"depth_source": "state"}}),
}


@pytest.fixture(scope="module")
def cards(originals, tmp_path_factory):
    root, texts = tmp_path_factory.mktemp("cards"), {}
    for card, (source, preset, options) in CARDS.items():
        convert(originals[source], root / card, preset, verify=False, **options)
        texts[card] = (root / card / "README.md").read_text()
    return texts


@pytest.mark.parametrize("phrase", SECTIONS)
def test_a_section_stands_where_it_applies(phrase, cards):
    assert {card for card, text in cards.items() if phrase in text} == SECTIONS[phrase]


def test_no_section_is_without_a_topic_and_no_mark_is_left(cards):
    reached = set()
    for _, preset, options in CARDS.values():
        settings = {"depth_anchored": options.get("anchored", True), **options.get("fields", {})}
        reached |= topics_of(Facts("model", DepthRouteConfig.from_preset(preset, **settings), "DepthRouteForCausalLM"))
    # tests of their own, here and in test_refresh_card.py
    reached |= {"experts", "converted", "verified", "unverified", "trained", "evaluated"}
    assert sections_of(template()) <= reached | {"embedding", "classifier", "sentence_transformers"}
    for text in cards.values():
        assert "<!--" not in text and "$" not in text and "\n\n\n" not in text.split("# Conversion")[0]


def test_a_card_states_the_preset_that_its_fields_spell(originals, tmp_path):
    report = convert(originals["qwen3"], tmp_path / "out", fields={"depth_combine": "replace"}, verify=False)
    assert report.preset == "attnres-block"
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert PRESETS["attnres-block"].equation in card.text and "x = h + Σ" not in card.text
    assert "attnres-block" in card.data.tags and "--preset delta-block --set 'depth_combine=" in card.text


def test_names_with_spaces_are_quoted_in_the_command(copy_of, tmp_path):
    source = copy_of("qwen3").rename(tmp_path / "my $model")
    convert(source, tmp_path / "out; ls", verify=False)
    text = (tmp_path / "out; ls" / "README.md").read_text()
    command = next(line.strip() for line in text.splitlines() if line.startswith("    depthroute convert"))
    assert shlex.split(command)[2:4] == ["my $model", "out; ls"]


def test_a_source_card_without_metadata_is_ignored(copy_of, tmp_path):
    source = copy_of("qwen3")
    (source / "README.md").write_text("# no head\n\n---\n: : :\n---\n")
    convert(source, tmp_path / "out", verify=False)
    assert ModelCard.load(tmp_path / "out" / "README.md").data.license is None
