# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Models without a language head, rerankers and classifiers: the class follows from what a checkpoint holds, and no head is
ever made up."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_qwen3_config
from conversion_helpers import edit_json, edit_weights, save_checkpoint, tiny_llama_config, tiny_moe_config
from safetensors.torch import load_file
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    LlamaModel,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    Qwen3MoeModel,
)

from depthroute import (
    DepthRouteForCausalLM,
    DepthRouteForSequenceClassification,
    DepthRouteModel,
    convert,
    verify,
)
from depthroute.errors import CheckFailed, Refused


LABELS = {"id2label": {0: "no", 1: "yes", 2: "perhaps"}, "problem_type": "single_label_classification"}
CONFIG = {"num_hidden_layers": 4, "pad_token_id": 0}
IDS = torch.randint(1, 97, (3, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def embedding(tmp_path_factory) -> Path:
    """As the published ones are: no head, no prefix, tied, and the language model's name."""
    torch.manual_seed(0)
    model = Qwen3Model(tiny_qwen3_config(tie_word_embeddings=True, **CONFIG))
    folder = save_checkpoint(model, tmp_path_factory.mktemp("heads") / "tiny-embedding")
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    for name in ("1_Pooling", "2_Normalize"):
        (folder / name).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        '{"word_embedding_dimension": 32, "pooling_mode_lasttoken": true}'
    )
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "Instruct: "}}')
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(tiny_qwen3_config(tie_word_embeddings=True, **LABELS, **CONFIG))
    return save_checkpoint(model, tmp_path_factory.mktemp("heads") / "tiny-classifier")


def test_an_embedding_model_has_no_head(embedding, tmp_path):
    report = convert(embedding, tmp_path / "out")
    found = report.verification
    assert found.bitwise_equal and found.control_differs and found.control_difference > 0.05 * found.logits_std
    assert found.perturbed == "layers.3.mlp_read.query"
    assert report.decisions == [
        "architectures: got Qwen3ForCausalLM, taken as Qwen3Model: its keys have no language head and no prefix model."
    ]
    assert ("decided", report.decisions[0]) in report.rows()
    assert report.inert_reads and all(name.startswith("layers.0.") for name in report.inert_reads)
    entries = json.loads((tmp_path / "out" / "config.json").read_text())
    assert entries["architectures"] == ["DepthRouteModel"]
    keys = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert "embed_tokens.weight" in keys and not any("lm_head" in key or key.startswith("model.") for key in keys)
    stock = AutoModel.from_pretrained(embedding).eval()
    for auto in (AutoModel, DepthRouteModel):
        ours, loading = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert type(ours) is DepthRouteModel and not loading["missing_keys"] and not loading["unexpected_keys"]
        assert torch.allclose(ours(IDS).last_hidden_state, stock(IDS).last_hidden_state, atol=1e-5)
    verify(embedding, tmp_path / "out").check()


def test_modules_of_sentence_transformers_travel(embedding, tmp_path):
    report = convert(embedding, tmp_path / "out", verify=False)
    for name in ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"):
        assert (tmp_path / "out" / name).read_bytes() == (embedding / name).read_bytes() and name in report.kept_files


@pytest.mark.parametrize("preset", ["attnres-block", "dar", "mhc", "standard"])
def test_every_kind_of_residual_without_a_head(preset, embedding, tmp_path):
    blocks = {} if preset in ("mhc", "standard") else {"block_size": 2}
    found = convert(embedding, tmp_path / "out", preset, **blocks).verification
    assert found.control_differs and not found.changed and found.bitwise_equal == (preset != "mhc")


def test_a_change_in_a_model_without_head_is_found(embedding, tmp_path):
    convert(embedding, tmp_path / "out", verify=False)
    edit_weights(tmp_path / "out", lambda w: w["layers.2.mlp.up_proj.weight"][5].fill_(0.1))
    found = verify(embedding, tmp_path / "out")
    assert found.changed == ["layers.2.mlp.up_proj.weight"] and not found.bitwise_equal
    edit_weights(tmp_path / "out", lambda w: w["layers.2.mlp_read.query"].fill_(0.1))
    with pytest.raises(CheckFailed, match=r"trained routing: 1 parameters have moved: layers.2.mlp_read.query"):
        verify(embedding, tmp_path / "out").check()


