# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The two names of the KV cache, and the releases that are refused, taken and warned about."""

import inspect
import warnings

import pytest
import torch
from conftest import tiny_config
from transformers import DynamicCache

from depthroute import DepthRouteForCausalLM, DepthRouteModel
from depthroute.modeling.compat import CACHE_NAME, cache_argument, check_transformers_version


@pytest.mark.smoke
def test_releases():
    with pytest.raises(ImportError, match="^DepthRoute needs transformers ≥ 5.17, found 5.16.4$"):
        check_transformers_version("5.16.4")
    with pytest.raises(ImportError, match="found 4.57.1"):
        check_transformers_version("4.57.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_transformers_version("5.17.0")
        check_transformers_version("5.24.3")
    with pytest.warns(UserWarning, match="tested up to transformers 5.24, found 5.31.0.dev0"):
        check_transformers_version("5.31.0.dev0")


@pytest.mark.smoke
def test_either_name_reaches_the_forward():
    class Module:
        @cache_argument
        def forward(self, ids, cache=None, **kwargs):
            return cache, kwargs

    assert list(inspect.signature(Module.forward).parameters) == ["self", "ids", CACHE_NAME, "kwargs"]
    for name in ("cache", "past_key_values"):
        assert Module().forward(0, **{name: "kv", "x": 1}) == ("kv", {"x": 1})
        assert Module().forward(0, **{name: None}) == (None, {})
    assert Module().forward(0, "positional") == ("positional", {})


@pytest.mark.smoke
@torch.no_grad()
def test_a_cache_given_under_either_name_is_used(token_ids):
    model = DepthRouteModel(tiny_config("delta")).eval()
    assert CACHE_NAME in inspect.signature(DepthRouteForCausalLM.forward).parameters
    whole = model(token_ids).last_hidden_state
    for name in ("cache", "past_key_values"):
        cache = DynamicCache(config=model.config)
        model(token_ids[:, :9], **{name: cache}, use_cache=True)
        output = model(token_ids[:, 9:], **{name: cache}, use_cache=True)
        assert cache.get_seq_length() == 13 and output[CACHE_NAME] is cache
        torch.testing.assert_close(output.last_hidden_state, whole[:, 9:], rtol=0, atol=1e-4)
