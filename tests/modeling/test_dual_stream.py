# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""DAR: two streams, their gates, and what is left of them when the streams agree."""

from copy import deepcopy

import pytest
import torch
from conftest import randomize_routing, tiny_config, tiny_qwen3_config
from read_helpers import random_reads, random_tensor, walk
from transformers import Qwen3ForCausalLM

from depthroute import DepthRouteForCausalLM
from depthroute.modeling.modeling_depthroute import build_residual
from depthroute.modeling.residual_base import ResidualState


ROUTINGS = ["cross_key", "self", "cross_value", "fixed"]
GATES = ["static", "dynamic"]
LAYERS = 8
A, R, C = 0, 1, slice(2, 4)
"""Entries of `gate_logits` and rows of `gate_proj`: a, r, and c_0, c_1."""


@pytest.fixture(scope="module")
def shallow_stock():
    """Four layers: of eight random ones float32 rounding alone moves the logits by more than 1e-5 of their deviation."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(tiny_qwen3_config(num_hidden_layers=4)).eval()


def gates_of(model):
    return {name: p for name, p in model.named_parameters() if name.endswith("gate_logits")}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_equal_streams_are_block_attnres(routing, gates, anchored, dtype, tolerance, shallow_stock, token_ids):
    """With β^0 = β^1 = 1 both streams are the block sums, whatever α and ρ are; with one query for both, so are the reads."""

    def build(preset, **values):
        config = tiny_config(preset, base=shallow_stock.config, depth_anchored=anchored, **values)
        model = DepthRouteForCausalLM(config).eval()
        model.load_state_dict(shallow_stock.state_dict(), strict=False)
        randomize_routing(model, scale=0.2)
        return model.to(dtype)

    single, dual = build("attnres-block"), build("dar", dual_routing=routing, dual_gates=gates)
    with torch.no_grad():
        for name, parameter in dual.routing_parameters().items():
            if name.endswith(("query", "key_norm")):
                parameter.copy_(single.get_parameter(name))
            elif name.endswith(("gate_logits", "gate_proj")) and len(parameter) == 4:
                parameter[C] = 0.0
    expected = single(token_ids).logits
    # two streams' mixes are weighed and added where there was one: a few roundings more, and ρ + (1 − ρ) of every sum
    assert (dual(token_ids).logits - expected).abs().max() < tolerance * expected.std()
    with torch.no_grad():
        dual.model.layers[0].attn_read.gate_logits[2:] += torch.tensor([0.1, -0.1])
        dual.model.layers[3].mlp_read.query[0].neg_()
    assert (dual(token_ids).logits - expected).abs().max() > 1e-3 * expected.std()


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_reads_of_equal_streams_are_those_of_block_attnres(routing, anchored):
    """The same without branches, whose norms round to float32 also in a float64 model."""
    single = tiny_config("attnres-block", base=tiny_qwen3_config(num_hidden_layers=5), depth_anchored=anchored)
    dual = tiny_config("dar", base=single, depth_anchored=anchored, dual_routing=routing, dual_gates="dynamic")
    one, two = random_reads(single), random_reads(dual)
    with torch.no_grad():
        for s, read in enumerate(two):
            if read.query is not None:
                read.query.copy_(one[s].query)
                read.key_norm.copy_(one[s].key_norm)
            for gate in (read.gate_logits, read.gate_proj):
                if gate is not None and len(gate) == 4:
                    gate[C] = 0.0
    expected, found = walk(single, one), walk(dual, two)
    for s, (reading, reference) in enumerate(zip(found.readings, expected.readings)):
        torch.testing.assert_close(
            reading.x, reference.x, rtol=1e-12, atol=1e-12 * reference.x.abs().max().item(), msg=f"{s}"
        )
    torch.testing.assert_close(found.final, expected.final, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
@pytest.mark.parametrize("gates", GATES)
def test_crossed_values_are_crossed_keys_by_other_names(gates, anchored):
    """Read j of one has the keys and values of read 1 − j of the other: exchange their parameters, and α with 1 − α."""
    crossed_keys = tiny_config("dar", depth_anchored=anchored, dual_gates=gates, dual_routing="cross_key")
    crossed_values = tiny_config("dar", depth_anchored=anchored, dual_gates=gates, dual_routing="cross_value")
    one, other = random_reads(crossed_keys), random_reads(crossed_values)
    with torch.no_grad():
        for read, renamed in zip(one, other):
            renamed.gate_logits.copy_(read.gate_logits)
            renamed.gate_logits[A].neg_()
            if read.query is not None:
                renamed.query.copy_(read.query.flip(0))
                renamed.key_norm.copy_(read.key_norm.flip(0))
            if read.gate_proj is not None:
                renamed.gate_proj.copy_(read.gate_proj.unflatten(1, (2, -1)).flip(1).flatten(1))
                renamed.gate_proj[A].neg_()
    expected, found = walk(crossed_keys, one), walk(crossed_values, other)
    # float64, whose sums are taken in another order
    for s, (reading, reference) in enumerate(zip(found.readings, expected.readings)):
        torch.testing.assert_close(reading.x, reference.x, rtol=1e-12, atol=1e-12, msg=f"{s}")
    torch.testing.assert_close(found.final, expected.final, rtol=1e-12, atol=1e-11)
    with torch.no_grad():
        other[3].query.copy_(other[3].query.flip(0))
    assert (walk(crossed_values, other).readings[3].x - expected.readings[3].x).abs().max() > 1e-3


def by_hand(config, reads):
    """The equations of a plain pass, from embedding and branch outputs, one sublayer after another."""
    eps = config.rms_norm_eps
    histories = [[random_tensor("embedding", 2, 3, config.hidden_size)] for _ in range(2)]
    partial, seen = None, []
    routes = {"cross_key": "10 01", "self": "00 11", "cross_value": "01 10", "fixed": "01 01"}[config.dual_routing]
    for s in range(2 * config.num_hidden_layers + 1):
        final = s == 2 * config.num_hidden_layers
        entries = [list(history) for history in histories]
        if partial is not None and (config.dual_partial_source or final):
            entries = [history + [running] for history, running in zip(entries, partial)]
        read = reads[s]
        logits = read.gate_logits.data
        if read.query is not None:
            mixes = []
            for j, (keys, values) in enumerate((int(a), int(b)) for a, b in routes.split()):
                scores = [
                    (k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * read.key_norm[j] * read.query[j]).sum(
                        -1
                    )
                    for k in entries[keys]
                ]
                weights = torch.stack(scores).softmax(0)
                mixes.append(sum(w.unsqueeze(-1) * v for w, v in zip(weights, entries[values])))
            if read.gate_proj is not None:
                both = torch.cat(mixes, -1)
                logits = logits + both * torch.rsqrt(both.square().mean(-1, keepdim=True) + eps) @ read.gate_proj.T
            alpha = logits[..., :1].sigmoid()
            seen.append(alpha * mixes[0] + (1 - alpha) * mixes[1])
        else:
            seen.append(sum(random_tensor(f"update {i}", 2, 3, config.hidden_size) for i in range(s)) + histories[0][0])
        if final:
            break
        update = random_tensor(f"update {s}", 2, 3, config.hidden_size)
        rho = logits[..., 1:2].sigmoid()
        written = [2 * logits[..., 2 + j : 3 + j].sigmoid() * update for j in range(2)]
        if partial is not None:
            written = [
                rho * partial[0] + (1 - rho) * partial[1] + written[0],
                (1 - rho) * partial[0] + rho * partial[1] + written[1],
            ]
        partial = written
        if (s + 1) % (2 * config.depth_block_size) == 0:
            histories = [history + [running] for history, running in zip(histories, partial)]
            partial = None
    return seen
    return None


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "blocks-only"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_pass_by_hand(routing, gates, partial):
    """Five layers in blocks of two: a short last block, whose partial state the final read must see."""
    config = tiny_config(
        "dar",
        base=tiny_qwen3_config(num_hidden_layers=5),
        dual_routing=routing,
        dual_gates=gates,
        dual_partial_source=partial,
    )
    reads = random_reads(config)
    path = walk(config, reads)
    expected = by_hand(config, reads)
    for s, reading in enumerate(path.readings):
        # float64: some hundred roundings of 1e-16
        torch.testing.assert_close(reading.x, expected[s], rtol=1e-11, atol=1e-11, msg=f"read {s}")
    torch.testing.assert_close(path.final, expected[-1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("gates", GATES)
def test_the_mixing_matrix_is_doubly_stochastic(gates):
    config = tiny_config("dar", dual_gates=gates)
    residual, read = build_residual(config), random_reads(config)[5].float()
    ones, zeros = torch.ones(2, 3, 32), torch.zeros(2, 3, 32)
    history = tuple(random_tensor(f"entry {i}", 2, 3, 32).float() for i in range(4))
    partial = [random_tensor(f"partial {i}", 2, 3, 32).float() for i in range(2)]
    reading = residual.read(ResidualState((zeros, *partial), history), 5, read, None)
    columns = []
    for first, second in ((ones, zeros), (zeros, ones)):
        _, *written = residual.write(ResidualState((zeros, first, second), history), 5, zeros, reading).carry
        columns.append(torch.stack(written))
    matrix = torch.stack(columns, dim=1)
    assert (matrix > 0).all() and not torch.allclose(matrix, torch.full_like(matrix, 0.5))
    for dim in (0, 1):
        torch.testing.assert_close(matrix.sum(dim), torch.ones(2, 2, 3, 32), rtol=0, atol=1e-7)
    if gates == "dynamic":
        assert matrix[0, 0].std() > 0.01  # a matrix per token


@pytest.mark.parametrize("asymmetry", [0.5, 0.9])
def test_gates_start_where_the_configuration_says(asymmetry, token_ids):
    config = tiny_config("dar", dual_write_asymmetry=asymmetry, dual_transport_init=2.5, dual_gates="dynamic")
    model = DepthRouteForCausalLM(config)
    for name, logits in gates_of(model).items():
        read = model.get_submodule(name.removesuffix(".gate_logits"))
        if name.startswith("model.final_read"):
            assert logits.tolist() == [0.0]
            assert read.gate_proj.shape == (1, 64)
            continue
        sign = 1 if "attn_read" in name else -1
        beta = 2 * logits[C].sigmoid()
        # through a logit and back, in float32
        torch.testing.assert_close(beta, 1 + sign * torch.tensor([asymmetry, -asymmetry]), rtol=0, atol=1e-6)
        assert logits[A] == 0 and logits[R] == 2.5 and logits[2] == -logits[3]
        if name == "model.layers.0.attn_read.gate_logits":
            assert read.query is None and read.gate_proj is None
        else:
            assert read.gate_proj.shape == (4, 64) and (read.gate_proj == 0).all()
            assert read.query.shape == read.key_norm.shape == (2, 32)


@pytest.mark.smoke
@pytest.mark.parametrize("partial", [True, False], ids=["partial", "blocks-only"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_anchor_holds_for_any_write_gate_and_any_transport(routing, gates, partial, graft, stock, token_ids):
    model = graft("dar", depth_anchored=True, dual_routing=routing, dual_gates=gates, dual_partial_source=partial)
    for dtype in (torch.float32, torch.bfloat16):
        model, expected = model.to(dtype), deepcopy(stock).to(dtype)(token_ids).logits
        assert torch.equal(model(token_ids).logits, expected)
        for asymmetry in (0.01, 0.7, 0.999):
            generator = torch.Generator().manual_seed(int(1000 * asymmetry))
            with torch.no_grad():
                for logits in gates_of(model).values():
                    if len(logits) == 4:
                        logits[R] = 4 * torch.randn((), generator=generator)
                        logits[C] = torch.tensor([1 + asymmetry, 1 - asymmetry]).div(2).logit()
            assert torch.equal(model(token_ids).logits, expected)
    # the controls: each of a and q moves it
    with torch.no_grad():
        if routing == "fixed":  # both streams have the same values: α alone changes nothing
            model.model.layers[5].mlp_read.query[0] = 1.0
        else:
            model.model.layers[5].mlp_read.gate_logits[A] = 1.0
    assert not torch.equal(model(token_ids).logits, expected)


@pytest.mark.parametrize("gates", GATES)
def test_dynamic_gates_start_as_static_ones(gates, graft, token_ids):
    # a gate of all tokens and a gate of each are fused in different ways by fast implementations
    static = graft("dar", depth_backend="reference")
    randomize_routing(static)
    model = graft("dar", dual_gates=gates, depth_backend="reference")
    missing = model.load_state_dict(static.state_dict(), strict=False).missing_keys
    assert bool(missing) == (gates == "dynamic") and all(name.endswith("gate_proj") for name in missing)
    assert torch.equal(model(token_ids).logits, static(token_ids).logits)
    if gates == "dynamic":
        model(token_ids, labels=token_ids).loss.backward()
        assert all(model.get_parameter(name).grad.norm() > 0 for name in missing)


@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
def test_every_gate_learns_once_training_has_begun(anchored, graft, token_ids):
    model = graft("dar", depth_anchored=anchored).train()

    def backward():
        model.zero_grad()
        model(token_ids, labels=token_ids).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in gates_of(model).items()}

    start = backward()
    if anchored:  # writes are not read until a query or α has moved; α moves at once
        for name, gradient in start.items():
            assert (gradient[1:] == 0).all(), name
            assert (gradient[A] != 0) == (name != "model.layers.0.attn_read.gate_logits"), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        backward()
        optimizer.step()
    for name, gradient in backward().items():
        first_of_block = name.endswith("attn_read.gate_logits") and int(name.split(".")[2]) % 2 == 0
        first = name == "model.layers.0.attn_read.gate_logits"
        # at a block's first sublayer there is no partial state to transport, before it nothing to choose from
        silent = [*([A] if first else []), *([R] if first_of_block else [])]
        for index, value in enumerate(gradient.tolist()):
            assert (value == 0.0) == (index in silent), (name, index)


def linear_cka(x, y):
    """Linear centred kernel alignment of two sets of representations [samples, D]: 1 where they agree up to rotation."""
    x, y = x - x.mean(0), y - y.mean(0)
    return ((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())).item()


def test_cka_of_known_cases():
    x, rotation = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)), torch.linalg.qr(torch.randn(8, 8))[0]
    assert abs(linear_cka(x, 3 * x @ rotation + 1) - 1) < 1e-4
    assert linear_cka(x, torch.randn(500, 8, generator=torch.Generator().manual_seed(1))) < 0.1


def test_training_separates_the_streams(monkeypatch):
    torch.manual_seed(0)
    base = tiny_qwen3_config(num_hidden_layers=2, initializer_range=0.02)  # a pretraining start: streams are alike
    model = DepthRouteForCausalLM(tiny_config("dar-full", base=base, depth_anchored=True))
    held_out = torch.randint(1, 97, (16, 16))
    residual, histories = model.model.residual, []
    finish = type(residual).finish

    def watched(state, *rest):
        histories.append(state.history)
        return finish(residual, state, *rest)

    monkeypatch.setattr(residual, "finish", watched)

    @torch.no_grad()
    def similarity():
        """CKA of the two streams' entries of the same block, averaged over blocks; the embedding is common to both."""
        histories.clear()
        model(held_out, use_cache=False)
        first, second = (histories[0][stream::2] for stream in range(2))
        assert torch.equal(first[0], second[0]) and len(first) == len(second) == 3
        pairs = [linear_cka(x.flatten(0, 1), y.flatten(0, 1)) for x, y in zip(first[1:], second[1:])]
        return sum(pairs) / len(pairs)

    before = similarity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(200):
        ids = torch.randint(1, 97, (4, 12))
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        histories.clear()
    assert similarity() < before - 0.05 < 1.0


