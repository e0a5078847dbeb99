# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods through lm-eval: the same in any batch, and those of the base where a conversion is anchored."""

import pytest
import torch
from conftest import EXACT_PRESETS, randomize_routing
from conversion_helpers import tiny_moe_config
from text_model_helpers import character_tokenizer
from transformers import Qwen3MoeForCausalLM

from depthroute import PRESETS, DepthRouteForCausalLM, convert
from depthroute.evaluation import evaluate


TASKS = ["depthroute_choice", "depthroute_perplexity"]


def log_likelihoods(model, batch_size) -> list[float]:
    """Of every sample: each choice's, then each text's."""
    result = evaluate(
        model, TASKS, batch_size, limit=4, tokenizer=character_tokenizer(), max_batch_size=16, bootstrap_iters=0
    )
    numbers = []
    for task in TASKS:
        for sample in sorted(result["samples"][task], key=lambda sample: sample["doc_id"]):
            for [response] in sample["resps"]:
                numbers.append(response[0] if isinstance(response, tuple) else response)
    assert len(numbers) == 4 * 4 + 4
    return numbers


@pytest.fixture(scope="module")
def routed(graft):
    model = graft("attnres-block", depth_anchored=True)
    randomize_routing(model)
    return model


@pytest.fixture(scope="module")
def one_by_one(routed):
    return log_likelihoods(routed, 1)


@pytest.mark.parametrize("batch_size", [3, "auto"])
def test_batch_size_changes_nothing(routed, one_by_one, batch_size):
    # padding must not leak; what is left is float32 in another order: some units in the last place (6e-8) of each sum
    assert log_likelihoods(routed, batch_size) == pytest.approx(one_by_one, rel=5e-7, abs=1e-4)


@pytest.fixture(scope="module")
def base(stock):
    return log_likelihoods(stock, 3)


@pytest.mark.parametrize("preset", PRESETS)
def test_anchored_conversion_scores_as_its_base(preset, base, graft):
    found = log_likelihoods(graft(preset, depth_anchored=preset != "standard"), 3)
    if preset in EXACT_PRESETS or preset == "standard":
        # at its start an anchored model's logits are bitwise the base's, so lm-eval's sums are too
        assert found == base
    else:
        # mHC's eps of 1e-6 moves a logit by some 5e-5, in sums of about -250 over some hundred tokens
        assert found != base and found == pytest.approx(base, rel=0, abs=2e-2)


def test_routing_that_has_moved_scores_otherwise(base, one_by_one):
    assert max(abs(one - other) for one, other in zip(one_by_one, base, strict=True)) > 1.0


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_a_converted_sparse_model_scores_as_its_base(fused, tmp_path):
    """From the files, in transformers' own class and through the conversion."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(tiny_moe_config(num_hidden_layers=4))
    model.save_pretrained(tmp_path / "base", save_original_format=not fused)
    convert(tmp_path / "base", tmp_path / "dar", "dar", block_size=2, verify=False)
    stock, ours = (
        loaded.from_pretrained(tmp_path / name).eval()
        for loaded, name in ((Qwen3MoeForCausalLM, "base"), (DepthRouteForCausalLM, "dar"))
    )
    assert log_likelihoods(ours, 3) == pytest.approx(log_likelihoods(stock, 3), rel=5e-7, abs=1e-4)
