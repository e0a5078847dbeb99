# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""No code of a source is ever run: a folder that has some is refused, or taken for the stock model that it names."""

import os
from pathlib import Path

import pytest
from conversion_helpers import edit_json, edit_weights
from safetensors.torch import load_file

from depthroute import convert, verify
from depthroute.errors import Refused


AUTO_MAP = {"AutoConfig": "trap.TrapConfig", "AutoModelForCausalLM": "trap.TrapForCausalLM"}


@pytest.fixture
def trapped(copy_of, tmp_path):
    """A source whose module writes a file as soon as it is imported."""
    source, mark = copy_of("qwen3"), tmp_path / "the-code-ran"
    (source / "trap.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from transformers import Qwen3Config as TrapConfig, Qwen3ForCausalLM as TrapForCausalLM\n"
    )
    edit_json(source / "config.json", auto_map=AUTO_MAP)
    yield source
    assert not mark.exists()


def test_it_is_refused_with_the_way_out(trapped, tmp_path, run_cli):
    code, _, err = run_cli("convert", trapped, tmp_path / "out")
    assert code == 2 and "config.json: auto_map: got {'AutoConfig': 'trap.TrapConfig'" in err
    assert (
        "code of its own, which is never run; allowed: a model without, or --ignore-code where its tensors are those"
        in err
    )
    assert "Qwen3ForCausalLM or Qwen3Model or Qwen3ForSequenceClassification as transformers has it" in err
    assert os.listdir(tmp_path) == [trapped.name]


def test_a_module_that_nothing_names_is_enough(trapped, tmp_path):
    edit_json(trapped / "config.json", auto_map=None)
    with pytest.raises(Refused, match=r"config.json: got trap.py beside it, code of its own"):
        convert(trapped, tmp_path / "out")


def test_it_is_taken_for_the_stock_model(trapped, tmp_path, run_cli):
    code, out, err = run_cli("convert", trapped, tmp_path / "out", "--ignore-code")
    assert code == 0 and "bitwise equal to the source" in out, err
    assert not (tmp_path / "out" / "trap.py").exists() and "trap" not in (tmp_path / "out" / "config.json").read_text()
    source, written = load_file(trapped / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert all((written[key] == tensor).all() for key, tensor in source.items())
    assert "--ignore-code" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(Refused, match="auto_map"):
        verify(trapped, tmp_path / "out")
    assert run_cli("verify", trapped, tmp_path / "out", "--ignore-code")[0] == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda w: w.update({"model.gate.weight": w["model.norm.weight"].clone()}),
            "1 unexpected keys: model.gate.weight",
        ),
        (lambda w: w.pop("model.layers.0.self_attn.q_norm.weight"), "1 missing keys: model.layers.0.self_attn.q_norm"),
    ],
    ids=["a tensor too many", "one too few"],
)
def test_tensors_that_are_not_the_stock_models_are_refused_all_the_same(change, message, trapped, tmp_path):
    edit_weights(trapped, change)
    with pytest.raises(Refused, match=message):
        convert(trapped, tmp_path / "out", ignore_code=True)


def test_a_model_type_of_its_own_stays_refused(trapped, tmp_path):
    edit_json(trapped / "config.json", model_type="trap", architectures=["TrapForCausalLM"])
    with pytest.raises(Refused, match=r"architectures: got TrapForCausalLM \(model_type 'trap'\)"):
        convert(trapped, tmp_path / "out", ignore_code=True)


def test_the_tokenizers_code_stays_refused(trapped, tmp_path):
    edit_json(trapped / "tokenizer_config.json", auto_map={"AutoTokenizer": ["trap.Tokenizer", None]})
    with pytest.raises(Refused, match="tokenizer_config.json: auto_map: got"):
        convert(trapped, tmp_path / "out", ignore_code=True)
    assert Path(trapped / "trap.py").exists()
