# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What is around a model when it computes its reads: hooks that change things, autocast, function transforms, tracing."""

import pytest
import torch
from conftest import randomize_routing, tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from depthroute import DepthRouteForCausalLM
from depthroute_kernels import cpu, depth_read


PRESETS = ["attnres", "attnres-block", "attnres-states", "delta", "delta-block", "rd-attnres", "wav", "dar"]
IDS = torch.arange(1, 19).view(2, 9)


def build(preset, backend, anchored=True, dtype=torch.float64):
    torch.manual_seed(0)
    model = DepthRouteForCausalLM(tiny_config(preset, depth_anchored=anchored, depth_backend=backend)).to(dtype)
    randomize_routing(model)
    return model


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def move_stream(module, args, output):
    return (output[0] + 1, *output[1:]) if isinstance(output, tuple) else output + 1


def move_everything(module, args):
    return tuple(tensor * 1.1 + 0.2 for tensor in args)


HOOKS = {
    "the stream behind a layer": lambda layer: layer.register_forward_hook(move_stream),
    "all that a layer is given": lambda layer: layer.register_forward_pre_hook(move_everything),
}


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_hook_that_changes(hook, preset, anchored):
    results = {}
    for backend in ("reference", "cpu"):
        model = build(preset, backend, anchored)
        for layer in model.model.layers[:2]:
            HOOKS[hook](layer)
        results[backend] = loss_and_gradients(model)
    (loss, gradients), (expected_loss, expected) = results["cpu"], results["reference"]
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # the loss is computed in float32
        limit = 1e-6 * expected[name].abs().max().item() + 1e-12
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=limit, msg=name)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("gradients", [False, True], ids=["without gradients", "with"])
def test_an_anchored_start_under_autocast(stock, graft, preset, gradients):
    model = graft(preset, depth_anchored=True, depth_backend="cpu")
    with torch.set_grad_enabled(gradients), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(IDS, use_cache=False).logits, stock(IDS, use_cache=False).logits)


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_function_transforms_and_forward_mode(backend):
    values = [torch.randn(4, 8, dtype=torch.float64) for _ in range(3)]
    query = torch.randn(8, dtype=torch.float64)

    def total(query, implementation):
        return depth_read(values, query, implementation=implementation).square().sum()

    expected = torch.func.grad(total)(query, "reference")
    torch.testing.assert_close(torch.func.grad(total)(query, backend), expected, rtol=0, atol=0)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        tangent = forward_ad.unpack_dual(total(dual, backend)).tangent
    torch.testing.assert_close(tangent, expected.sum(), rtol=1e-12, atol=0)


def test_the_cpu_path_by_name_under_compile():
    torch._dynamo.reset()
    model = build("delta-block", "cpu").eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(
            compiled(IDS, use_cache=False).logits, model(IDS, use_cache=False).logits, rtol=0, atol=1e-10
        )


def test_a_fake_forward_leaves_nothing_behind():
    model = build("delta", "cpu").eval()
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.ones(2, 1, dtype=torch.int64), use_cache=False)
        assert model(IDS[:, :1], use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("tokens", [2, 2000], ids=["few tokens", "many"])
def test_a_base_narrower_than_the_values(tokens):
    values = [torch.randn(tokens, 16) for _ in range(3)]
    base, query = torch.randn(tokens, 16).bfloat16(), torch.randn(16)
    with torch.no_grad():
        reads = [depth_read(values, query, base=base, implementation=name) for name in ("cpu", "reference")]
    # float32 sums in another order
    torch.testing.assert_close(reads[0], reads[1], rtol=0, atol=1e-5)


def test_another_default_device():
    values = [torch.randn(2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with torch.device("meta"):
        read = depth_read(values, torch.randn(16, device="cpu"), anchored=True, base=values[0], implementation="cpu")
        read.sum().backward()
    assert read.device.type == "cpu" and values[0].grad.device.type == "cpu"


def test_layers_with_hooks_prepare_their_own_reads(monkeypatch):
    calls = []
    run = cpu.phase
    monkeypatch.setattr(
        cpu, "phase", lambda inputs, **options: calls.append(len(inputs[0].queries)) or run(inputs, **options)
    )
    model = build("delta", "cpu")
    # the hooks that transformers leaves behind only record
    model(IDS, use_cache=False, output_hidden_states=True, output_attentions=True)
    calls.clear()
    model(IDS, use_cache=False)
    grouped, calls[:] = list(calls), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *arguments: None)
    model(IDS, use_cache=False)
    assert max(grouped) > 2 and max(calls) == 2
