# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Decoding: routing is per token, so every way of feeding the same tokens gives the same result."""

import pytest
import torch
from conftest import ROUTED_PRESETS, randomize_routing, tiny_config, tiny_qwen3_config
from transformers import DynamicCache

from depthroute import DepthRouteForCausalLM


GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, "eos_token_id": None}


# what a preset's name does not say
VARIANTS = {
    "delta-block anchored, heads": ("delta-block", {"depth_anchored": True, "depth_num_heads": 4}),
    "wav decoupled, null": ("wav", {"depth_value_route": "decoupled", "depth_null_source": True}),
    "dar dynamic": ("dar", {"dual_gates": "dynamic", "dual_partial_source": False}),
}


@pytest.fixture(scope="module", params=[*ROUTED_PRESETS, *VARIANTS])
def model(request):
    torch.manual_seed(0)
    preset, values = VARIANTS.get(request.param, (request.param, {}))
    model = DepthRouteForCausalLM(tiny_config(preset, base=tiny_qwen3_config(num_hidden_layers=4), **values)).eval()
    randomize_routing(model)
    return model


@pytest.mark.smoke
def test_cached_equals_uncached(model, token_ids):
    cached = model.generate(token_ids, use_cache=True, **GREEDY)
    assert torch.equal(cached, model.generate(token_ids, use_cache=False, **GREEDY))
    assert cached.shape == (2, 21)


@torch.no_grad()
def test_chunked_prefill_equals_one_pass(model, token_ids):
    whole = model(token_ids).logits
    cache = DynamicCache(config=model.config)
    chunks = [model(chunk, past_key_values=cache, use_cache=True).logits for chunk in token_ids.split([5, 1, 7], dim=1)]
    # the same float32 products over other shapes: a few roundings of logits of order 10
    torch.testing.assert_close(torch.cat(chunks, dim=1), whole, rtol=0, atol=1e-4)
    assert torch.equal(torch.cat(chunks, dim=1).argmax(-1), whole.argmax(-1))


def test_left_padding_changes_nothing(model, token_ids):
    padding = torch.zeros(2, 4, dtype=torch.long)
    padded = torch.cat([padding, token_ids], dim=1)
    mask = torch.cat([padding, torch.ones_like(token_ids)], dim=1)
    found = model.generate(padded, attention_mask=mask, **GREEDY)
    assert torch.equal(found[:, 4:], model.generate(token_ids, **GREEDY))


def test_a_static_cache_gives_the_same_tokens(model, token_ids):
    found = model.generate(token_ids, cache_implementation="static", **GREEDY)
    assert torch.equal(found, model.generate(token_ids, **GREEDY))


def test_embeddings_in_place_of_ids(model, token_ids):
    embeds = model.get_input_embeddings()(token_ids)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(token_ids).logits)
    found = model.generate(inputs_embeds=embeds, **GREEDY)
    assert torch.equal(found, model.generate(token_ids, **GREEDY)[:, token_ids.shape[1] :])


@pytest.mark.parametrize("keep", [1, 4])
def test_logits_to_keep(model, token_ids, keep):
    # a product over fewer rows may round otherwise
    torch.testing.assert_close(
        model(token_ids, logits_to_keep=keep).logits, model(token_ids).logits[:, -keep:], rtol=0, atol=1e-5
    )


def test_beams_do_not_depend_on_the_cache(model, token_ids):
    beams = {**GREEDY, "num_beams": 3}
    assert torch.equal(
        model.generate(token_ids, use_cache=True, **beams), model.generate(token_ids, use_cache=False, **beams)
    )


def test_assisted_decoding_with_the_base_as_assistant(model, stock, token_ids):
    prompt = token_ids[:1]
    assert torch.equal(model.generate(prompt, assistant_model=stock, **GREEDY), model.generate(prompt, **GREEDY))


def test_routing_in_generate(model, token_ids):
    output = model.generate(token_ids, output_routing=True, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, model.generate(token_ids, **GREEDY))
    assert len(output.routing) == 8
    if model.config.residual_type in ("depth_attention", "dual_stream"):  # the baselines have no weights over depth
        axis = -1 if model.config.depth_num_heads == 1 else -2
        lengths = [next(iter(step.values())).weights.shape[axis] for step in output.routing]
        assert lengths == [13] + [1] * 7
    with pytest.raises(ValueError, match="return_dict_in_generate: got False, allowed: True"):
        model.generate(token_ids, output_routing=True, **GREEDY)


def test_routing_in_assisted_decoding(model, stock, token_ids):
    prompt = token_ids[:1]
    output = model.generate(prompt, assistant_model=stock, output_routing=True, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, model.generate(prompt, **GREEDY)) and output.routing


def test_sampling_is_reproducible(model, token_ids):
    options = {**GREEDY, "do_sample": True}
    torch.manual_seed(3)
    first = model.generate(token_ids, **options)
    torch.manual_seed(3)
    assert torch.equal(model.generate(token_ids, **options), first)


def test_resizing_the_vocabulary(model, token_ids):
    import copy

    grown = copy.deepcopy(model)
    grown.resize_token_embeddings(101)
    output = grown(token_ids)
    assert output.logits.shape[-1] == 101
    torch.testing.assert_close(output.logits[..., :97], model(token_ids).logits, rtol=0, atol=1e-5)
    assert grown.routing_parameters().keys() == model.routing_parameters().keys()
