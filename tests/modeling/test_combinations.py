# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The axes combine freely: what no paper studied is held to the same promises."""

from copy import deepcopy

import pytest
import torch
from combination_cases import COMBINATIONS
from conftest import float64_loss, randomize_routing, tiny_config, tiny_qwen3_config
from read_helpers import random_reads, walk
from torch.utils.checkpoint import checkpoint

from depthroute import DepthRouteForCausalLM


EVERY_COMBINATION = pytest.mark.parametrize("case", COMBINATIONS)


@pytest.fixture(scope="module")
def build(graft):
    def combination(case, **values):
        preset, fields = COMBINATIONS[case]
        return graft(preset, **fields, **values)

    return combination


@EVERY_COMBINATION
def test_the_anchor_holds(case, build, stock, token_ids):
    model = build(case, depth_anchored=True)
    for dtype in (torch.float32, torch.bfloat16):
        model, source = model.to(dtype), deepcopy(stock).to(dtype)
        assert torch.equal(model(token_ids).logits, source(token_ids).logits)
    randomize_routing(model)
    assert not torch.equal(model(token_ids).logits, source(token_ids).logits)


@EVERY_COMBINATION
def test_every_parameter_is_used_and_checkpointing_changes_nothing(case, build, token_ids, float64_norms):
    model = build(case, depth_anchored=True).double().train()
    randomize_routing(model)

    def gradients():
        model.zero_grad()
        float64_loss(model, token_ids).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients()
    for name, gradient in expected.items():
        assert gradient is not None and torch.isfinite(gradient).all() and gradient.norm() > 0, name
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    # the harder kind: lists inside arguments would lose their gradients
    model._set_gradient_checkpointing(True, lambda *args: checkpoint(*args, use_reentrant=True))
    for name, gradient in gradients().items():
        # float64: without checkpointing several layers' reads are one product, whose sums have another order
        largest = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-11 * largest, msg=name)


@EVERY_COMBINATION
def test_saved_and_loaded(case, build, token_ids, tmp_path):
    model = build(case)
    randomize_routing(model)
    model.save_pretrained(tmp_path)
    loaded, report = DepthRouteForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    # a copy: what lies in a file is aligned to nothing, and products with one vector are rounded by where it lies
    assert torch.equal(deepcopy(loaded).eval()(token_ids).logits, model(token_ids).logits)


@EVERY_COMBINATION
def test_under_autocast(case, build, token_ids):
    """float32 parameters, bfloat16 products: routing itself stays in float32, and gradients arrive."""
    model = build(case).train()
    randomize_routing(model, scale=0.1)
    expected = model(token_ids, labels=token_ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        output = model(token_ids, labels=token_ids, output_routing=True)
    output.loss.backward()
    # products rounded to 2⁻⁸ through eight layers
    torch.testing.assert_close(output.loss, expected, rtol=0.05, atol=0.0)
    assert all(read.weights.dtype == torch.float32 for read in output.routing.values())
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


# --- heads


HEADS = {
    "attnres-block": {},
    "delta anchored": {"depth_anchored": True},
    "attnres-states": {},
    "rd-attnres": {},
    "wav": {"depth_null_source": True},
    "dar": {},
    "dar anchored": {"depth_anchored": True, "dual_routing": "self"},
    "dar-full": {"dual_routing": "cross_value"},
}


@pytest.mark.parametrize("case", HEADS)
def test_four_heads_are_four_reads_of_one_head_on_their_slices(case):
    """A head sees its slice of the query alone, and decides over its slice of the values alone; keys are normalised over the
    whole width for all of them."""
    base = tiny_qwen3_config(num_hidden_layers=3)
    preset = case.removesuffix(" anchored")
    several = tiny_config(preset, base=base, depth_num_heads=4, **HEADS[case])
    whole = walk(several, random_reads(several))
    single = tiny_config(preset, base=base, **HEADS[case])
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        reads = random_reads(single)
        for read in filter(None, reads):
            for name, parameter in read.named_parameters():
                if name.endswith("query"):
                    kept = parameter.data[..., part].clone()
                    parameter.data.zero_()
                    parameter.data[..., part] = kept
        alone = walk(single, reads)
        # float64: the same sums, of which some are zeros
        close = {"rtol": 1e-12, "atol": 1e-12}
        for s, (found, reference) in enumerate(zip(whole.readings, alone.readings)):
            torch.testing.assert_close(found.x[..., part], reference.x[..., part], **close, msg=f"read {s}")
            assert (found.value is None) == (reference.value is None)
            if found.value is not None:
                torch.testing.assert_close(found.value[..., part], reference.value[..., part], **close)
        for name, read in whole.record.items():
            torch.testing.assert_close(read.weights[..., head], alone.record[name].weights, **close)
        torch.testing.assert_close(whole.final[..., part], alone.final[..., part], **close)
    last = next(reversed(whole.record.values())).weights
    assert (last[..., 0] - last[..., 1]).abs().max() > 0.01


# --- what has no meaning


REFUSED = {
    "details without blocks": (
        "attnres",
        {"depth_detail_bases": ["phase"]},
        "depth_block_size: got None with depth_detail_bases = ['phase'], allowed: layers ≥ 1",
    ),
    "details of states": (
        "attnres-states",
        {"depth_block_size": 2, "depth_detail_bases": ["phase"]},
        "depth_source: got 'state' with details, allowed: 'output'",
    ),
    "the same detail twice": (
        "wav",
        {"depth_block_size": 1},
        "depth_detail_bases: got ['phase', 'split'] with depth_block_size = 1, where they are the same; allowed: one",
    ),
    "a basis twice": (
        "wav",
        {"depth_detail_bases": ["phase", "phase"]},
        "depth_detail_bases: got ['phase', 'phase'], allowed: each basis once",
    ),
    "a bias of no details": (
        "attnres-block",
        {"depth_detail_bias": -1.0},
        "depth_detail_bias: got -1.0, allowed: -2.0, it has no meaning without depth_detail_bases",
    ),
    "a cap of no details": (
        "delta-block",
        {"depth_detail_max_scale": 2.0},
        "depth_detail_max_scale: got 2.0, allowed: 1.0, it has no meaning without depth_detail_bases",
    ),
    "equal write gates": (
        "dar",
        {"dual_write_asymmetry": 0.0},
        "dual_write_asymmetry: got 0.0, allowed: between 0 and 1 (at 0 both streams start identical",
    ),
    "a gate of more than two": ("dar", {"dual_write_asymmetry": 1.0}, "dual_write_asymmetry: got 1.0, allowed"),
    "blocks for dar-full": (
        "dar-full",
        {"depth_block_size": 2},
        "depth_block_size: got 2, allowed: none, preset 'dar-full' has blocks of one layer",
    ),
    "blocks for mhc": (
        "mhc",
        {"depth_block_size": 2},
        "depth_block_size: got 2, allowed: none, preset 'mhc' has no blocks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_combinations_without_a_meaning_are_refused_by_name(case):
    preset, values, message = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        tiny_config(preset, **values)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
