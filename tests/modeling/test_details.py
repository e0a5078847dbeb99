# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""WAV: what the details of a block are, how they are scaled, and where they are read."""

from copy import deepcopy

import pytest
import torch
from conftest import randomize_routing, tiny_config, tiny_qwen3_config
from read_helpers import random_reads, random_tensor, walk

from depthroute import DepthRouteForCausalLM
from depthroute.modeling.residual_depth_attention import match_rms


BOTH = ["phase", "split"]


def rms(tensor):
    return tensor.square().mean(-1, keepdim=True).add(1e-6).sqrt()


def silence(model, bases=slice(None)):
    """Make details' weights vanish: exp(−10⁴) is zero in every dtype."""
    with torch.no_grad():
        for name, parameter in model.routing_parameters().items():
            if name.endswith("detail_bias"):
                parameter[bases] = -1e4


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("parent", ["attnres-block", "delta-block"])
def test_without_weight_on_details_it_is_block_attnres(parent, dtype, tolerance, graft, token_ids):
    plain = graft(parent, depth_num_heads=2).to(dtype)
    randomize_routing(plain)
    details = graft(parent, depth_detail_bases=BOTH, depth_num_heads=2).to(dtype)
    missing = details.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing and all(name.endswith("detail_bias") for name in missing)
    expected = plain(token_ids).logits
    scale = expected.std()
    assert (details(token_ids).logits - expected).abs().max() > 0.01 * scale  # at the initial bias they do take part
    silence(details)
    # the softmax runs over more entries, of which the details' are zero: another order of rounding at most
    assert (details(token_ids).logits - expected).abs().max() < tolerance * scale


@pytest.mark.parametrize("kept", [0, 1], ids=BOTH)
def test_one_basis_is_both_without_the_other(kept, graft, token_ids, float64_norms):
    both = graft("wav").double()
    randomize_routing(both)
    silence(both, 1 - kept)
    one = graft("wav", depth_detail_bases=BOTH[kept : kept + 1]).double()
    weights = {
        name: tensor[kept : kept + 1] if name.endswith("detail_bias") else tensor
        for name, tensor in both.state_dict().items()
    }
    one.load_state_dict(weights)
    expected = both(token_ids).logits
    # the same sums without their zeros, in float64
    torch.testing.assert_close(one(token_ids).logits, expected, rtol=0, atol=1e-11 * expected.std().item())


def test_the_order_of_the_bases_is_the_configurations(graft, token_ids):
    first, second = (graft("wav", depth_detail_bases=bases) for bases in (BOTH, BOTH[::-1]))
    randomize_routing(first)
    weights = {
        name: tensor.flip(0) if name.endswith("detail_bias") else tensor for name, tensor in first.state_dict().items()
    }
    second.load_state_dict(weights)
    # the same sum in another order, in float32
    torch.testing.assert_close(first(token_ids).logits, second(token_ids).logits, rtol=0, atol=1e-3)
    sources = second(token_ids, output_routing=True).routing["model.layers.2.attn_read"].sources
    assert sources == ["embedding", "block 0", "block 0 split", "block 0 phase"]


# layers, layers per block → by hand: block, basis → the signs of its updates in order
SIGNS = {
    "two layers": (4, 2, {"phase": "+-+-", "split": "++--"}),
    "three layers": (6, 3, {"phase": "+-+-+-", "split": "+++---"}),
    "one layer": (2, 1, {"phase": "+-"}),
}


def signed_sum(signs, start, tokens=3, width=32):
    updates = [random_tensor(f"update {start + index}", 2, tokens, width) for index in range(len(signs))]
    return sum(update if sign == "+" else -update for sign, update in zip(signs, updates))


