# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Similarity of sources, of streams, and norms, against what the model's own tensors say."""

import pytest
import torch
from conftest import randomize_routing

from depthroute.diagnostics import linear_cka, norm_growth, source_similarity, stream_cka
from depthroute.diagnostics.geometry import CKAObserver, SimilarityObserver
from depthroute.diagnostics.observe import Observer, observe, offered_sources, stream_states
from depthroute.modeling.depth_schedule import live_reads, read_name, source_labels


class Keep(Observer):
    """All states of one forward pass, by sublayer."""

    def __init__(self):
        self.states, self.inputs, self.updates = {}, {}, {}

    def read(self, residual, state, s, x):
        self.residual = residual
        self.states[s], self.inputs[s] = state, x

    def write(self, s, update):
        self.updates[s] = update


def routed(graft, preset, **values):
    model = graft(preset, **values)
    randomize_routing(model)
    return model


def long_batch(tokens=40, rows=2):
    return {"input_ids": torch.randint(1, 97, (rows, tokens), generator=torch.Generator().manual_seed(5))}


def padded(batch, padding=9):
    """The same batch with padding, of random ids, behind each row."""
    ids = batch["input_ids"]
    junk = torch.randint(1, 97, (len(ids), padding), generator=torch.Generator().manual_seed(6))
    mask = torch.cat([torch.ones_like(ids), torch.zeros_like(junk)], dim=1)
    return {"input_ids": torch.cat([ids, junk], dim=1), "attention_mask": mask}


@pytest.mark.parametrize("preset", ["attnres", "attnres-states", "delta-block", "wav", "dar"])
def test_cosines_are_those_of_the_sources(preset, graft):
    model, batch = routed(graft, preset), long_batch(7)
    keep = Keep()
    observe(model, [batch], [keep])
    found = source_similarity(model, [batch])
    names = [f"model.{read_name(model.config, s)}" for s in live_reads(model.config)]
    assert list(found) == (["stream 0", "stream 1"] if preset == "dar" else ["main"])
    for stream, similarities in found.items():
        assert list(similarities) == names
        for s, one in zip(live_reads(model.config), similarities.values()):
            sources = torch.stack(list(offered_sources(keep.residual, keep.states[s], s)[stream])).flatten(1, 2)
            unit = torch.nn.functional.normalize(sources.double(), dim=-1)
            expected = torch.einsum("snd,tnd->st", unit, unit) / sources.shape[1]
            assert one.sources == source_labels(model.config, s)
            torch.testing.assert_close(torch.tensor(one.cosine).double(), expected, rtol=0, atol=1e-5)
            count = len(one.sources)
            pairs = [expected[i, j].item() for i in range(count) for j in range(i + 1, count)]
            assert one.mean == pytest.approx(sum(pairs) / len(pairs), abs=1e-5)
            neighbours = [expected[i, i + 1].item() for i in range(count - 1)]
            assert one.adjacent == pytest.approx(sum(neighbours) / len(neighbours), abs=1e-5)


def test_identical_sources_have_cosine_one(graft):
    model = graft("attnres-states")
    for layer in model.model.layers:  # no branch writes: every state is the embedding
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    for one in source_similarity(model, [long_batch(5)])["main"].values():
        assert torch.tensor(one.cosine).sub(1).abs().max() < 1e-6  # float32
        assert (one.mean, one.adjacent) == (pytest.approx(1), pytest.approx(1))


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "entries only"])
def test_cka_is_that_of_the_newest_entries(partial, graft):
    model, batch = routed(graft, "dar", dual_partial_source=partial), long_batch()
    keep = Keep()
    observe(model, [batch], [keep])
    found = stream_cka(model, [batch])
    # blocks of two layers: with the partial every read sees something new, without it those at a block's start
    assert found.sublayers == (list(range(17)) if partial else [0, 4, 8, 12, 16])
    (pair,) = found.pairs
    assert pair["streams"] == [0, 1]
    for row, i in enumerate(found.sublayers):
        for column, j in enumerate(found.sublayers):
            first = keep.residual.streams(keep.states[i], i)[0][-1].flatten(0, 1)
            second = keep.residual.streams(keep.states[j], j)[1][-1].flatten(0, 1)
            assert pair["cka"][row][column] == pytest.approx(linear_cka(first, second), abs=1e-6)
    later = torch.tensor(pair["cka"])[1:, 1:]
    assert pair["cka"][0][0] == pytest.approx(1)  # both streams are the embedding
    assert pair["same_depth"] == pytest.approx(later.diagonal().mean().item(), rel=1e-5)
    count = len(later)
    off = (later.sum() - later.diagonal().sum()) / (count * (count - 1))
    assert pair["other_depths"] == pytest.approx(off.item(), rel=1e-4)


