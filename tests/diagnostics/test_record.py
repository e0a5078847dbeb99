# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Recording: every live read over all tokens, and no padding."""

import pytest
import torch
from conftest import randomize_routing

from depthroute import DepthRouteModel
from depthroute.diagnostics import record_routing
from depthroute.diagnostics.record import token_batches


@pytest.fixture(scope="module", params=[("delta-block", 1), ("attnres", 4)], ids=["one head", "four heads"])
def routed(request, graft):
    preset, heads = request.param
    model = graft(preset, depth_anchored=True, depth_num_heads=heads)
    randomize_routing(model)
    return model


def test_equals_the_models_own_record(routed, token_ids):
    expected = routed(token_ids, output_routing=True).routing
    recorded = record_routing(routed, [{"input_ids": token_ids}])
    assert list(recorded) == list(expected)
    for name, (sources, weights) in expected.items():
        assert recorded[name].sources == sources
        assert torch.equal(recorded[name].weights, weights.flatten(1, 2))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_masked_out(routed, token_ids, side):
    alone = record_routing(routed, [{"input_ids": row[None]} for row in (token_ids[0], token_ids[1, :6])])
    padding = torch.zeros(7, dtype=torch.long)
    parts = [padding, token_ids[1, :6]] if side == "left" else [token_ids[1, :6], padding]
    marks = [0] * 7 + [1] * 6 if side == "left" else [1] * 6 + [0] * 7
    batch = {
        "input_ids": torch.stack([token_ids[0], torch.cat(parts)]),
        "attention_mask": torch.tensor([[1] * 13, marks]),
    }
    if side == "left":  # positions as generate gives them
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    padded = record_routing(routed, [batch])
    for name, read in alone.items():
        assert read.weights.shape[1] == 13 + 6
        # float32 in another order of summation
        torch.testing.assert_close(padded[name].weights, read.weights, rtol=0, atol=1e-5)


def test_mode_and_gradients_are_left_alone(routed, token_ids):
    routed.train()
    recorded = record_routing(routed, [{"input_ids": token_ids}])
    assert routed.training
    routed.eval()
    assert not any(read.weights.requires_grad for read in recorded.values())


def test_a_model_without_a_head_records_too(graft, token_ids):
    model = graft("delta", depth_anchored=True)
    decoder: DepthRouteModel = model.model
    with_head, without = (record_routing(network, [{"input_ids": token_ids}]) for network in (model, decoder))
    assert list(with_head) == [f"model.{name}" for name in without]


def test_standard_records_nothing_and_no_batches_are_refused(graft, token_ids):
    standard = graft("standard")
    assert record_routing(standard, [{"input_ids": token_ids}]) == {}
    with pytest.raises(ValueError, match="^batches: got none"):
        record_routing(standard, [])


def test_windows_cover_the_text_once():
    batches = list(token_batches(range(1, 24), max_length=5, batch_size=2))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 5), (2, 5), (1, 3)]
    seen = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in batches])
    assert seen.tolist() == list(range(1, 24))
    (short,) = token_batches(range(1, 8), max_length=5, batch_size=2)
    assert short["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
