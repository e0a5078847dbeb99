# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Recording: every route of every live read over all tokens, and no padding."""

import pytest
import torch
from conftest import randomize_routing

from depthroute import DepthRouteModel
from depthroute.diagnostics import record_routing, route_divergence, routing_statistics
from depthroute.diagnostics.observe import find_decoder
from depthroute.diagnostics.record import token_batches, token_pairs


CASES = [
    ("delta-block", 1, ["main"]),
    ("attnres", 4, ["main"]),
    ("wav", 1, ["main"]),
    ("rd-attnres", 2, ["main", "value"]),
    ("dar", 1, ["stream 0", "stream 1"]),
    ("dar-full", 4, ["stream 0", "stream 1"]),
]


@pytest.fixture(scope="module", params=CASES, ids=[f"{preset}, {heads} heads" for preset, heads, _ in CASES])
def case(request, graft):
    preset, heads, routes = request.param
    model = graft(preset, depth_anchored=True, depth_num_heads=heads)
    randomize_routing(model)
    return model, heads, routes


def test_equals_the_models_own_record(case, token_ids):
    model, heads, routes = case
    with torch.no_grad():  # as recording does: without gradients reads go another way
        expected = model(token_ids, output_routing=True).routing
    recorded = record_routing(model, [{"input_ids": token_ids}])
    assert list(recorded) == list(expected)
    for name, (sources, weights, value_weights) in expected.items():
        own = {"main": weights, "value": value_weights}
        if routes[0] == "stream 0":
            own = dict(zip(routes, weights))
        own = {route: one for route, one in own.items() if one is not None}
        assert recorded[name].sources == sources
        assert list(recorded[name].routes) == list(own)
        for route, one in own.items():
            assert one.shape[0] == len(sources)
            tokens = recorded[name].routes[route]
            assert tokens.shape == (len(sources), token_ids.numel(), heads)
            assert torch.equal(tokens, one.reshape(tokens.shape))
    assert list(routing_statistics(recorded)) == routes


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_masked_out(case, token_ids, side):
    model, _, _ = case
    alone = record_routing(model, [{"input_ids": row[None]} for row in (token_ids[0], token_ids[1, :6])])
    padding = torch.zeros(7, dtype=torch.long)
    parts = [padding, token_ids[1, :6]] if side == "left" else [token_ids[1, :6], padding]
    marks = [0] * 7 + [1] * 6 if side == "left" else [1] * 6 + [0] * 7
    batch = {
        "input_ids": torch.stack([token_ids[0], torch.cat(parts)]),
        "attention_mask": torch.tensor([[1] * 13, marks]),
    }
    if side == "left":  # positions as generate gives them
        batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    padded = record_routing(model, [batch])
    for name, read in alone.items():
        for route, weights in read.routes.items():
            assert weights.shape[1] == 13 + 6
            # float32 in another order of summation, through 16 reads far from their start
            torch.testing.assert_close(padded[name].routes[route], weights, rtol=0, atol=1e-4)


def test_model_is_left_as_it_was(case, token_ids):
    model, _, _ = case
    residuals = [model.model.residual, *(layer.residual for layer in model.model.layers)]
    model.train()
    recorded = record_routing(model, [{"input_ids": token_ids}])
    assert model.training
    model.eval()
    assert not any(weights.requires_grad for read in recorded.values() for weights in read.routes.values())
    with pytest.raises(ValueError, match="^attention_mask: got"):
        record_routing(model, [{"input_ids": token_ids, "attention_mask": torch.ones(2, 1, 13, 13)}])
    after = [model.model.residual, *(layer.residual for layer in model.model.layers)]
    assert all(one is other for one, other in zip(residuals, after, strict=True))


def test_a_model_without_a_head_records_too(graft, token_ids):
    model = graft("delta", depth_anchored=True)
    decoder: DepthRouteModel = model.model
    with_head, without = (record_routing(network, [{"input_ids": token_ids}]) for network in (model, decoder))
    assert list(with_head) == [f"model.{name}" for name in without]


def test_standard_records_nothing_and_no_batches_are_refused(graft, token_ids, stock):
    standard = graft("standard")
    assert record_routing(standard, [{"input_ids": token_ids}]) == {}
    with pytest.raises(ValueError, match="^batches: got none"):
        record_routing(standard, [])
    with pytest.raises(ValueError, match="^model: got Qwen3ForCausalLM, allowed: a DepthRoute model"):
        find_decoder(stock)


@pytest.mark.parametrize(("route", "equal"), [("decoupled", True), ("decoupled", False), ("uniform", False)])
def test_divergence_of_the_routes_of_a_model(route, equal, graft, token_ids):
    model = graft("rd-attnres", depth_value_route=route)
    randomize_routing(model)
    if equal:
        for layer in model.model.layers[1:]:
            layer.attn_read.value_query.data.copy_(layer.attn_read.query)
    recorded = record_routing(model, [{"input_ids": token_ids}])
    divergence = route_divergence(recorded)
    assert list(divergence) == [f"model.layers.{i}.attn_read" for i in range(1, 8)]  # the first has no choice
    assert all(value == 0 if equal else 1e-3 < value < 0.6932 for value in divergence.values())


def test_windows_cover_the_text_once():
    batches = list(token_batches(range(1, 24), max_length=5, batch_size=2))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 5), (2, 5), (1, 3)]
    seen = torch.cat([batch["input_ids"][batch["attention_mask"].bool()] for batch in batches])
    assert seen.tolist() == list(range(1, 24))
    (short,) = token_batches(range(1, 8), max_length=5, batch_size=2)
    assert short["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]


def test_windows_are_paired_with_the_next_one():
    (first, second), (third, fourth) = token_pairs(range(1, 13), max_length=5, batch_size=2)
    assert first["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert second["input_ids"].tolist() == [[6, 7, 8, 9, 10], [11, 12, 0, 0, 0]]
    assert second["attention_mask"].tolist() == [[1] * 5, [1, 1, 0, 0, 0]]
    assert (third["input_ids"].tolist(), fourth["input_ids"].tolist()) == ([[11, 12]], [[1, 2]])
    assert list(token_pairs(range(5), max_length=5, batch_size=2)) == []
