# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Rescue gain: streams that carry nothing, everything, or their part."""

import pytest
import torch
from conftest import randomize_routing, tiny_config, tiny_qwen3_config

from depthroute import DepthRouteForCausalLM
from depthroute.diagnostics import rescue_gain
from depthroute.diagnostics.rescue import final_hidden_states


@pytest.fixture(scope="module")
def batches():
    ids = torch.randint(1, 97, (2, 2, 11), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids[0]}, {"input_ids": ids[1]}


def model_of(preset, layers=4, **values):
    torch.manual_seed(0)
    model = DepthRouteForCausalLM(
        tiny_config(preset, base=tiny_qwen3_config(num_hidden_layers=layers), **values)
    ).eval()
    randomize_routing(model)
    return model


def use_only(model, stream):
    """α of every read to 1 or 0: what reads give to branches comes from one stream's read alone."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate_logits"):
            parameter.data[0] = 200.0 if stream == 0 else -200.0


CASES = [("dar", {}), ("dar", {"depth_anchored": True}), ("dar", {"dual_gates": "dynamic"}), ("mhc", {})]
CASE_NAMES = ["dar", "anchored dar", "dynamic dar", "mhc"]


@pytest.mark.parametrize(("preset", "values"), CASES, ids=CASE_NAMES)
def test_interventions_end_at_the_two_clean_runs(preset, values, batches):
    own, other = batches
    model = model_of(preset, **values)
    with torch.no_grad():
        clean_own, clean_other = (model.model(batch["input_ids"]).last_hidden_state for batch in batches)
        every = range(4 if preset == "mhc" else 2)
        # a batch of twice the rows: float32 in another order
        torch.testing.assert_close(final_hidden_states(model, own, other, every), clean_own, rtol=0, atol=1e-4)
        torch.testing.assert_close(final_hidden_states(model, own, other, ()), clean_other, rtol=0, atol=1e-4)
        assert (clean_own - clean_other).abs().max() > 1


@pytest.mark.parametrize("unused", [0, 1])
@pytest.mark.parametrize("anchored", [False, True], ids=["plain", "anchored"])
def test_unused_stream_gains_nothing_and_the_used_one_all(unused, anchored, batches):
    # keys of its own: under cross keys the unused stream would still choose for the other
    model = model_of("dar", dual_routing="self", depth_anchored=anchored)
    use_only(model, 1 - unused)
    for name, parameter in model.named_parameters():
        if name.endswith("gate_logits") and len(parameter) == 4:
            parameter.data[3] = -parameter.data[
                2
            ]  # write gates that sum to 2: the streams' mean is the standard stream
    found = rescue_gain(model, [batches])
    # float32: sums of the streams' entries cancel in the anchored form; a loss gain is a ratio of differences of losses
    tolerance = 1e-3 if anchored else 1e-6
    for gain in (found.hidden, found.loss):
        assert gain[unused] == pytest.approx(0, abs=tolerance)
        assert gain[1 - unused] == pytest.approx(1, abs=tolerance)


def test_cross_keys_make_the_other_stream_matter(batches):
    model = model_of("dar", dual_routing="cross_key")
    use_only(model, 0)
    assert abs(rescue_gain(model, [batches]).hidden[0]) < 0.9  # its values are back, but not what chooses them


def test_gain_by_the_definition_and_padding_left_out(batches):
    model = model_of("dar")
    own, other = batches
    length = 7
    short = [
        {"input_ids": ids, "attention_mask": (torch.arange(11) < length).long().expand(2, -1)}
        for ids in (own["input_ids"], other["input_ids"])
    ]
    cut = [{"input_ids": batch["input_ids"][:, :length]} for batch in batches]
    with torch.no_grad():
        y, y_none, y_0, y_1 = (final_hidden_states(model, *cut, kept) for kept in ((0, 1), (), (0,), (1,)))
        losses = []
        for hidden in (y, y_none, y_0, y_1):
            logits = model.lm_head(hidden)[:, :-1].flatten(0, 1)
            losses.append(torch.nn.functional.cross_entropy(logits, cut[0]["input_ids"][:, 1:].flatten()).item())
    hidden_gain = [(1 - (one - y).norm() / (y_none - y).norm()).item() for one in (y_0, y_1)]
    loss_gain = [1 - abs(one - losses[0]) / abs(losses[1] - losses[0]) for one in losses[2:]]
    for found in (rescue_gain(model, [tuple(cut)]), rescue_gain(model, [tuple(short)])):
        # the loss gain is a ratio of differences of float32 losses
        assert found.hidden == pytest.approx(hidden_gain, abs=1e-4)
        assert found.loss == pytest.approx(loss_gain, abs=1e-2)
        assert found.losses["own"] == pytest.approx(losses[0], rel=1e-4)
        assert found.losses["replaced"] == pytest.approx(losses[1], rel=1e-4)
        assert found.losses["rescued"] == pytest.approx(losses[2:], rel=1e-3)


def test_a_stream_of_mhc_that_nothing_is_read_from_gains_nothing(batches):
    model = model_of("mhc", hyper_num_streams=2)
    for name, parameter in model.named_parameters():
        if name.endswith("gate_proj"):
            parameter.data.zero_()
        if name.endswith("gate_bias"):
            parameter.data.zero_()
            parameter.data[:2] = torch.tensor([5.0, -200.0])  # H^pre: all of stream 0
    gain = rescue_gain(model, [batches]).hidden
    # mHC adds an eps of 1e-6 to H^pre, and that much of stream 1 is read
    assert gain == pytest.approx([1, 0], abs=1e-2)


def test_mode_residuals_and_heads(batches):
    model = model_of("dar")
    residuals = [layer.residual for layer in model.model.layers]
    model.train()
    rescue_gain(model, [batches])
    assert model.training and [layer.residual for layer in model.model.layers] == residuals
    headless = rescue_gain(model.model, [batches])
    assert headless.loss is None and headless.losses is None and len(headless.hidden) == 2


def test_refusals(batches):
    with pytest.raises(ValueError, match="^residual_type: got 'depth_attention', allowed: dual_stream"):
        rescue_gain(model_of("attnres-block"), [batches])
    model = model_of("dar")
    with pytest.raises(ValueError, match="^pairs: got none"):
        rescue_gain(model, [])
    with pytest.raises(ValueError, match=r"^pairs: got \(2, 11\) and \(2, 5\)"):
        rescue_gain(model, [(batches[0], {"input_ids": batches[1]["input_ids"][:, :5]})])
