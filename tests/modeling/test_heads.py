# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The four heads on a converted decoder: outputs of stock Qwen3's heads, and routing on request."""

import pytest
import torch
from conftest import tiny_config, tiny_qwen3_config
from torch.utils._pytree import tree_map
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

from depthroute import (
    DepthRouteForQuestionAnswering,
    DepthRouteForSequenceClassification,
    DepthRouteForTokenClassification,
)


BASE = {"num_hidden_layers": 4, "pad_token_id": 0, "num_labels": 3}
HEADS = {
    "sequence": (
        Qwen3ForSequenceClassification,
        DepthRouteForSequenceClassification,
        AutoModelForSequenceClassification,
    ),
    "token": (Qwen3ForTokenClassification, DepthRouteForTokenClassification, AutoModelForTokenClassification),
    "question": (Qwen3ForQuestionAnswering, DepthRouteForQuestionAnswering, AutoModelForQuestionAnswering),
}


def labels_for(kind, ids):
    if kind == "question":
        return {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 4])}
    return {"labels": torch.tensor([0, 2]) if kind == "sequence" else ids % 3}


@pytest.mark.parametrize("kind", HEADS)
def test_anchored_head_equals_stock(kind, token_ids, tmp_path):
    stock_class, our_class, auto_class = HEADS[kind]
    torch.manual_seed(0)
    stock = stock_class(tiny_qwen3_config(**BASE)).eval()
    model = our_class(tiny_config("delta-block", base=stock.config, depth_anchored=True)).eval()
    weights = {name.replace("transformer.", "model."): tensor for name, tensor in stock.state_dict().items()}
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys and set(result.missing_keys) == set(model.routing_parameters())

    labels = labels_for(kind, token_ids)
    expected = stock(token_ids, **labels)
    output = model(token_ids, **labels, output_routing=True, output_hidden_states=True)
    assert torch.equal(output.loss, expected.loss) and output.loss.requires_grad
    assert len(output.hidden_states) == 5
    name = "model.layers.2.attn_read"
    assert output.routing[name].sources == ["embedding", "block 0"] and hasattr(model.get_submodule(name), "query")
    assert "routing" not in model(token_ids)
    # what gathers and moves outputs takes them apart and builds them anew
    again = tree_map(lambda leaf: leaf, output)
    assert type(again) is type(output) and again.routing.keys() == output.routing.keys()

    model.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path).eval()
    assert type(loaded) is our_class
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key


def test_a_classifier_loads_from_a_language_model(tmp_path, graft):
    graft("attnres").save_pretrained(tmp_path)
    model, report = DepthRouteForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, output_loading_info=True
    )
    assert set(report["missing_keys"]) == {"score.weight"} and model.config.num_labels == 5
