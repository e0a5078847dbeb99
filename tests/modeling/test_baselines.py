# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What the papers compare with: mHC, ReZero, LayerScale, and the controls SepV and the null source."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from conftest import randomize_routing, tiny_config, tiny_qwen3_config
from read_helpers import random_reads, random_tensor, walk

from depthroute import DepthRouteForCausalLM
from depthroute.modeling.modeling_depthroute import build_residual
from depthroute.modeling.residual_base import Reading, ResidualState
from depthroute.modeling.residual_baselines import HYPER_EPS, SINKHORN_ITERATIONS, HyperGates


STREAMS = pytest.mark.parametrize("streams", [2, 4])


# --- mHC


def hyper_config(streams, **values):
    return tiny_config("mhc", base=tiny_qwen3_config(**values), hyper_num_streams=streams)


@pytest.fixture
def deepseek():
    """transformers' own mHC; older releases have none."""
    return pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")


def upstream_config(deepseek, streams):
    published = deepseek.DeepseekV4Config()
    assert (published.hc_sinkhorn_iters, published.hc_eps) == (SINKHORN_ITERATIONS, HYPER_EPS)
    return SimpleNamespace(hc_mult=streams, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=32)


def random_connection(config, s):
    read = random_reads(config)[s].float()
    read.gate_proj.data.mul_(0.2)
    return read


@STREAMS
def test_mhc_numbers_are_those_of_deepseek_v4(streams, deepseek):
    """Collapse, expand, mix and the write, against the implementation that transformers has."""
    config = hyper_config(streams)
    residual, read = build_residual(config), random_connection(config, 3)
    upstream = deepseek.DeepseekV4HyperConnection(upstream_config(deepseek, streams))
    upstream.load_state_dict({"fn": read.gate_proj, "base": read.gate_bias, "scale": read.gate_scale})
    stream = random_tensor("stream", 2, 5, 32).float()
    several = random_tensor("streams", 2, 5, streams, 32).float()
    update = random_tensor("update", 2, 5, 32).float()
    post, comb, collapsed = upstream(several)

    reading = residual.read(ResidualState((stream, several)), 3, read, None)
    # float32, the same formulas: some roundings of 6e-8, through twenty normalisations
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(reading.x, collapsed, **close)
    torch.testing.assert_close(reading.gates.expand, post, **close)
    torch.testing.assert_close(reading.gates.mix, comb, **close)
    state = residual.write(ResidualState((stream, several)), 3, update, reading)
    expected = post.unsqueeze(-1) * update.unsqueeze(-2) + comb.transpose(-1, -2) @ several
    torch.testing.assert_close(state.carry[1], expected, **close)
    if streams > 2:  # of two streams every doubly stochastic matrix is symmetric
        assert not torch.allclose(comb.transpose(-1, -2), comb, atol=0.01)
    assert torch.equal(state.stream, stream + update)


@STREAMS
def test_the_mhc_final_read_is_that_of_deepseek_v4(streams, deepseek):
    config = hyper_config(streams)
    read = random_connection(config, 16)
    upstream = deepseek.DeepseekV4HyperHead(upstream_config(deepseek, streams))
    upstream.load_state_dict({"hc_fn": read.gate_proj, "hc_base": read.gate_bias, "hc_scale": read.gate_scale})
    several = random_tensor("streams", 2, 5, streams, 32).float()
    found = build_residual(config).finish(ResidualState((several[..., 0, :], several)), read, None)
    torch.testing.assert_close(found, upstream(several), rtol=1e-5, atol=1e-5)


