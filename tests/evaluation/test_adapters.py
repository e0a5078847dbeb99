# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation with an adapter: its routing is used, and it scores as the merged model does."""

import pytest
import torch
from conftest import randomize_routing
from peft import LoraConfig, get_peft_model
from text_model_helpers import character_tokenizer, run_command, save_folder

from depthroute.errors import Refused
from depthroute.evaluation import evaluate
from depthroute.training import routing_module_names, routing_parameters


TASK = "depthroute_perplexity"


def score(model, **options) -> float:
    result = evaluate(model, TASK, 2, 3, device="cpu", bootstrap_iters=0, **options)
    return result["results"][TASK]["bits_per_byte,none"]


@pytest.fixture(scope="module")
def folders(graft, tmp_path_factory):
    """A base, an adapter whose linear part is trained and one whose routing is too, and the latter merged. The base's embedding
    has rows to spare."""
    folder = tmp_path_factory.mktemp("adapters")
    base = graft("delta-block", depth_anchored=True)
    base.resize_token_embeddings(104)
    save_folder(base, folder / "base")
    torch.manual_seed(0)
    config = LoraConfig(
        r=4,
        target_modules="all-linear",
        init_lora_weights=False,
        modules_to_save=routing_module_names(base),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    model.save_pretrained(folder / "linear")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in routing_parameters(model).items():
            if name.endswith("query"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "routed")
    save_folder(model.merge_and_unload(), folder / "merged")
    return folder


def test_an_adapter_scores_as_the_merged_model_and_its_routing_counts(folders):
    base, linear, routed = (
        score(folders / "base", **({"peft": folders / name} if name else {})) for name in ("", "linear", "routed")
    )
    # float32, one product or two for each linear layer, in sums over some hundred tokens
    assert routed == pytest.approx(score(folders / "merged"), rel=1e-5)
    assert abs(linear - base) > 1e-3 and abs(routed - linear) > 1e-3


def test_command_takes_an_adapter(folders, monkeypatch, capsys):
    options = ["--tasks", TASK, "--limit", 1, "--device", "cpu", "--compare", folders / "base"]
    code, out, err = run_command(monkeypatch, capsys, "eval", folders / "base", "--peft", folders / "routed", *options)
    assert code == 0, err
    assert "base +" in out and "+0.0000 " not in out
    code, _, err = run_command(monkeypatch, capsys, "eval", folders / "base", "--peft", folders / "merged", *options)
    assert code == 2 and "merged: no adapter_config.json in this folder, allowed: an adapter's folder" in err


def test_an_adapter_on_a_model_in_memory_changes_the_score(graft, folders):
    with pytest.raises(Refused, match="peft: got 'a/b/c', allowed: an adapter's folder or hub id"):
        score(folders / "base", peft="a/b/c")
    model = graft("delta-block", depth_anchored=True)
    model.resize_token_embeddings(104)
    randomize_routing(model, seed=3)
    before = score(model, tokenizer=character_tokenizer())
    assert abs(score(model, tokenizer=character_tokenizer(), peft=folders / "routed") - before) > 1e-3
