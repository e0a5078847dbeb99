# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Log-likelihoods through lm-eval: the same in any batch, and those of the base where a conversion is anchored."""

import pytest
from conftest import randomize_routing
from text_model_helpers import character_tokenizer

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
    # padding must not leak; what is left is float32 in another order, 3e-5 here, in sums of about -250
    assert log_likelihoods(routed, batch_size) == pytest.approx(one_by_one, rel=0, abs=1e-4)


def test_anchored_conversion_scores_as_its_base(stock, graft, one_by_one):
    base = log_likelihoods(stock, 3)
    # at its start an anchored model's logits are bitwise the base's, so lm-eval's sums are too
    assert log_likelihoods(graft("delta-block", depth_anchored=True), 3) == base
    # and the comparison can fail: routing that has moved scores otherwise
    assert max(abs(one - other) for one, other in zip(one_by_one, base, strict=True)) > 1.0