@STREAMS
def test_mhc_starts_as_the_standard_function(streams, graft, stock, token_ids):
    model = graft("mhc", hyper_num_streams=streams)
    expected = stock(token_ids).logits
    gap = (model(token_ids).logits - expected).abs().max() / expected.std()
    # mHC's own eps on H^pre, H^res and their normalisations: some 1e-6 per sublayer, but not zero
    assert 0 < gap < 1e-3
    several = random_tensor("streams", 2, 5, streams, 32).float()
    for s in (0, 5):
        read = [model.model.layers[s // 2].attn_read, model.model.layers[s // 2].mlp_read][s % 2]
        gates: HyperGates = read(several)
        torch.testing.assert_close(gates.collapse.sum(-1), torch.ones(2, 5), rtol=0, atol=1e-5)
        assert (gates.collapse.argmax(-1) == s % streams).all()
        torch.testing.assert_close(gates.expand, torch.ones(2, 5, streams), rtol=0, atol=0)
        for dim in (-1, -2):
            torch.testing.assert_close(gates.mix.sum(dim), torch.ones(2, 5, streams), rtol=0, atol=1e-4)
        assert (gates.mix.diagonal(dim1=-2, dim2=-1) > 0.8).all()
    final = model.model.final_read(several)
    torch.testing.assert_close(final.collapse, torch.full((2, 5, streams), 1 / streams), rtol=0, atol=1e-5)
    assert final.expand is None and final.mix is None


@STREAMS
def test_mhc_streams_come_apart(streams, graft, token_ids, monkeypatch):
    model = graft("mhc", hyper_num_streams=streams).train()
    residual, last = model.model.residual, []
    finish = type(residual).finish
    monkeypatch.setattr(
        residual, "finish", lambda state, *rest: last.append(state.carry[1]) or finish(residual, state, *rest)
    )

    def spread():
        last.clear()
        with torch.no_grad():
            model(token_ids)
        return ((last[0] - last[0].mean(-2, keepdim=True)).norm() / last[0].norm()).item()

    assert spread() < 1e-5
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _step in range(8):
        optimizer.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        optimizer.step()
    assert spread() > 1e-3
    # once streams differ every gate has something to weigh
    for name, parameter in model.routing_parameters().items():
        assert parameter.grad.norm() > 0, name


def test_mhc_sees_all_of_its_streams():
    config = hyper_config(4)
    read = random_connection(config, 2)
    several = random_tensor("streams", 1, 1, 4, 32).float()
    before = read(several)
    for stream in range(4):
        changed = several.clone()
        changed[..., stream, :] = random_tensor("other", 32).float()
        for now, then in zip(read(changed), before):
            assert not torch.allclose(now, then)


# --- ReZero and LayerScale


@pytest.mark.parametrize(
    ("preset", "layers", "start"),
    [
        ("rezero", 2, 0.0),
        ("layerscale", 2, 0.1),
        ("layerscale", 18, 0.1),
        ("layerscale", 19, 1e-5),
        ("layerscale", 24, 1e-5),
        ("layerscale", 25, 1e-6),
    ],
)
def test_scales_start_at_the_papers_values(preset, layers, start):
    base = tiny_qwen3_config(num_hidden_layers=layers)
    model = DepthRouteForCausalLM(tiny_config(preset, base=base))
    shape = (1,) if preset == "rezero" else (32,)
    names = [f"model.layers.{layer}.{branch}_scale" for layer in range(layers) for branch in ("attn", "mlp")]
    assert sorted(model.routing_parameters()) == sorted(names)
    for parameter in model.routing_parameters().values():
        assert parameter.shape == shape and torch.equal(parameter, torch.full(shape, start))
    anchored = DepthRouteForCausalLM(tiny_config(preset, base=base, depth_anchored=True))
    assert all(torch.equal(p, torch.ones(shape)) for p in anchored.routing_parameters().values())


@pytest.mark.parametrize("preset", ["rezero", "layerscale"])
def test_scales_multiply_updates(preset):
    config = tiny_config(preset, base=tiny_qwen3_config(num_hidden_layers=2))
    scales = [random_tensor(f"scale {s}", 1 if preset == "rezero" else 32) for s in range(4)]
    path = walk(config, [*scales, None])
    stream = random_tensor("embedding", 2, 3, 32)
    for s, reading in enumerate(path.readings):
        assert torch.equal(reading.x, stream)
        stream = stream + scales[s] * random_tensor(f"update {s}", 2, 3, 32)
    assert torch.equal(path.final, stream)


@pytest.mark.parametrize("preset", ["rezero", "layerscale"])
def test_scales_learn_from_the_start(preset, graft, token_ids):
    """Also ReZero's, at zero, where its branches have no gradient yet."""
    model = graft(preset).train()
    model(token_ids, labels=token_ids).loss.backward()
    for name, parameter in model.routing_parameters().items():
        assert parameter.grad.norm() > 0, name
    branch = model.model.layers[3].mlp.down_proj.weight.grad
    assert (branch.norm() > 0) == (preset == "layerscale")


def test_rezero_at_zero_is_the_embedding(graft, token_ids):
    model = graft("rezero")
    expected = model.lm_head(model.model.norm(model.get_input_embeddings()(token_ids)))
    assert torch.equal(model(token_ids).logits, expected)


# --- SepV: a learned projection of the values


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("preset", ["attnres-block", "delta"])
def test_sepv_starts_as_the_model_without_it(preset, anchored, graft, token_ids):
    parent = graft(preset, depth_anchored=anchored)
    randomize_routing(parent)
    model = graft(preset, depth_anchored=anchored, depth_value_projection=True)
    missing = model.load_state_dict(parent.state_dict(), strict=False).missing_keys
    assert missing and all(name.endswith("value_proj") for name in missing)
    expected = parent(token_ids).logits
    # a product with the identity is exact in float32; the base is added to a rounded mix where it was added before
    torch.testing.assert_close(model(token_ids).logits, expected, rtol=0, atol=1e-4 * expected.std().item())
    if not anchored and preset == "attnres-block":
        assert torch.equal(model(token_ids).logits, expected)
    model(token_ids, labels=token_ids).loss.backward()
    assert all(model.get_parameter(name).grad.norm() > 0 for name in missing)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sepv_anchored_equals_the_source_whatever_it_projects(dtype, graft, stock, token_ids):
    model = graft("attnres-block", depth_anchored=True, depth_value_projection=True).to(dtype)
    expected = deepcopy(stock).to(dtype)(token_ids).logits
    assert torch.equal(model(token_ids).logits, expected)
    with torch.no_grad():
        for name, parameter in model.routing_parameters().items():
            if name.endswith("value_proj"):
                parameter.copy_(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(model(token_ids).logits, expected)


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
def test_sepv_projects_values_and_not_keys(anchored):
    """Σ w_i (W v_i) with weights from the sources themselves."""
    base = tiny_qwen3_config(num_hidden_layers=3)
    config = tiny_config("attnres-block", base=base, depth_value_projection=True, depth_anchored=anchored)
    plain = tiny_config("attnres-block", base=base, depth_anchored=anchored)
    reads = random_reads(config)
    path, reference = walk(config, reads), walk(plain, random_reads(plain))
    for s in (1, 3, 4, 5):
        weights = path.record[f"layers.{s // 2}.{'mlp' if s % 2 else 'attn'}_read"].weights
        assert torch.equal(weights, reference.record[f"layers.{s // 2}.{'mlp' if s % 2 else 'attn'}_read"].weights)
        state = path.states[s]
        sources = [*state.history, *state.carry[1:2]]
        weights = weights - 1 / len(sources) if anchored else weights
        mix = sum(w.unsqueeze(-1) * v @ reads[s].value_proj.T for w, v in zip(weights, sources))
        expected = state.stream + len(sources) * mix if anchored else mix
        torch.testing.assert_close(path.readings[s].x, expected, rtol=1e-11, atol=1e-11)


# --- the null source


@pytest.mark.parametrize("preset", ["attnres", "attnres-block", "attnres-states", "delta", "delta-block", "rd-attnres"])
def test_a_null_source_is_one_more(preset, graft, stock, token_ids):
    model = graft(preset, depth_null_source=True, depth_anchored=True)
    output = model(token_ids, output_routing=True)
    without = graft(preset, depth_anchored=True)(token_ids, output_routing=True)
    assert torch.equal(output.logits, stock(token_ids).logits)
    assert output.routing.keys() == without.routing.keys()
    for name, read in output.routing.items():
        assert read.sources == [*without.routing[name].sources, "null"]
        count = len(read.sources)
        torch.testing.assert_close(read.weights, torch.full((count, 2, 13), 1 / count), rtol=0, atol=1e-6)
    assert all((p == 0).all() for name, p in model.routing_parameters().items() if name.endswith("null"))
    bf16 = model.bfloat16()(token_ids).logits
    assert torch.equal(bf16, deepcopy(stock).bfloat16()(token_ids).logits)


def test_a_plain_null_source_is_near_the_base(graft, stock, token_ids):
    """Delta over all sources and nothing: h + h/(N + 1), which the norms undo up to eps."""
    expected = stock(token_ids).logits
    gap = (graft("delta", depth_null_source=True)(token_ids).logits - expected).abs().max() / expected.std()
    assert 0 < gap < 1e-3
    model = graft("delta-block", depth_null_source=True).train()
    model(token_ids, labels=token_ids).loss.backward()
    assert all(p.grad.norm() > 0 for name, p in model.routing_parameters().items() if name.endswith("null"))


def test_the_null_source_is_a_value_as_well():
    """Moved away from zero it is read like any source, and attracts by its own key."""
    config = tiny_config("delta-block", base=tiny_qwen3_config(num_hidden_layers=4), depth_null_source=True)
    reads = random_reads(config)
    path = walk(config, reads)
    state, read = path.states[6], reads[6]
    sources = [*state.history, read.null.expand_as(state.stream)]
    logits = [
        (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * read.key_norm * read.query).sum(-1)
        for v in sources
    ]
    weights = torch.stack(logits).softmax(0)
    expected = state.stream + sum(w.unsqueeze(-1) * v for w, v in zip(weights, sources))
    torch.testing.assert_close(path.readings[6].x, expected, rtol=1e-11, atol=1e-11)
    assert isinstance(path.readings[6], Reading) and len(sources) == 3
