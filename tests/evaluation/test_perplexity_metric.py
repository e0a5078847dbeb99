# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The `evaluate` metric: without a network, equal to a training run's validation loss and to lm-eval's rolling likelihoods."""

import math

import evaluate as hf_evaluate
import pytest
import torch
from conftest import randomize_routing
from text_model_helpers import character_tokenizer, save_folder
from transformers import AutoTokenizer, default_data_collator

from depthroute.evaluation import PERPLEXITY_METRIC, evaluate
from depthroute.training import DepthRouteTrainer, DepthRouteTrainingArguments
from depthroute.training.data import PackedBlocks


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    return hf_evaluate.load(PERPLEXITY_METRIC, cache_dir=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folder(graft, tmp_path_factory):
    model = graft("delta-block", depth_anchored=True)
    randomize_routing(model)
    return str(save_folder(model, tmp_path_factory.mktemp("metric") / "model"))


@pytest.fixture(scope="module")
def model(graft):
    routed = graft("delta-block", depth_anchored=True)
    randomize_routing(routed)
    return routed


TEXTS = ["a short one", "x", "def add(a, b):\n    return a + b\n" * 3]


def test_equals_the_validation_loss_of_a_training_run(metric, folder, model, tmp_path):
    ids = torch.randint(1, 97, (6, 16), generator=torch.Generator().manual_seed(0)).int()
    tokenizer = character_tokenizer()
    texts = [tokenizer.decode(row) for row in ids]
    assert tokenizer(texts[0]).input_ids == ids[0].tolist()
    arguments = DepthRouteTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True)
    blocks = PackedBlocks(ids.flatten().numpy(), None, 16)
    trainer = DepthRouteTrainer(model=model, args=arguments, eval_dataset=blocks, data_collator=default_data_collator)
    expected = trainer.evaluate()
    found = metric.compute(predictions=texts, model=folder, add_start_token=False, device="cpu")
    # float32 losses of some tokens, averaged in another order
    assert found["loss"] == pytest.approx(expected["eval_loss"], rel=1e-6) and found["tokens"] == 6 * 15
    assert found["perplexity"] == pytest.approx(expected["eval_perplexity"], rel=1e-5)


@pytest.mark.parametrize("max_length", [None, 40])
def test_equals_lm_evals_rolling_likelihoods(metric, model, max_length):
    task = "depthroute_perplexity"
    result = evaluate(model, task, 4, 3, tokenizer=character_tokenizer(), max_length=max_length, bootstrap_iters=0)
    samples = sorted(result["samples"][task], key=lambda sample: sample["doc_id"])
    texts = [sample["doc"]["text"] for sample in samples]
    assert min(map(len, texts)) > 256  # longer than the context: several windows
    found = metric.compute(
        predictions=texts, model=model, tokenizer=character_tokenizer(), max_length=max_length, batch_size=3
    )
    for text, sample, perplexity in zip(texts, samples, found["perplexities"], strict=True):
        expected = -sample["resps"][0][0] / len(text)
        # float32 sums over several hundred tokens, in another order
        assert math.log(perplexity) == pytest.approx(expected, rel=1e-6)
    assert found["tokens"] == sum(map(len, texts))


def test_by_hand_with_and_without_a_start_token(metric, model):
    tokenizer = character_tokenizer()
    sums, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for start in (True, False):
        for text in TEXTS if start else TEXTS[::2]:
            ids = torch.tensor([[tokenizer.eos_token_id] * start + tokenizer(text).input_ids])
            logits = model(ids).logits[0, :-1].double().log_softmax(-1)
            sums[start] -= logits.gather(1, ids[0, 1:, None]).sum().item()
            counts[start] += ids.shape[1] - 1
    for start in (True, False):
        texts = TEXTS if start else TEXTS[::2]
        for batch_size in (1, 2, 8):  # padding changes nothing; float32 in another order
            found = metric.compute(
                predictions=texts, model=model, tokenizer=tokenizer, add_start_token=start, batch_size=batch_size
            )
            assert found["loss"] == pytest.approx(sums[start] / counts[start], rel=1e-5)
            assert found["tokens"] == counts[start] and len(found["perplexities"]) == len(texts)
            assert found["mean_perplexity"] == pytest.approx(sum(found["perplexities"]) / len(texts))


def test_the_bos_token_is_the_start_where_there_is_one(metric, model):
    tokenizer = character_tokenizer()
    plain = metric.compute(predictions=TEXTS, model=model, tokenizer=tokenizer)["loss"]
    tokenizer.bos_token = "~"
    with_bos = metric.compute(predictions=TEXTS, model=model, tokenizer=tokenizer)["loss"]
    assert with_bos == pytest.approx(
        metric.compute(
            predictions=["~" + text for text in TEXTS], model=model, tokenizer=tokenizer, add_start_token=False
        )["loss"],
        rel=1e-5,
    )
    assert abs(with_bos - plain) > 1e-4


def test_an_ordinary_model_works_too(metric, stock, tmp_path):
    save_folder(stock, tmp_path / "stock")
    found = metric.compute(predictions=TEXTS, model=str(tmp_path / "stock"), device="cpu")
    here = metric.compute(predictions=TEXTS, model=stock, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "stock"))
    assert found["perplexity"] == pytest.approx(here["perplexity"], rel=1e-6)


def test_bad_input_is_refused(metric, model):
    for options, message in (
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"max_length": 257}, "max_length: got 257, allowed: 1 to 256"),
        ({"add_start_token": False}, "predictions: text 1 has no token to predict"),
        ({"tokenizer": None}, "tokenizer: got None"),
        ({"dtype": "float33"}, "dtype: got 'float33', allowed: auto, float32"),
        ({"predictions": []}, "predictions: got none, allowed: at least one text"),
    ):
        with pytest.raises(ValueError, match=message):
            metric.compute(
                **{"predictions": TEXTS, "model": model, "tokenizer": character_tokenizer(), **options},
            )
