# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One conversion of every family in a fresh process that cannot import this project: the folder's own code, loaded through the
Auto class of its kind, computes what the stock class computes from the source's files."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_alone, tiny_qwen3_config
from conversion_helpers import SIZES, edit_json, save_checkpoint, tiny_llama_config, tiny_moe_config
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
)

from depthroute import convert


SIZED = {**{key: getattr(tiny_qwen3_config(), key) for key in SIZES}, "num_hidden_layers": 2}
QWEN2 = {key: value for key, value in SIZED.items() if key != "head_dim"}
SMALL = {"num_hidden_layers": 2}
PRESET = {"llama": "attnres"}
"""Other than the default."""
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

FAMILIES = {
    "qwen3": (lambda: Qwen3ForCausalLM(tiny_qwen3_config(rope_parameters=YARN, **SMALL)), "CausalLM"),
    "qwen3-moe": (lambda: Qwen3MoeForCausalLM(tiny_moe_config(**SMALL)), "CausalLM"),
    "llama": (lambda: LlamaForCausalLM(tiny_llama_config(attention_bias=True, **SMALL)), "CausalLM"),
    "mistral": (lambda: MistralForCausalLM(MistralConfig(**{**SIZED, "sliding_window": 5})), "CausalLM"),
    "qwen2": (
        lambda: Qwen2ForCausalLM(
            Qwen2Config(**QWEN2, use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True)
        ),
        "CausalLM",
    ),
    "qwen3-embedding": (lambda: Qwen3Model(tiny_qwen3_config(tie_word_embeddings=True, **SMALL)), ""),
    "qwen3-moe without a head": (lambda: Qwen3MoeModel(tiny_moe_config(**SMALL)), ""),
    "qwen3-classifier": (
        lambda: Qwen3ForSequenceClassification(tiny_qwen3_config(num_labels=3, pad_token_id=0, **SMALL)),
        "SequenceClassification",
    ),
    "mistral-classifier": (
        lambda: MistralForSequenceClassification(MistralConfig(**SIZED, num_labels=3, pad_token_id=0)),
        "SequenceClassification",
    ),
}  # fmt: skip

CODE = """
import json
import torch
import transformers
torch.set_num_threads(1)
ids = torch.randint(1, 97, (2, 13), generator=torch.Generator().manual_seed(5))
found = {}
for name, (source, out, kind) in json.loads(sys.argv[1]).items():
    auto = getattr(transformers, "AutoModel" + ("For" + kind if kind else ""))
    outputs = []
    for folder, trust in ((source, False), (out, True)):
        model, loading = auto.from_pretrained(folder, trust_remote_code=trust, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"], (name, loading)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # equal alignment
        with torch.no_grad():
            outputs.append(getattr(model.eval()(ids), "logits" if kind else "last_hidden_state"))
    found[name] = [type(model).__name__, type(model).__module__.split(".")[0], torch.equal(*outputs), outputs[0].std().item()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, list]:
    root: Path = tmp_path_factory.mktemp("families")
    work = {}
    for index, (name, (build, kind)) in enumerate(FAMILIES.items()):
        source, out = root / f"source-{index}", root / f"out-{index}"
        torch.manual_seed(index)
        model = build()
        for key, parameter in model.named_parameters():
            if key.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)  # fresh ones are zero
        save_checkpoint(model.to(torch.bfloat16) if index % 2 else model, source)
        if name == "qwen3-embedding":
            edit_json(source / "config.json", architectures=["Qwen3ForCausalLM"])
        convert(source, out, PRESET.get(name), verify=False)
        work[name] = [str(source), str(out), kind]
    done = run_alone(CODE, json.dumps(work), cache=root)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_alone_computes_what_its_source_computes(name, alone):
    kind = FAMILIES[name][1]
    ours, module, equal, spread = alone[name]
    assert ours == (f"DepthRouteFor{kind}" if kind else "DepthRouteModel") and module == "transformers_modules"
    assert equal and spread > 0.01 and sys.modules.get("depthroute")
