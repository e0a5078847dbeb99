# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What every preset must keep; the preset table is the parameter, so a new row is tested as it comes."""

import pytest
import torch
from conftest import (
    EXACT_PRESETS,
    QUERY_PRESETS,
    ROUTED_PRESETS,
    randomize_routing,
    tiny_config,
    tiny_qwen3_config,
)

from depthroute import PRESETS, DepthRouteForCausalLM
from depthroute.modeling.depth_schedule import live_reads, read_name


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EVERY_PRESET = pytest.mark.parametrize("preset", ROUTED_PRESETS)
EVERY_EXACT_PRESET = pytest.mark.parametrize("preset", EXACT_PRESETS)
EVERY_QUERY_PRESET = pytest.mark.parametrize("preset", QUERY_PRESETS)


@pytest.mark.smoke
@DTYPES
@EVERY_EXACT_PRESET
def test_anchored_logits_equal_the_source(preset, dtype, graft, stock, token_ids):
    from copy import deepcopy

    model = graft(preset, depth_anchored=True).to(dtype)
    expected = deepcopy(stock).to(dtype)(token_ids).logits
    assert torch.equal(model(token_ids).logits, expected)
    # the control: equality is not the work of a read that ignores its query
    randomize_routing(model)
    assert not torch.equal(model(token_ids).logits, expected)


def test_anchored_states_in_blocks_equal_the_source(graft, stock, token_ids):
    model = graft("attnres-states", depth_anchored=True, depth_block_size=3)
    assert torch.equal(model(token_ids).logits, stock(token_ids).logits)


@pytest.mark.parametrize("heads", [4, 8])
@EVERY_QUERY_PRESET
def test_heads_add_no_parameters_and_keep_the_anchor(preset, heads, graft, stock, token_ids):
    model = graft(preset, depth_anchored=True, depth_num_heads=heads)
    assert len(model.routing_parameters()) == len(graft(preset).routing_parameters())
    assert torch.equal(model(token_ids).logits, stock(token_ids).logits)


# max |Δlogits| / std of logits of a plain conversion at its start; activations are of order 1 here, so eps = 1e-6 moves
# logits by some 1e-5. Reads whose mix is h / N or h (1 + 1/N) are undone by the norms up to eps; the others change the
# function; a scale of zero or 0.1 changes it most.
GAPS = {
    "attnres": (0, 1e-3),
    "attnres-block": (0, 1e-3),
    "attnres-states": (1e-2, 10),
    "delta": (0, 1e-3),
    "delta-block": (1e-2, 10),
    "rd-attnres": (0, 1e-3),
    "wav": (1e-2, 10),
    "dar": (0, 1e-3),
    "dar-full": (0, 1e-3),
    "mhc": (0, 1e-3),
    "rezero": (0.5, 100),
    "layerscale": (0.5, 100),
}


@EVERY_PRESET
def test_plain_conversion_gaps(preset, graft, stock, token_ids):
    expected = stock(token_ids).logits
    gap = ((graft(preset)(token_ids).logits - expected).abs().max() / expected.std()).item()
    low, high = GAPS[preset]
    assert low < gap < high


def queries(model):
    return {name: p for name, p in model.routing_parameters().items() if name.endswith(("query", "_scale"))}


