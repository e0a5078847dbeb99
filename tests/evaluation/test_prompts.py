# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What lm-eval sends to a model: the same prompts, ids, padding and lengths for a base and for its conversion."""

import pytest
from lm_eval.models.huggingface import HFLM
from text_model_helpers import character_tokenizer

from depthroute import convert
from depthroute.errors import Refused
from depthroute.evaluation import evaluate


# as Qwen3's: thinking is switched off by an empty thought behind the assistant's turn
TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
TASKS = ["depthroute_choice", "depthroute_perplexity", "depthroute_generation"]


@pytest.fixture(scope="module")
def folders(stock, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for saved in (stock, tokenizer):
        saved.save_pretrained(folder / "base")
    convert(folder / "base", folder / "converted", "delta-block", verify=False)
    return folder


@pytest.fixture
def sent(monkeypatch):
    """What reaches the models: (kind, ids, attention mask, options), call by call."""
    calls: list[tuple] = []
    call, generate = HFLM._model_call, HFLM._model_generate

    def watched_call(self, inps, attn_mask=None, labels=None):
        calls.append(("call", inps.tolist(), None if attn_mask is None else attn_mask.tolist(), None))
        return call(self, inps, attn_mask, labels)

    def watched_generate(self, context, max_length, stop, **options):
        mask = options["attention_mask"].tolist()
        rest = {name: value for name, value in options.items() if name != "attention_mask"}
        calls.append(("generate", context.tolist(), mask, (max_length, tuple(stop), sorted(rest.items()))))
        return generate(self, context, max_length, stop, **options)

    monkeypatch.setattr(HFLM, "_model_call", watched_call)
    monkeypatch.setattr(HFLM, "_model_generate", watched_generate)

    def run(folder, **options) -> list[tuple]:
        calls.clear()
        tasks = TASKS[2:] if options.get("enable_thinking") else TASKS  # lm-eval: thinking is for generation
        evaluate(folder, tasks, 3, 2, device="cpu", bootstrap_iters=0, **options)
        return list(calls)

    return run


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_length": 100},
        {"apply_chat_template": True},
        {"apply_chat_template": True, "enable_thinking": False, "system_instruction": "Be brief."},
        {"apply_chat_template": True, "enable_thinking": True, "think_end_token": "</think>"},
    ],
    ids=["plain", "short", "chat", "without-thinking", "with-thinking"],
)
def test_a_conversion_is_asked_what_its_base_is_asked(folders, sent, options):
    base, converted = (sent(folders / name, **options) for name in ("base", "converted"))
    assert base == converted and {call[0] for call in base} >= {"generate"}
    longest = options.get("max_length", 256)
    assert max(len(row) for call in base for row in call[1]) <= longest
    prompts = [character_tokenizer().decode(row) for call in base if call[0] == "generate" for row in call[1]]
    assert any("<assistant>" in prompt for prompt in prompts) == bool(options.get("apply_chat_template"))
    assert any("<think></think>" in prompt for prompt in prompts) == (options.get("enable_thinking") is False)
    assert all(("Be brief." in prompt) == ("system_instruction" in options) for prompt in prompts)
    masks = [row for call in base if call[0] == "generate" for row in call[2]]
    assert all(row == sorted(row) for row in masks)  # padded on the left
    assert any(0 in row for row in masks) or "max_length" in options  # where prompts are cut to one length


def test_thinking_needs_a_template_and_an_end(folders, stock, tmp_path):
    for options, message in {
        (("enable_thinking", False),): "enable_thinking: got False without apply_chat_template",
        (("enable_thinking", True), ("apply_chat_template", True)): "think_end_token: got None with enable_thinking",
    }.items():
        with pytest.raises(Refused, match=message):
            evaluate(folders / "base", "depthroute_choice", limit=1, device="cpu", **dict(options))
    with pytest.raises(Refused, match="apply_chat_template: got a tokenizer without chat template"):
        evaluate(stock, "depthroute_choice", limit=1, tokenizer=character_tokenizer(), apply_chat_template=True)
