# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""torch.compile: one graph without breaks, and a second, dynamic one when the length changes."""

import pytest
import torch
from conftest import randomize_routing, tiny_config, tiny_qwen3_config
from torch._dynamo.testing import CompileCounterWithBackend

from depthroute import DepthRouteForCausalLM


TWO_LAYERS = tiny_qwen3_config(num_hidden_layers=2)  # tracing costs seconds a layer


ONE_LAYER_BLOCKS = {"depth_block_size": 1}
# every residual class, every kind of source, and what is built of tensors inside the read
COMPILED = {
    "attnres-block": ("attnres-block", ONE_LAYER_BLOCKS),
    "attnres-states": ("attnres-states", {}),
    "delta": ("delta", {}),
    "delta-block": ("delta-block", {**ONE_LAYER_BLOCKS, "depth_anchored": True}),
    "rd-attnres": ("rd-attnres", ONE_LAYER_BLOCKS),
    "wav": ("wav", {**ONE_LAYER_BLOCKS, "depth_detail_bases": ["phase"], "depth_null_source": True}),
    "dar": ("dar-full", {"dual_gates": "dynamic", "depth_anchored": True}),
    "mhc": ("mhc", {"hyper_num_streams": 2}),
    "layerscale": ("layerscale", {}),
}


@pytest.mark.parametrize("case", COMPILED)
def test_full_graph_and_at_most_two_of_them(case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    preset, values = COMPILED[case]
    model = DepthRouteForCausalLM(tiny_config(preset, base=TWO_LAYERS, **values)).eval()
    randomize_routing(model)
    # the trace is what is tested, so that nothing is done with it
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for length in (16, 17, 33):
        ids = torch.arange(length).view(1, -1)
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            # the same operations, traced: roundings of sums that the trace may reorder
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.parametrize("case", ["attnres-block", "dar"])
def test_gradients_through_a_compiled_model(case):
    torch._dynamo.reset()
    torch.manual_seed(0)
    preset, values = COMPILED[case]
    model = DepthRouteForCausalLM(tiny_config(preset, base=TWO_LAYERS, **values))
    randomize_routing(model)
    ids = torch.arange(16).view(1, -1)
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("case", ["attnres-block", "dar"])
def test_layers_compiled_one_by_one(case, gradients):
    """The loop around them is not, and prepares nothing for them: each has one graph and computes its own reads."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    preset, values = COMPILED[case]
    model = DepthRouteForCausalLM(tiny_config(preset, base=TWO_LAYERS, **values)).eval()
    randomize_routing(model)
    ids = torch.arange(9).view(1, -1)
    with torch.set_grad_enabled(gradients):
        expected = model(ids, use_cache=False).logits
        counter = CompileCounterWithBackend("eager")
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=counter)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)
    assert counter.frame_count == 2


def test_one_graph_under_autocast():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DepthRouteForCausalLM(tiny_config("attnres-block", base=TWO_LAYERS, depth_block_size=1)).eval()
    randomize_routing(model)
    ids = torch.arange(16).view(1, -1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(ids, use_cache=False).logits
        # bfloat16 products in both: traced casts may round once more, 2^-8 of logits of order 10
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=0.02, atol=0.1)