@EVERY_EXACT_PRESET
@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
def test_live_queries_learn_from_the_first_step(preset, anchored, graft, token_ids):
    if preset in ("rezero", "layerscale") and not anchored:
        return  # a ReZero scale at zero and a LayerScale at 0.1 are tested as baselines
    model = graft(preset, depth_anchored=anchored).train()
    start = {name: parameter.clone() for name, parameter in queries(model).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        if step == 0:
            for name, parameter in queries(model).items():
                assert parameter.grad is not None and parameter.grad.norm() > 0, name
        optimizer.step()
    assert start
    for name, parameter in queries(model).items():
        assert not torch.equal(parameter, start[name]), name


# L, K → sources of every read, worked out by hand: attn and MLP of each layer, then the final read
ODD_DEPTHS = {
    "attnres L2": ("attnres", 2, None, [1, 2, 3, 4, 5]),
    "delta L2": ("delta", 2, None, [1, 2, 3, 4]),
    "attnres-block L7 K3": ("attnres-block", 7, 3, [1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4]),
    "attnres-block L3 K1": ("attnres-block", 3, 1, [1, 2, 2, 3, 3, 4, 4]),
    "attnres-block L4 K4": ("attnres-block", 4, 4, [1, 2, 2, 2, 2, 2, 2, 2, 2]),
    "attnres-block L3 K9": ("attnres-block", 3, 9, [1, 2, 2, 2, 2, 2, 2]),
    "delta-block L7 K3": ("delta-block", 7, 3, [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3]),
    "delta-block L3 K1": ("delta-block", 3, 1, [1, 1, 2, 2, 3, 3]),
    "attnres-states L2": ("attnres-states", 2, None, [1, 2, 3, 4, 5]),
    "attnres-states L3 K2": ("attnres-states", 3, 2, [1, 2, 2, 2, 2, 3, 3]),
    "attnres-states L4 K2": ("attnres-states", 4, 2, [1, 2, 2, 2, 2, 3, 3, 3, 3]),
    "rd-attnres L3 K2": ("rd-attnres", 3, 2, [1, 2, 2, 2, 2, 3, 3]),
    "wav L3 K2": ("wav", 3, 2, [1, 4, 4, 4, 4, 7, 3]),
    "dar L3 K2": ("dar", 3, 2, [1, 2, 2, 2, 2, 3, 3]),
    "dar-full L2": ("dar-full", 2, None, [1, 2, 2, 3, 3]),
}


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("case", ODD_DEPTHS)
def test_odd_depths(case, anchored, token_ids):
    preset, layers, block, expected = ODD_DEPTHS[case]
    base = tiny_qwen3_config(num_hidden_layers=layers)
    blocks = {} if block is None else {"depth_block_size": block}
    model = DepthRouteForCausalLM(tiny_config(preset, base=base, depth_anchored=anchored, **blocks)).eval()
    output = model(token_ids, output_routing=True)
    live = {f"model.{read_name(model.config, s)}": count for s, count in enumerate(expected) if count > 1}
    assert {name: len(weights.sources) for name, weights in output.routing.items()} == live
    assert {name: weights.weights.shape[-3] for name, weights in output.routing.items()} == live
    # the last layer's writes reach the logits, in a short last block as well
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(1.5)
    assert not torch.equal(model(token_ids).logits, output.logits)


@pytest.mark.parametrize("block", [8, 9])
def test_a_model_without_a_live_read_is_refused(block):
    with pytest.raises(ValueError, match=f"depth_block_size: got {block} with num_hidden_layers = 8"):
        tiny_config("delta-block", depth_block_size=block)


@EVERY_QUERY_PRESET
def test_routing_output(preset, graft, token_ids):
    model = graft(preset)
    randomize_routing(model)
    plain = model(token_ids)
    output = model(token_ids, output_routing=True)
    assert torch.equal(output.logits, plain.logits) and "routing" not in plain
    assert list(output.routing) == [f"model.{read_name(model.config, s)}" for s in live_reads(model.config)]
    for name, read in output.routing.items():
        assert hasattr(model.get_submodule(name), "query")
        streams = (2,) if model.config.residual_type == "dual_stream" else ()
        has_value_route = preset == "rd-attnres" and "attn_read" in name
        assert (read.value_weights is not None) == has_value_route
        for weights in (read.weights, read.value_weights) if has_value_route else (read.weights,):
            assert weights.shape == (*streams, len(read.sources), 2, 13) and not weights.requires_grad
            # softmax over sources in float32: a few roundings of 6e-8
            torch.testing.assert_close(weights.sum(-3), torch.ones(*streams, 2, 13), rtol=0, atol=1e-6)
    assert set(model.model(token_ids, output_routing=True).routing) == {
        name.removeprefix("model.") for name in output.routing
    }
    as_tuple = model(token_ids, output_routing=True, return_dict=False)
    assert as_tuple[-1].keys() == output.routing.keys()


def test_routing_output_with_heads_and_labels(graft, token_ids):
    model = graft("attnres-block", depth_num_heads=4)
    randomize_routing(model)
    routing = model(token_ids, output_routing=True).routing
    last = routing["model.layers.5.mlp_read"]
    assert last.sources == ["embedding", "block 0", "block 1", "partial"]
    assert last.weights.shape == (4, 2, 13, 4)
    torch.testing.assert_close(last.weights.sum(0), torch.ones(2, 13, 4), rtol=0, atol=1e-6)
    sources = graft("delta")(token_ids, output_routing=True).routing["model.layers.1.mlp_read"].sources
    assert sources == ["embedding", "layer 0 attn", "layer 0 mlp", "layer 1 attn"]
    states = graft("attnres-states")(token_ids, output_routing=True).routing["model.layers.1.attn_read"].sources
    assert states == ["embedding", "state 1", "state 2"]


@EVERY_EXACT_PRESET
def test_hidden_states_are_the_standard_stream(preset, graft, stock, token_ids):
    model = graft(preset, depth_anchored=True)
    output = model(token_ids, output_hidden_states=True)
    expected = stock(token_ids, output_hidden_states=True).hidden_states
    assert len(output.hidden_states) == len(expected) == 9
    for index, (found, reference) in enumerate(zip(output.hidden_states, expected)):
        assert torch.equal(found, reference), index


@EVERY_PRESET
def test_one_dtype_after_loading_in_bfloat16(preset, graft, tmp_path):
    graft(preset).save_pretrained(tmp_path)
    model = DepthRouteForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("preset", PRESETS)
def test_no_unused_parameters(preset, graft, token_ids):
    """What distributed training without a search for unused parameters relies on."""
    model = graft(preset).train()
    model(token_ids, labels=token_ids).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_routing_survives_hooks_that_rebuild_a_layer_s_arguments(graft, token_ids):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = graft("attnres-block")
    expected = model(token_ids, output_routing=True).routing
    for layer in model.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    routing = model(token_ids, output_routing=True).routing
    assert routing.keys() == expected.keys() and len(routing) == 16
    assert all(torch.equal(read.weights, expected[name].weights) for name, read in routing.items())


def test_a_hook_that_returns_the_stream_alone_is_refused(graft, token_ids):
    model = graft("delta")
    hook = model.model.layers[2].register_forward_hook(lambda module, inputs, output: output[0])
    with pytest.raises(ValueError, match="layer 2: returned 1 tensors, allowed: 3, the stream first"):
        model(token_ids)
    hook.remove()
    # steering: the stream moved, the rest kept
    plain = model(token_ids).logits
    model.model.layers[2].register_forward_hook(lambda module, inputs, output: (output[0] + 1, *output[1:]))
    assert not torch.equal(model(token_ids).logits, plain)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_backends_are_upstream_s(implementation, graft, stock, token_ids):
    from copy import deepcopy

    model, base = graft("delta-block", depth_anchored=True), deepcopy(stock)
    for loaded in (model, base):
        loaded.set_attn_implementation(implementation)
        assert loaded.config._attn_implementation == implementation
    assert torch.equal(model(token_ids).logits, base(token_ids).logits)
    if implementation == "eager":
        output = model(token_ids, output_attentions=True)
        expected = base(token_ids, output_attentions=True)
        assert len(output.attentions) == 8
        assert all(torch.equal(a, b) for a, b in zip(output.attentions, expected.attentions))
