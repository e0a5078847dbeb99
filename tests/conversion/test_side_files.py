# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What travels beside the weights, byte for byte, and what stays behind, by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import run_alone
from conversion_helpers import edit_json, tiny_tokenizer
from transformers import AutoTokenizer, GenerationConfig

from depthroute import DepthRouteForCausalLM, convert
from depthroute.errors import CheckFailed, Refused
from depthroute_conversion import tokenizer
from depthroute_conversion.side_files import copy_side_files, legal_files


ROWS = 97

# the features of Qwen3's: tools, thinking that may be switched off, a generation prompt
TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif -%}"
    "{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{%- if m.tool_calls %}{% for call in m.tool_calls %}<call>{{ call.function.name }}</call>{% endfor %}{% endif %}{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>"
    "{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif -%}"
)
OTHER_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "the thin thing"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "search", "arguments": {}}}]},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "search", "description": "finds", "parameters": {"type": "object", "properties": {}}}}]  # fmt: skip
ASKED = [{"tools": tools, "enable_thinking": thinking} for tools in (None, TOOLS) for thinking in (True, False)]


def folder_with_tokenizer(folder: Path, template: str | None = None) -> Path:
    folder.mkdir()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def rendered(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False, **asked)
        for asked in ASKED
    ]


def put_in_file(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def put_in_settings(folder):
    edit_json(folder / "tokenizer_config.json", chat_template=TEMPLATE)


def put_in_both(folder):
    put_in_file(folder)
    edit_json(folder / "tokenizer_config.json", chat_template=OTHER_TEMPLATE)


def put_beside(folder):
    (folder / "chat_template.jinja").write_text(OTHER_TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": OTHER_TEMPLATE}))


@pytest.mark.parametrize("put", [put_in_file, put_in_settings, put_in_both, put_beside])
def test_a_prompt_renders_to_the_same_ids(put, originals, tmp_path):
    source = Path(shutil.copytree(originals["qwen3"], tmp_path / "source"))
    (source / "chat_template.jinja").unlink()
    put(source)
    convert(source, tmp_path / "out", verify=False)
    before, after = rendered(source), rendered(tmp_path / "out")
    assert before == after
    # tools, and thinking where the template is the one for it, make a difference: the same ids are no accident
    assert len(set(map(tuple, before))) == (3 if put is put_beside else 4)


def test_a_prompt_renders_to_the_same_ids_without_this_package(tmp_path, originals):
    source = Path(shutil.copytree(originals["qwen3"], tmp_path / "source"))
    put_in_file(source)
    convert(source, tmp_path / "out", verify=False)
    (tmp_path / "asked.json").write_text(json.dumps([MESSAGES, ASKED]))
    code = """
import json
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
messages, asked = json.load(open(sys.argv[2]))
print(json.dumps([tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **a) for a in asked]))
"""
    done = run_alone(code, str(tmp_path / "out"), str(tmp_path / "asked.json"), cache=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == rendered(source)


def test_added_tokens_are_kept_also_beyond_the_embedding(originals, tmp_path):
    source = Path(shutil.copytree(originals["qwen3"], tmp_path / "source"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["<think>", "</think>", "<tool>"], special_tokens=True)
    tokenizer.save_pretrained(source)
    assert len(tokenizer) == 98
    report = convert(source, tmp_path / "out", verify=False)
    kept = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert kept.added_tokens_decoder == tokenizer.added_tokens_decoder and kept("<tool>").input_ids == [97]
    assert report.warnings == [
        "tokenizer: kept as it is; 1 of its tokens are beyond the 97 rows of the embedding, the first '<tool>' with id 97"
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


# what transformers says of each when a model with it is saved again: nothing; refused once it was changed; always refused
GENERATION = {
    "plain": ({"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}, None),
    "its own entries": ({"eos_token_id": 1, "unknown_entry": [1], "transformers_version": "4.51.0"}, None),
    "temperature alone": ({"temperature": 0.7, "top_p": 0.8}, "temperature = 0.7, top_p = 0.8 without do_sample"),
    "impossible": ({"max_new_tokens": 0}, "`max_new_tokens` must be greater than 0"),
}


@pytest.mark.parametrize("case", GENERATION)
def test_the_generation_configuration_is_kept_byte_for_byte(case, tmp_path):
    values, warning = GENERATION[case]
    source, out = folder_with_tokenizer(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    text = json.dumps(values, indent=7) + "\n\n"
    (source / "generation_config.json").write_text(text)
    side_files = copy_side_files(source, out, ROWS)
    assert (out / "generation_config.json").read_text() == text
    assert len(side_files.warnings) == (warning is not None)
    assert all(
        line.startswith("generation_config.json: kept as it is") and warning in line for line in side_files.warnings
    )


def test_a_generation_configuration_that_is_no_json_is_kept_with_a_warning(tmp_path):
    source, out = folder_with_tokenizer(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (source / "generation_config.json").write_text("{")
    (warning,) = copy_side_files(source, out, ROWS).warnings
    assert "\n" not in warning and (out / "generation_config.json").read_text() == "{"


def test_saving_a_converted_model_again_changes_no_value_of_its_generation(originals, tmp_path):
    """transformers notes its own version and drops what is null, and nothing else; what it would refuse is warned of."""
    source = Path(shutil.copytree(originals["qwen3"], tmp_path / "source"))
    values = {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.0, "own": "entry", "top_k": None}
    (source / "generation_config.json").write_text(json.dumps(values))
    convert(source, tmp_path / "out", verify=False)
    DepthRouteForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert {**saved, "top_k": None, "transformers_version": 0} == {**values, "transformers_version": 0}


def test_a_changed_configuration_of_a_warned_kind_is_refused_by_transformers(originals, tmp_path):
    """The reason for the warning."""
    source = Path(shutil.copytree(originals["qwen3"], tmp_path / "source"))
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.7}))
    report = convert(source, tmp_path / "out", verify=False)
    assert len(report.warnings) == 1 and ("warning", report.warnings[0]) in report.rows()
    model = DepthRouteForCausalLM.from_pretrained(tmp_path / "out")
    model.generation_config.pad_token_id = 0
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path / "again")


def test_legal_files_are_known_by_their_names(tmp_path):
    legal = ["LICENSE", "LICENSE.md", "license.txt", "LICENCE-MODEL", "NOTICE", "Notice.txt", "USE_POLICY.md", "USAGE_POLICY.md",
             "Acceptable-Use-Policy.pdf", "COPYING", "Qwen LICENSE AGREEMENT", "THIRD_PARTY_NOTICES.txt"]  # fmt: skip
    other = ["README.md", "licensing.py", "notice.bin", "policy.json", "tokens.txt", "LICENSE.safetensors"]
    for name in (*legal, *other):
        (tmp_path / name).write_text(name)
    (tmp_path / "LICENSES").mkdir()
    assert legal_files(tmp_path) == sorted(legal)


def test_what_must_not_travel_stays_and_is_named(originals, tmp_path):
    source = Path(shutil.copytree(originals["sharded"], tmp_path / "source"))
    left = ["optimizer.pt", "training_args.bin", "pytorch_model.bin", "trainer_state.json", "figure.png", "README.md",
            "config.json", "onnx/model.onnx", "original/params.json", ".env"]  # fmt: skip
    for name in left:
        (source / name).parent.mkdir(exist_ok=True)
        if not (source / name).exists():
            (source / name).write_text("never to travel")
    (source / ".git").mkdir()
    (source / ".git" / "config").write_text("a version control's own")
    report = convert(source, tmp_path / "out", verify=False)
    shards = [path.name for path in source.glob("*.safetensors*")]
    folders = {"onnx/model.onnx": "onnx/", "original/params.json": "original/"}
    assert set(report.left_files) == {*(folders.get(name, name) for name in left), *shards}
    assert report.left_files[-len(shards) :] == sorted(shards)  # the many, which say least, come last
    kept = {"LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert set(report.kept_files) == kept
    written = {
        path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert not {name for name in left if name not in ("README.md", "config.json")} & written
    assert "never to travel" not in (tmp_path / "out" / "README.md").read_text()
    shown = dict(report.rows())
    assert report.left_files[0] in shown["left behind"] and shown["kept files"] == ", ".join(report.kept_files)


def test_code_does_not_travel(tmp_path):
    source, out = folder_with_tokenizer(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (source / "modeling_custom.py").write_text("raise SystemExit")
    assert copy_side_files(source, out, ROWS).left == ["modeling_custom.py"]
    assert not (out / "modeling_custom.py").exists()


def test_links_of_a_hub_cache_become_files_and_its_id_the_base_model(originals, tmp_path):
    cache = tmp_path / "models--owner--tiny-model"
    snapshot, blobs = cache / "snapshots" / "0123abcd", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(originals["qwen3"].iterdir())):
        shutil.copyfile(file, blobs / str(index))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(index))
    convert(snapshot, tmp_path / "out", verify=False)
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    for name in ("tokenizer.json", "generation_config.json", "LICENSE", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (originals["qwen3"] / name).read_bytes()
    assert "base_model: owner/tiny-model\n" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("name", ["tokenizer.json", "LICENSE", "generation_config.json"])
def test_a_link_that_leads_nowhere_is_refused(name, tmp_path, originals):
    source = Path(shutil.copytree(originals["qwen3"], tmp_path / "source"))
    (source / name).unlink()
    (source / name).symlink_to("../../blobs/absent")
    with pytest.raises(Refused, match=f"{name}: got a link to ../../blobs/absent"):
        convert(source, tmp_path / "out", verify=False)
    assert not (tmp_path / "out").exists()


def embedding_folder(folder: Path) -> Path:
    """The files beside the weights of an embedding model, as sentence-transformers writes them."""
    folder_with_tokenizer(folder)
    types = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(types.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "find: "}}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 512}')
    for name, text in {
        "1_Pooling/config.json": "{}",
        "2_Dense/config.json": "{ }",
        "2_Dense/model.safetensors": "bytes",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "2_Dense" / "README.md").write_text("not needed")
    return folder


def test_the_modules_of_an_embedding_model_travel(tmp_path):
    source, out = embedding_folder(tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    side_files = copy_side_files(source, out, ROWS)
    names = ["modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json",
             "2_Dense/config.json", "2_Dense/model.safetensors"]  # fmt: skip
    assert set(names) <= set(side_files.kept) and side_files.left == ["2_Dense/README.md"]
    assert all((out / name).read_bytes() == (source / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    "entry, value, message",
    [
        ("type", "custom_st.Transformer", "type: got 'custom_st.Transformer', which is code of its own"),
        ("path", "../elsewhere", "path: got '../elsewhere', allowed: a folder inside"),
        ("path", "/etc", "path: got '/etc', allowed: a folder inside"),
    ],
)
def test_modules_that_are_code_or_outside_are_refused(entry, value, message, tmp_path):
    source = embedding_folder(tmp_path / "source")
    modules = json.loads((source / "modules.json").read_text())
    modules[1][entry] = value
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Refused, match=message):
        copy_side_files(source, tmp_path, ROWS)


def test_modules_without_order_or_with_pickles_are_refused(tmp_path):
    source = embedding_folder(tmp_path / "source")
    (source / "2_Dense" / "model.safetensors").rename(source / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(Refused, match="2_Dense/pytorch_model.bin: got a pickle file"):
        copy_side_files(source, tmp_path, ROWS)
    (source / "modules.json").write_text('{"a": 1}')
    with pytest.raises(Refused, match="modules.json: TypeError, allowed: a list of modules"):
        copy_side_files(source, tmp_path, ROWS)


def test_a_greedy_default_stays_a_greedy_default(converted):
    """The file that a conversion keeps is the one that generation reads."""
    folder = converted("qwen3")
    settings = GenerationConfig.from_pretrained(folder)
    assert settings.do_sample and settings.temperature == 0.6 and settings.eos_token_id == [1, 2]
    model = DepthRouteForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    first = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6)
    torch.manual_seed(1)
    assert not torch.equal(first, model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6))


def test_a_tokenizer_that_would_differ_is_no_conversion(originals, tmp_path, monkeypatch):
    def load(folder: Path):
        found = load_tokenizer(folder)
        if folder != originals["qwen3"]:
            found.chat_template = "another"
        return found

    load_tokenizer = tokenizer._load
    monkeypatch.setattr(tokenizer, "_load", load)
    with pytest.raises(CheckFailed, match="tokenizer: chat template would differ once converted"):
        convert(originals["qwen3"], tmp_path / "out", verify=False)
    assert list(tmp_path.iterdir()) == []