@pytest.mark.parametrize("heads", [1, 4])
def test_routing_has_the_stream_first(heads, graft, token_ids):
    model = graft("dar", depth_num_heads=heads)
    randomize_routing(model)
    routing = model(token_ids, output_routing=True).routing
    assert next(iter(routing)) == "model.layers.0.mlp_read" and list(routing)[-1] == "model.final_read"
    read = routing["model.layers.5.attn_read"]
    assert read.sources == ["embedding", "block 0", "block 1", "partial"] and read.value_weights is None
    assert read.weights.shape == (2, 4, 2, 13) + (() if heads == 1 else (heads,))
    torch.testing.assert_close(read.weights.sum(1), torch.ones(2, 2, 13, *(() if heads == 1 else (heads,))))
    assert not torch.allclose(read.weights[0], read.weights[1], atol=0.01)


def test_without_the_partial_source(graft, token_ids):
    model = graft("dar", dual_partial_source=False, depth_block_size=3)
    routing = model(token_ids, output_routing=True).routing
    assert next(iter(routing)) == "model.layers.3.attn_read"
    assert routing["model.layers.5.mlp_read"].sources == ["embedding", "block 0"]
    # a short last block is never dropped
    assert routing["model.final_read"].sources == ["embedding", "block 0", "block 1", "partial"]
    # reads without a choice keep the gates of their writes, and those learn
    model.train()(token_ids, labels=token_ids).loss.backward()
    read = model.model.layers[1].mlp_read
    assert read.query is None and (read.gate_logits.grad[C] != 0).all() and read.gate_logits.grad[A] == 0


def test_hidden_states_are_the_carried_stream_whatever_is_read(graft, token_ids):
    model, sums = graft("dar"), []
    randomize_routing(model)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, output: sums.append(output[0]))
        layer.mlp.register_forward_hook(lambda _, args, output: sums.append(output))
    states = model(token_ids, output_hidden_states=True).hidden_states
    stream = states[0]
    for index in range(LAYERS):
        assert torch.equal(states[index], stream)
        stream = stream + sums[2 * index] + sums[2 * index + 1]
