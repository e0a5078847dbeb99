# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""RD-AttnRes: a query of their own for attention's values, and its three controls."""

import pytest
import torch
from conftest import randomize_routing, tiny_config
from read_helpers import random_reads, walk

from depthroute.modeling.depth_schedule import live_reads


# every kind of single-stream read can have the route
PARENTS = {
    "attnres": ("attnres", {}),
    "attnres-block heads": ("attnres-block", {"depth_num_heads": 4}),
    "attnres-block anchored": ("attnres-block", {"depth_anchored": True}),
    "attnres-states": ("attnres-states", {}),
    "delta": ("delta", {}),
    "delta-block anchored": ("delta-block", {"depth_anchored": True}),
    "wav": ("wav", {}),
}


def pair(case, graft, route):
    """The parent and the same model with a value route, with the same random parameters; value queries are the queries."""
    preset, fields = PARENTS[case]
    # two queries and one are products of another shape in a fast implementation; `test_backends` compares those
    values = {**fields, "depth_backend": "reference"}
    parent = graft(preset, **values)
    randomize_routing(parent)
    routed = graft(preset, depth_value_route=route, **values)
    missing = routed.load_state_dict(parent.state_dict(), strict=False).missing_keys
    for name in missing:
        assert name.endswith("attn_read.value_query")
        query = parent.get_parameter(name.replace("value_query", "query"))
        routed.get_parameter(name).data.copy_(query)
    assert bool(missing) == (route != "uniform")
    return parent, routed


@pytest.mark.smoke
@pytest.mark.parametrize("case", PARENTS)
def test_equal_queries_give_the_parent(case, graft, token_ids):
    parent, routed = pair(case, graft, "decoupled")
    expected = parent(token_ids, labels=token_ids)
    found = routed(token_ids, labels=token_ids)
    assert torch.equal(found.logits, expected.logits)

    # the query's gradient is shared out among its two uses; sums of float32 in another order
    expected.loss.backward()
    found.loss.backward()
    for name, parameter in routed.named_parameters():
        if name.endswith(".value_query"):
            query = name.replace("value_query", "query")
            whole = parent.get_parameter(query).grad
            assert parameter.grad.norm() > 0
            torch.testing.assert_close(
                routed.get_parameter(query).grad + parameter.grad,
                whole,
                rtol=1e-3,
                atol=1e-5 * whole.abs().max().item(),
            )

    with torch.no_grad():
        name = [name for name, _ in routed.named_parameters() if name.endswith("value_query")][-1]
        routed.get_parameter(name).neg_()
    assert not torch.equal(routed(token_ids).logits, expected.logits)


@pytest.mark.parametrize("case", PARENTS)
def test_average_of_equal_routes_is_the_parent(case, graft, token_ids):
    parent, routed = pair(case, graft, "average")
    assert torch.equal(routed(token_ids).logits, parent(token_ids).logits)  # (x + x) / 2 is x


def test_values_alone_see_their_route(graft, token_ids):
    model = graft("rd-attnres")
    randomize_routing(model)
    layer, seen = model.model.layers[1], {}

    def inputs():
        for name in ("q_proj", "k_proj", "v_proj"):
            module = getattr(layer.self_attn, name)
            module.register_forward_hook(lambda _, args, output, name=name: seen.update({name: args[0]}))
        model(token_ids)
        return dict(seen)

    before = inputs()
    assert torch.equal(before["q_proj"], before["k_proj"]) and not torch.equal(before["q_proj"], before["v_proj"])
    with torch.no_grad():
        layer.attn_read.value_query.neg_()
    after = inputs()
    assert torch.equal(after["q_proj"], before["q_proj"]) and torch.equal(after["k_proj"], before["k_proj"])
    assert not torch.equal(after["v_proj"], before["v_proj"])
    with torch.no_grad():
        layer.attn_read.value_query.neg_()
        layer.attn_read.query.neg_()
    after = inputs()
    assert torch.equal(after["v_proj"], before["v_proj"]) and not torch.equal(after["q_proj"], before["q_proj"])