@pytest.mark.parametrize("streams", [2, 4])
def test_cka_between_all_streams_of_mhc(streams, graft):
    model, batch = routed(graft, "mhc", hyper_num_streams=streams), long_batch()
    keep = Keep()
    observe(model, [batch], [keep])
    found = stream_cka(model, [batch])
    pairs = [[i, j] for i in range(streams) for j in range(i + 1, streams)]
    assert [pair["streams"] for pair in found.pairs] == pairs and found.sublayers == list(range(17))
    for (i, j), pair in zip(pairs, found.pairs):
        first, second = (keep.states[s].carry[1][..., k, :].flatten(0, 1) for s, k in ((7, i), (12, j)))
        assert pair["cka"][7][12] == pytest.approx(linear_cka(first, second), abs=1e-6)
        assert pair["cka"][0][0] == pytest.approx(1)


def test_streams_made_equal_have_cka_one_and_one_stream_has_none(graft, token_ids):
    model = graft("dar")
    for name, parameter in model.named_parameters():
        if name.endswith("gate_logits") and len(parameter) == 4:
            parameter.data[2:] = 0  # equal write gates
    (pair,) = stream_cka(model, [long_batch()]).pairs
    assert pair["same_depth"] == pytest.approx(1, abs=1e-5)
    assert stream_cka(graft("attnres-block"), [long_batch()]) is None
    assert stream_cka(model, [{"input_ids": token_ids[:1, :3]}]) is None


@pytest.mark.parametrize("preset", ["standard", "attnres-block", "delta", "dar", "mhc", "rezero"])
def test_norms_are_those_of_the_states(preset, graft):
    model, batch = routed(graft, preset), long_batch(6)
    keep = Keep()
    observe(model, [batch], [keep])
    norms = norm_growth(model, [batch])

    def mean_norm(tensor):
        return tensor.double().norm(dim=-1).mean().item()

    assert norms.stream == pytest.approx([mean_norm(keep.states[s].stream) for s in range(17)], rel=1e-5)
    assert norms.read == pytest.approx([mean_norm(keep.inputs[s]) for s in range(17)], rel=1e-5)
    assert norms.update == pytest.approx([mean_norm(keep.updates[s]) for s in range(16)], rel=1e-5)
    assert norms.growth == norms.stream[-1] / norms.stream[0] > 1
    assert norms.stream_median[3] == pytest.approx(keep.states[3].stream.norm(dim=-1).median().item(), rel=1e-5)
    assert len(norms.streams) == (4 if preset == "mhc" else 0)
    for index, stream in enumerate(norms.streams):
        assert stream == pytest.approx([mean_norm(keep.states[s].carry[1][..., index, :]) for s in range(17)], rel=1e-5)
    hidden = model(batch["input_ids"], output_hidden_states=True).hidden_states
    assert norms.stream[2:16:2] == pytest.approx([mean_norm(state) for state in hidden[1:8]], rel=1e-5)


@pytest.mark.parametrize("preset", ["wav", "dar", "mhc"])
def test_padding_is_left_out_of_everything(preset, graft):
    model, batch = routed(graft, preset), long_batch(12)
    clean, masked = source_similarity(model, [batch]), source_similarity(model, [padded(batch)])
    for stream, similarities in clean.items():
        for name, one in similarities.items():
            # float32 in another order of summation, here and below
            torch.testing.assert_close(
                torch.tensor(masked[stream][name].cosine), torch.tensor(one.cosine), rtol=0, atol=1e-4
            )
    assert norm_growth(model, [padded(batch)]).stream == pytest.approx(norm_growth(model, [batch]).stream, rel=1e-4)
    if preset != "wav":
        for pair, expected in zip(stream_cka(model, [padded(batch)]).pairs, stream_cka(model, [batch]).pairs):
            torch.testing.assert_close(torch.tensor(pair["cka"]), torch.tensor(expected["cka"]), rtol=0, atol=1e-3)


def test_batches_add_up(graft):
    model, batch = routed(graft, "dar"), long_batch(12, rows=4)
    halves = [{"input_ids": batch["input_ids"][:2]}, {"input_ids": batch["input_ids"][2:]}]
    whole, parts = SimilarityObserver(), SimilarityObserver()
    observe(model, [batch], [whole])
    observe(model, halves, [parts])
    for name, one in whole.result()["stream 1"].items():
        torch.testing.assert_close(
            torch.tensor(parts.result()["stream 1"][name].cosine), torch.tensor(one.cosine), rtol=0, atol=1e-5
        )
    twice = CKAObserver()
    observe(model, [batch, batch], [twice])
    (pair,), (single,) = twice.result().pairs, stream_cka(model, [batch]).pairs
    torch.testing.assert_close(torch.tensor(pair["cka"]), torch.tensor(single["cka"]), rtol=0, atol=1e-5)


def test_stream_states_of_one_stream_are_none(graft):
    keep = Keep()
    observe(graft("attnres-block"), [long_batch(4)], [keep])
    assert stream_states(keep.residual, keep.states[3], 3) == []
