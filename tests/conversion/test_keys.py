# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Key rules: identity for the hosted backbones, and invertible where a later one has other names."""

import pytest

from depthroute import DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute_conversion.architectures import ARCHITECTURES
from depthroute_conversion.keys import KeyRules, Rename, listed, plan_keys


OTHER = KeyRules(
    renames=(
        Rename("transformer.h.{layer}.ln_1.{rest}", "model.layers.{layer}.input_layernorm.{rest}"),
        Rename("transformer.h.{layer}.{rest}", "model.layers.{layer}.{rest}"),
        Rename("transformer.wte.weight", "model.embed_tokens.weight"),
    ),
    derived=(r".*\.mask",),
)


@pytest.mark.parametrize("name", sorted(name for name in ARCHITECTURES if name.endswith("ForCausalLM")))
def test_hosted_names_are_our_names(name, stock):
    rules = ARCHITECTURES[name].rules(stock.state_dict())
    assert all(rules.to_ours(key) == key == rules.to_source(key) for key in stock.state_dict())


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("transformer.h.11.ln_1.weight", "model.layers.11.input_layernorm.weight"),
        ("transformer.h.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("transformer.wte.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_renames_have_inverses(theirs, ours):
    assert OTHER.to_ours(theirs) == ours
    assert OTHER.to_source(ours) == theirs


@pytest.mark.parametrize(
    "source, ours", [("a.{layer}.b", "c.b"), ("a.{rest}", "b.{layer}"), ("{rest}.{rest}", "{rest}.{rest}")]
)
def test_a_rename_without_an_inverse_is_refused(source, ours):
    with pytest.raises(ValueError, match="the same placeholders, each once"):
        Rename(source, ours)


def test_plan_follows_renames_and_leaves_derived_keys():
    source = {
        "transformer.wte.weight": (5, 2),
        "transformer.h.0.mlp.up_proj.weight": (3, 2),
        "transformer.h.0.mask": (9,),
    }
    ours = {"model.embed_tokens.weight": (5, 2), "model.layers.0.mlp.up_proj.weight": (3, 2), "read.query": (2,)}
    plan = plan_keys("x", source, ours, ["read.query"], OTHER, tied=False)
    assert plan.copied == {
        "model.embed_tokens.weight": "transformer.wte.weight",
        "model.layers.0.mlp.up_proj.weight": "transformer.h.0.mlp.up_proj.weight",
    }
    assert plan.added == ["read.query"] and plan.shared == {}


def test_problems_are_listed_by_the_sources_names():
    ours = {"model.embed_tokens.weight": (5, 2), "model.layers.0.mlp.up_proj.weight": (3, 2)}
    with pytest.raises(
        Refused, match=r"^x: 1 missing keys: transformer.wte.weight; 1 unexpected keys: extra; allowed: "
    ):
        plan_keys("x", {"extra": (1,), "transformer.h.0.mlp.up_proj.weight": (3, 2)}, ours, [], OTHER, tied=False)
    with pytest.raises(Refused, match=r"transformer.wte.weight: got \[4, 2\], allowed: \[5, 2\]"):
        plan_keys(
            "x",
            {"transformer.wte.weight": (4, 2), "transformer.h.0.mlp.up_proj.weight": (3, 2)},
            ours,
            [],
            OTHER,
            tied=False,
        )
    with pytest.raises(Refused, match="two keys for one tensor"):
        plan_keys(
            "x", {"transformer.wte.weight": (5, 2), "model.embed_tokens.weight": (5, 2)}, {"model.embed_tokens.weight": (5, 2)},
            [], OTHER, tied=False,
        )  # fmt: skip


def test_long_lists_say_how_many_are_left_out():
    assert listed(["a", "b"]) == "a, b"
    assert listed(str(n) for n in range(11)) == "0, 1, 2, 3, 4, 5, 6, 7 and 3 more"


def test_plan_covers_every_tensor_of_the_model(graft, stock):
    model: DepthRouteForCausalLM = graft("attnres")
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    source = {key: tuple(value.shape) for key, value in stock.state_dict().items()}
    plan = plan_keys(
        "x", source, shapes, model.routing_parameters(), ARCHITECTURES["Qwen3ForCausalLM"].rules(source), tied=False
    )
    assert plan.added == list(model.routing_parameters())
    assert sorted([*plan.copied, *plan.added]) == sorted(shapes)