def test_values_see_the_same_norm(graft, token_ids):
    """x^V goes through the input norm as x^QK does: an anchored read at its start feeds all three the same."""
    model, seen = graft("rd-attnres", depth_anchored=True), {}
    layer = model.model.layers[2]
    with torch.no_grad():
        layer.input_layernorm.weight.uniform_(0.5, 2.0)
    for name in ("q_proj", "v_proj"):
        getattr(layer.self_attn, name).register_forward_hook(
            lambda _, args, output, name=name: seen.update({name: args[0]})
        )
    model(token_ids)
    assert torch.equal(seen["q_proj"], seen["v_proj"])


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("preset", ["attnres-block", "delta-block", "attnres-states", "wav"])
def test_the_average_is_half_the_sum_of_both_routes(preset, anchored):
    def readings(route):
        config = tiny_config(preset, depth_value_route=route, depth_anchored=anchored)
        return walk(config, random_reads(config)).readings

    for s, (both, mean) in enumerate(zip(readings("decoupled"), readings("average"))):
        assert mean.value is None
        expected = both.x if both.value is None else (both.x + both.value) / 2
        assert torch.equal(mean.x, expected), s
        # the value route belongs to attention, where there is something to choose
        if s % 2:
            assert both.value is None
    assert any(reading.value is not None for reading in readings("decoupled"))


@pytest.mark.parametrize("preset", ["attnres-block", "delta", "attnres-states", "wav"])
def test_uniform_values_are_read_with_the_prior(preset):
    """Frozen-V has no parameters, and its value read is that of a zero query."""

    def path(route, anchored):
        config = tiny_config(preset, depth_value_route=route, depth_anchored=anchored)
        reads = random_reads(config)
        with torch.no_grad():
            for read in filter(None, reads):
                if read.value_query is not None:
                    read.value_query.zero_()
                if read.detail_bias is not None:
                    read.detail_bias.fill_(-2.0)  # where learned biases are the prior's, Frozen-V is decoupled at zero
        return config, reads, walk(config, reads)

    for anchored in (False, True):
        config, reads, frozen = path("uniform", anchored)
        _, _, zero = path("decoupled", anchored)
        assert all(read is None or read.value_query is None for read in reads)
        for s in live_reads(config)[:-1]:
            if s % 2 == 0:
                assert torch.equal(frozen.readings[s].value, zero.readings[s].value), s
                assert not torch.equal(frozen.readings[s].x, frozen.readings[s].value), s
                if anchored:
                    assert torch.equal(frozen.readings[s].value, frozen.states[s].stream), s
            else:
                assert frozen.readings[s].value is None, s


def test_uniform_values_keep_the_prior_when_details_learn():
    config = tiny_config("wav", depth_value_route="uniform")
    weights = walk(config, random_reads(config)).record["layers.3.attn_read"]
    raw = torch.tensor([0.0 if "phase" not in label and "split" not in label else -2.0 for label in weights.sources])
    expected = torch.softmax(raw.double(), dim=0).view(-1, 1, 1).expand_as(weights.value_weights)
    torch.testing.assert_close(weights.value_weights, expected, rtol=0, atol=1e-12)
    assert (weights.weights - expected).abs().max() > 0.01


def test_routes_are_reported_where_they_are(graft, token_ids):
    for route in ("decoupled", "average", "uniform"):
        model = graft("delta", depth_value_route=route, depth_num_heads=2)
        randomize_routing(model)
        routing = model(token_ids, output_routing=True).routing
        for name, read in routing.items():
            assert (read.value_weights is not None) == name.endswith("attn_read"), name
            if read.value_weights is not None:
                assert read.value_weights.shape == read.weights.shape == (len(read.sources), 2, 13, 2)
                assert not torch.equal(read.value_weights, read.weights)
                assert not read.value_weights.requires_grad
                if route == "uniform":
                    torch.testing.assert_close(
                        read.value_weights, torch.full_like(read.weights, 1 / len(read.sources)), rtol=0, atol=1e-6
                    )


def test_a_route_costs_one_vector_per_attention_read(graft):
    shared = set(graft("attnres-block").routing_parameters())
    decoupled = graft("rd-attnres").routing_parameters()
    more = {f"model.layers.{layer}.attn_read.value_query" for layer in range(1, 8)}
    assert set(decoupled) - shared == more and not shared - set(decoupled)
    assert all(decoupled[name].shape == (32,) for name in more)