@pytest.mark.parametrize("case", SIGNS)
def test_details_are_signed_sums_of_a_blocks_updates(case):
    layers, block, signs = SIGNS[case]
    config = tiny_config(
        "wav",
        base=tiny_qwen3_config(num_hidden_layers=layers),
        depth_block_size=block,
        depth_detail_bases=list(signs),
        depth_detail_max_scale=1e9,
    )
    history = walk(config, random_reads(config)).states[-1].history
    unit, stride = 2 * block, 1 + len(signs)
    for index in range(layers // block):
        whole = signed_sum("+" * unit, index * unit)
        torch.testing.assert_close(history[1 + index * stride], whole, rtol=1e-12, atol=1e-12)
        for offset, pattern in enumerate(signs.values()):
            detail = signed_sum(pattern, index * unit)
            # as large as its block: the cap is out of reach; float64 throughout
            expected = detail * rms(whole) / rms(detail)
            torch.testing.assert_close(history[2 + index * stride + offset], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("updates", [1, 2, 3, 4, 5])
def test_the_running_block_has_details_too(updates):
    """Of whatever has been written so far, against its own partial sum; `split` changes sign after K updates, even where
    the model ends before the block does."""
    config = tiny_config("wav", base=tiny_qwen3_config(num_hidden_layers=3), depth_block_size=4)
    state = walk(config, random_reads(config)).states[updates]
    _, partial, *details = state.carry
    torch.testing.assert_close(partial, signed_sum("+" * updates, 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(details[0], signed_sum("+-+-+-"[:updates], 0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(details[1], signed_sum("++++--"[:updates], 0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cap", [1.0, 0.25])
def test_what_a_read_mixes(cap):
    """Read 5 of blocks of two layers: e, C_0 and its details, PC and its details, from the definitions alone."""
    config = tiny_config("wav", base=tiny_qwen3_config(num_hidden_layers=4), depth_detail_max_scale=cap)
    reads = random_reads(config)
    path = walk(config, reads)
    entries = [random_tensor("embedding", 2, 3, 32)]
    for signs, start in ((("++++", "+-+-", "++--"), 0), (("+", "+", "+"), 4)):
        whole, *details = (signed_sum(pattern, start) for pattern in signs)
        entries += [whole, *(d * (rms(whole) / rms(d)).clamp(max=cap) for d in details)]
    read = reads[5]
    bias = torch.zeros(7, dtype=torch.float64)
    bias[[2, 5]], bias[[3, 6]] = read.detail_bias.data[0], read.detail_bias.data[1]
    logits = torch.stack([(v / rms(v) * read.key_norm * read.query).sum(-1) for v in entries]) + bias.view(-1, 1, 1)
    weights = logits.softmax(0)
    expected = sum(w.unsqueeze(-1) * v for w, v in zip(weights, entries))
    torch.testing.assert_close(path.readings[5].x, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(path.record["layers.2.mlp_read"].weights, weights.detach(), rtol=1e-12, atol=1e-12)
    assert path.record["layers.2.mlp_read"].sources == [
        "embedding",
        "block 0",
        "block 0 phase",
        "block 0 split",
        "partial",
        "partial phase",
        "partial split",
    ]


def test_under_add_only_completed_blocks_have_details(graft, token_ids):
    model = graft("delta-block", depth_detail_bases=BOTH)
    routing = model(token_ids, output_routing=True).routing
    block = ["block 0", "block 0 phase", "block 0 split"]
    for name in ("model.layers.2.attn_read", "model.layers.3.mlp_read"):
        assert routing[name].sources == ["embedding", *block]
    assert routing["model.layers.4.attn_read"].sources == ["embedding", *block, *(b.replace("0", "1") for b in block)]
    assert "model.final_read" not in routing


@pytest.mark.parametrize(("layers", "last"), [(4, []), (5, ["partial"])])
def test_the_final_read_is_conservative(layers, last, token_ids):
    model = DepthRouteForCausalLM(tiny_config("wav", base=tiny_qwen3_config(num_hidden_layers=layers)))
    assert model(token_ids, output_routing=True).routing["model.final_read"].sources == [
        "embedding",
        "block 0",
        "block 1",
        *last,
    ]
    assert model.model.final_read.detail_bias is None
    # one bias per basis and read, where a read has details
    biases = {name: p for name, p in model.named_parameters() if name.endswith("detail_bias")}
    assert len(biases) == 2 * layers - 1 and all(p.shape == (2,) and (p == -2).all() for p in biases.values())


def test_rms_matching():
    detail, summary = random_tensor("detail", 4, 5, 32), random_tensor("summary", 4, 5, 32)
    detail[0] *= 100  # shrunk to the block's size
    detail[1] *= 0.01  # not blown up beyond the cap
    detail[2] = 0.0
    for cap in (1.0, 0.5, 3.0):
        found = match_rms(summary, [detail], cap, 1e-6)[0]
        ratio = rms(summary) / rms(detail)
        torch.testing.assert_close(found, detail * ratio.clamp(max=cap), rtol=1e-12, atol=1e-12)
        assert torch.isfinite(found).all() and (rms(found) <= rms(summary) * (1 + 1e-6)).all()  # eps apart
        torch.testing.assert_close(found[1], detail[1] * cap, rtol=1e-12, atol=0)
    assert match_rms(summary.bfloat16(), [detail.bfloat16()], 1.0, 1e-6)[0].dtype == torch.bfloat16


def test_the_ratio_is_detached():
    """The gradient is that of a multiplication by a constant, and none reaches the summary through the ratio."""
    detail = random_tensor("detail", 2, 3, 32).requires_grad_()
    summary = random_tensor("summary", 2, 3, 32).requires_grad_()
    upstream = random_tensor("upstream", 2, 3, 32)
    scaled = match_rms(summary, [detail], 1.0, 1e-6)[0]
    through_detail, through_summary = torch.autograd.grad(scaled, (detail, summary), upstream, allow_unused=True)
    ratio = (rms(summary) / rms(detail)).clamp(max=1.0).detach()
    assert ratio.min() < 1  # the ratio is at work, not only the cap
    torch.testing.assert_close(through_detail, upstream * ratio, rtol=1e-12, atol=1e-12)
    assert through_summary is None


def test_details_start_with_the_weight_of_their_bias(graft, token_ids):
    model = graft("wav")
    routing = model(token_ids, output_routing=True).routing["model.layers.3.mlp_read"]
    is_detail = torch.tensor([label.endswith(("phase", "split")) for label in routing.sources])
    expected = torch.where(is_detail, torch.tensor(-2.0).exp(), torch.tensor(1.0))
    expected = (expected / expected.sum()).view(-1, 1, 1).expand_as(routing.weights)
    torch.testing.assert_close(routing.weights, expected, rtol=1e-6, atol=1e-7)


def test_biases_learn(graft, token_ids):
    model = graft("wav", depth_anchored=True).train()
    model(token_ids, labels=token_ids).loss.backward()
    biases = {name: p for name, p in model.named_parameters() if name.endswith("detail_bias")}
    assert biases and all(parameter.grad.abs().min() > 0 for parameter in biases.values())


def test_the_anchored_prior_is_the_constant(graft, stock, token_ids):
    """Moving a learned bias moves the read: b⁰ stays behind."""
    model = graft("wav", depth_anchored=True)
    expected = stock(token_ids).logits
    assert torch.equal(model(token_ids).logits, expected)
    silence(model)
    assert not torch.equal(model(token_ids).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_prior_is_rounded_as_its_bias_is(dtype, graft, stock, token_ids):
    """−1.7 is no bfloat16 number: cast to one, the bias must still be its own prior."""
    model = graft("wav", depth_anchored=True, depth_detail_bias=-1.7).to(dtype)
    assert torch.equal(model(token_ids).logits, deepcopy(stock).to(dtype)(token_ids).logits)


@pytest.mark.parametrize("bases", [["phase"], BOTH], ids=["phase", "both"])
def test_details_beside_a_null_source(bases, graft, stock, token_ids):
    model = graft("wav", depth_detail_bases=bases, depth_null_source=True, depth_anchored=True)
    output = model(token_ids, output_routing=True)
    assert torch.equal(output.logits, stock(token_ids).logits)
    read = output.routing["model.layers.2.attn_read"]
    assert read.sources == ["embedding", "block 0", *(f"block 0 {basis}" for basis in bases), "null"]
    # the null source has no bias
    assert torch.equal(read.weights[-1], read.weights[0]) and (read.weights[2] < read.weights[0]).all()