SPELLINGS = {
    "declared as it is": lambda folder: edit_json(folder / "config.json", architectures=["Qwen3Model"]),
    "declared as nothing": lambda folder: edit_json(folder / "config.json", architectures=None),
    "with the prefix of a language model": lambda folder: (
        edit_json(folder / "config.json", architectures=["Qwen3Model"]),
        edit_weights(folder, lambda w: w.update({f"model.{key}": w.pop(key) for key in list(w)})),
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_spellings_of_a_model_without_head(spelling, embedding, tmp_path):
    source = Path(shutil.copytree(embedding, tmp_path / "source"))
    SPELLINGS[spelling](source)
    report = convert(source, tmp_path / "out")
    assert report.verification.bitwise_equal
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["DepthRouteModel"]
    assert report.decisions == (
        ["architectures: none given, Qwen3Model by its keys"] if spelling == "declared as nothing" else []
    )
    written, source_weights = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    assert all(torch.equal(written[key.removeprefix("model.")], tensor) for key, tensor in source_weights.items())


def test_a_language_model_without_the_prefix(tmp_path):
    torch.manual_seed(0)
    source = save_checkpoint(Qwen3ForCausalLM(tiny_qwen3_config(**CONFIG)), tmp_path / "source")
    edit_weights(source, lambda w: w.update({key.removeprefix("model."): w.pop(key) for key in list(w)}))
    edit_json(source / "config.json", architectures=["Qwen3Model"])
    report = convert(source, tmp_path / "out")
    assert report.verification.bitwise_equal
    assert report.decisions == [
        "architectures: got Qwen3Model, taken as Qwen3ForCausalLM: its keys have a language head"
    ]
    assert "model.layers.0.mlp.up_proj.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_reranker_is_a_language_model(tmp_path):
    torch.manual_seed(0)
    source = save_checkpoint(Qwen3ForCausalLM(tiny_qwen3_config(tie_word_embeddings=True)), tmp_path / "reranker")
    report = convert(source, tmp_path / "out")
    assert report.verification.bitwise_equal and not report.decisions
    assert isinstance(DepthRouteForCausalLM.from_pretrained(tmp_path / "out").lm_head, torch.nn.Linear)


@pytest.mark.parametrize(
    "model",
    [
        lambda: LlamaModel(tiny_llama_config(num_hidden_layers=4)),
        lambda: Qwen3MoeModel(tiny_moe_config(num_hidden_layers=4)),
    ],
    ids=["llama", "qwen3-moe"],
)
def test_other_backbones_without_a_head(model, tmp_path):
    torch.manual_seed(0)
    model().save_pretrained(tmp_path / "source")
    assert convert(tmp_path / "source", tmp_path / "out").verification.bitwise_equal


def test_a_classifier_keeps_its_scores(classifier, tmp_path):
    report = convert(classifier, tmp_path / "out")
    found = report.verification
    assert found.bitwise_equal and found.control_differs and not report.decisions
    source, written = load_file(classifier / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(source["score.weight"], written["score.weight"]) and "lm_head.weight" not in written
    ours, loading = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(ours) is DepthRouteForSequenceClassification and not loading["missing_keys"]
    assert (ours.config.id2label, ours.config.problem_type) == (LABELS["id2label"], LABELS["problem_type"])
    padded = torch.cat([IDS, torch.zeros(3, 2, dtype=torch.long)], dim=1)
    stock = AutoModelForSequenceClassification.from_pretrained(classifier)
    assert torch.allclose(ours(padded).logits, stock(padded).logits, atol=1e-4)
    edit_weights(tmp_path / "out", lambda w: w["score.weight"].mul_(1.5))
    found = verify(classifier, tmp_path / "out")
    assert found.changed == ["score.weight"] and not found.bitwise_equal


def test_a_classifier_without_a_padding_token(tmp_path):
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(tiny_qwen3_config(num_hidden_layers=4, num_labels=1))
    model.save_pretrained(tmp_path / "source")
    assert convert(tmp_path / "source", tmp_path / "out").verification.bitwise_equal


REFUSED = {
    "a classifier without its head": (
        "classifier",
        lambda folder: edit_weights(folder, lambda w: w.pop("score.weight")),
        "1 missing keys: score.weight",
    ),
    "a classifier with a second head": (
        "classifier",
        lambda folder: edit_weights(folder, lambda w: w.update({"lm_head.weight": torch.ones(97, 32)})),
        "1 unexpected keys: lm_head.weight",
    ),
    "a classifier of another number of labels": (
        "classifier",
        lambda folder: edit_json(folder / "config.json", id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1}),
        r"score.weight: got \[3, 32\], allowed: \[2, 32\]",
    ),
    "an embedding model that is called a classifier": (
        "embedding",
        lambda folder: edit_json(folder / "config.json", architectures=["Qwen3ForSequenceClassification"]),
        "1 missing keys: score.weight",
    ),
    "a pooling module of its own code": (
        "embedding",
        lambda folder: (folder / "modules.json").write_text('[{"type": "custom_st.Transformer", "path": ""}]'),
        "modules.json: type: got 'custom_st.Transformer', which is code of its own",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_no_head_is_made_up(case, tmp_path, request):
    name, damage, message = REFUSED[case]
    source = Path(shutil.copytree(request.getfixturevalue(name), tmp_path / "source"))
    damage(source)
    with pytest.raises(Refused, match=message):
        convert(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]
