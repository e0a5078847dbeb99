# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute card`: what trained, evaluated and edited folders say, all of it out of files that commands wrote."""

import json
import re
import shutil
from pathlib import Path

import pytest
from conftest import tiny_config, tiny_qwen3_config
from conversion_helpers import edit_json, save_checkpoint
from huggingface_hub import ModelCard
from text_model_helpers import character_tokenizer
from transformers import Qwen3ForCausalLM

from depthroute import DepthRouteForCausalLM, convert, push, refresh_card
from depthroute.errors import Refused
from depthroute.files import write_json
from depthroute_conversion import PushOptions
from depthroute_conversion.card import card_text, renewed
from depthroute_conversion.card_metadata import card_metadata, problems
from depthroute_conversion.record import EVALUATIONS, RECORD, RUN, Facts


def chapter(folder: Path, title: str) -> str:
    text = (folder / "README.md").read_text()
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0] if f"\n## {title}\n" in text else ""


@pytest.fixture
def folder(converted, tmp_path) -> Path:
    return Path(shutil.copytree(converted("qwen3"), tmp_path / "my-delta"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    (root / "train.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    (root / "held out.txt").write_text("the lazy dog sleeps\n" * 8)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory, texts) -> Path:
    """Converted from a source whose generation configuration transformers refuses to save, then trained twice."""
    from depthroute.training.run import train

    root = tmp_path_factory.mktemp("trained")
    source = save_checkpoint(Qwen3ForCausalLM(tiny_qwen3_config(num_hidden_layers=2)), root / "source")
    character_tokenizer().save_pretrained(source)
    (source / "generation_config.json").write_text('{ "temperature": 0.7 }')
    convert(source, root / "converted", block_size=1)
    refresh_card(root / "converted", base_model="owner/tiny")
    options = ["--train_files", texts / "train.txt", "--validation_files", texts / "held out.txt", "--block_size", 16,
               "--max_steps", 2, "--report_to", "none", "--use_cpu", "--save_strategy", "no"]  # fmt: skip
    for start, out in (("converted", "first"), ("first", "second")):
        train(list(map(str, ["--model", root / start, "--output_dir", root / out, *options])))
    return root


def test_training_hands_on_where_the_model_comes_from_and_its_licence(trained):
    for name in ("depthroute_conversion.json", "LICENSE", "generation_config.json"):
        assert (trained / "second" / name).read_bytes() == (trained / "converted" / name).read_bytes()
    assert (trained / "second" / "generation_config.json").read_text() == '{ "temperature": 0.7 }'


def test_the_card_of_a_trained_folder_says_what_it_was_trained_on(trained, tmp_path):
    folder = Path(shutil.copytree(trained / "second", tmp_path / "second"))
    assert refresh_card(folder) == []
    card = ModelCard.load(folder / "README.md")
    assert (
        card.data.base_model == "owner/tiny"
        and card.data.license == "mit"
        and card.data["base_model_relation"] == "finetune"
    )
    text = chapter(folder, "Training")
    first, second = (json.loads((trained / name / "depthroute_run.json").read_text()) for name in ("first", "second"))
    assert "| started from | converted |" in text and "| started from | first |" in text
    for run in (first, second):
        assert f"| training loss | {run['train']['train_loss']:.4f} |" in text
        assert f"| validation perplexity | {run['validation']['eval_perplexity']:.4f} |" in text
    assert text.count("| training data | train.txt |") == 2 and text.count("| validation data | held out.txt |") == 2
    assert "bitwise equal to the source" in chapter(folder, "Verification")
    assert str(trained) not in card.content and "held out.txt' --block_size 16" in text  # names in place of paths
    # the numbers are the file's: another file, another card
    second["train"]["train_loss"] = 7.7771
    write_json(folder / "depthroute_run.json", second)
    refresh_card(folder)
    assert "| training loss | 7.7771 |" in chapter(folder, "Training")


def test_a_trained_folder_can_be_published(trained, tmp_path):
    folder = Path(shutil.copytree(trained / "second", tmp_path / "second"))
    refresh_card(folder)
    with pytest.raises(Refused) as refusal:
        push(folder, "me/second", dry_run=True)
    # the run was told absolute paths
    assert "training_args.bin (state of a training run)" in str(refusal.value)
    assert "depthroute_run.json (names " in str(refusal.value)
    report = push(folder, "me/second", PushOptions(exclude=["training_args.bin", "depthroute_run.json"]), dry_run=True)
    assert {"LICENSE", "README.md", "model.safetensors", "depthroute_conversion.json"} <= set(report.files)
    assert report.excluded == ["depthroute_run.json", "training_args.bin"]


def test_data_sets_of_the_hub_are_named_in_the_head(folder):
    data = {"dataset": "owner/texts", "dataset_config": "small", "train_split": "train", "validation_fraction": 0.1}
    write_json(folder / "depthroute_run.json", {"model": "me/base", "data": data, "train": {"train_loss": 2.5}})
    refresh_card(folder)
    assert ModelCard.load(folder / "README.md").data.datasets == ["owner/texts"]
    text = chapter(folder, "Training")
    assert "| training data | owner/texts / small, split train |" in text and "| started from | me/base |" in text
    assert "| validation data | 0.1 of the training documents, set aside |" in text
    (folder / "depthroute_run.json").unlink()
    refresh_card(folder)
    assert ModelCard.load(folder / "README.md").data.datasets is None and not chapter(folder, "Training")


def results_file(path: Path, model: str, limit: float | None = None, **values: float) -> Path:
    """As lm-eval writes it, of one task of the hub's and one of files."""
    tasks = {"arc_easy": {"acc,none": 0.5125, "acc_stderr,none": 0.01, "alias": "arc_easy", **values}, "own": {"bits_per_byte,none": 1.75, "bits_per_byte_stderr,none": "N/A"}}  # fmt: skip
    write_json(
        path,
        {
            "results": tasks,
            "configs": {
                "arc_easy": {"dataset_path": "allenai/ai2_arc", "dataset_name": "ARC-Easy", "test_split": "test"},
                "own": {"dataset_path": "json", "test_split": "test"},
            },
            "n-shot": {"arc_easy": 5, "own": 0},
            "higher_is_better": {"arc_easy": {"acc": True}, "own": {"bits_per_byte": False}},
            "n-samples": {task: {"original": 100, "effective": 100 if limit is None else int(limit)} for task in tasks},
            "config": {"model": model, "model_dtype": "torch.bfloat16", "limit": limit},
            "date": 1700000000.0,
            "lm_eval_version": "0.4.9",
        },
    )
    return path


def test_evaluations_become_a_table_and_the_hubs_model_index(folder, tmp_path):
    refresh_card(folder, results=[results_file(tmp_path / "a.json", str(folder))])
    text = chapter(folder, "Evaluation")
    assert "| my-delta | arc_easy | acc ↑ | 0.5125 | 0.0100 | 100 | 5 |" in text
    assert "| my-delta | own | bits_per_byte ↓ | 1.7500 | – | 100 | 0 |" in text
    card = ModelCard.load(folder / "README.md")
    arc, own = card.data.eval_results
    assert (arc.task_type, arc.dataset_type, arc.dataset_config, arc.dataset_split) == (
        "text-generation", "allenai/ai2_arc", "ARC-Easy", "test"
    )  # fmt: skip
    assert (arc.metric_type, arc.metric_value, arc.metric_args) == ("acc", 0.5125, {"num_few_shot": 5})
    assert (own.dataset_type, own.metric_type, own.metric_value) == ("own", "bits_per_byte", 1.75)
    assert card.data.model_name == "my-delta"
    assert str(tmp_path) not in (folder / "depthroute_evaluations.json").read_text()


def test_only_whole_evaluations_of_this_model_are_in_the_model_index(folder, tmp_path):
    other = tmp_path / "elsewhere" / "my-delta"  # another model of the same name
    shutil.copytree(folder, other)
    files = [
        results_file(tmp_path / "limited.json", str(folder), limit=8),
        results_file(tmp_path / "other.json", "owner/control"),
        results_file(tmp_path / "same name.json", str(other)),
    ]
    refresh_card(folder, results=files[:2])
    assert ModelCard.load(folder / "README.md").data.eval_results is None
    text = chapter(folder, "Evaluation")
    assert "| first 8 |" in text and "| owner/control | arc_easy |" in text
    refresh_card(folder, results=files[2:])
    assert ModelCard.load(folder / "README.md").data.eval_results is None
    # the base model of the same name is not this one either
    refresh_card(folder, base_model="owner/my-delta", results=[results_file(tmp_path / "base.json", "owner/my-delta")])
    assert ModelCard.load(folder / "README.md").data.eval_results is None


def test_later_results_replace_earlier_ones_of_the_same_kind_and_stay(folder, tmp_path):
    refresh_card(folder, results=[results_file(tmp_path / "a.json", str(folder))])
    later = {"acc,none": 0.75, "acc_norm,none": 0.8}
    refresh_card(folder, results=[results_file(tmp_path / "b.json", str(folder), **later)])
    refresh_card(folder)
    text = chapter(folder, "Evaluation")
    assert "| acc ↑ | 0.7500 |" in text and "0.5125" not in text and "| acc_norm | 0.8000 |" in text


def test_the_results_of_depthroute_eval_are_read(folder, tmp_path, run_cli):
    character_tokenizer().save_pretrained(folder)
    code, _, err = run_cli(
        "eval", folder, "--tasks", "depthroute_choice", "--limit", 2, "--json", tmp_path / "eval.json"
    )
    assert code == 0, err
    code, out, _ = run_cli("card", folder, "--results", tmp_path / "eval.json", "--base-model", "owner/tiny")
    assert code == 0 and "README.md" in out
    value = json.loads((tmp_path / "eval.json").read_text())["results"]["depthroute_choice"]["acc,none"]
    assert re.search(
        rf"\| my-delta \| depthroute_choice \| acc ↑ \| {value:.4f} \| [\d.]+ \| first 2 \| 0 \|",
        chapter(folder, "Evaluation"),
    )


@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"results": {}, "config": {}, "configs": {}}', None])
def test_files_that_are_no_results_are_refused(text, folder, tmp_path):
    file = tmp_path / "results.json"
    if text is not None:
        file.write_text(text)
    before = (folder / "README.md").read_text()
    with pytest.raises(Refused, match="results.json: got|results.json: JSONDecodeError"):
        refresh_card(folder, results=[file])
    assert (folder / "README.md").read_text() == before and not (folder / "depthroute_evaluations.json").exists()


def test_verifications_of_other_folders_and_other_files_are_refused(folder, tmp_path):
    record = json.loads((folder / "depthroute_conversion.json").read_text())["verification"]
    write_json(tmp_path / "other.json", record)
    with pytest.raises(Refused, match="got the verification of 'number-.*', allowed: of 'my-delta'"):
        refresh_card(folder, verification=tmp_path / "other.json")
    with pytest.raises(Refused, match="got no verification"):
        refresh_card(folder, verification=results_file(tmp_path / "results.json", str(folder)))


def evaluation(folder: Path, **changed) -> dict:
    return {
        "results": {"task": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "task"}},
        "config": {"model": "hf", "model_args": {"pretrained": str(folder)}},
        "configs": {"task": {"dataset_path": "owner/data"}},
        "n-samples": {"task": {"effective": 3}},
        "n-shot": {"task": 0},
        "higher_is_better": {"task": {"acc": True}},
        **changed,
    }


@pytest.mark.parametrize("changed", [
    {"configs": {"task": "x"}}, {"results": {"task": [1]}}, {"n-samples": None}, {"n-samples": {"task": 3}}, {"n-shot": None},
    {"higher_is_better": {"task": None}}, {"higher_is_better": {"task": {"acc": [1]}}}, {"date": "2024-01-01"},
    {"date": 1e30}, {"configs": {"task": {"dataset_path": 3}}},
])  # fmt: skip
def test_results_of_another_form_are_refused_in_one_line(changed, folder, tmp_path):
    (tmp_path / "file.json").write_text(json.dumps(evaluation(folder, **changed)))
    with pytest.raises(Refused, match="file.json: .*; allowed: a file that `depthroute eval --json` wrote"):
        refresh_card(folder, [tmp_path / "file.json"])
    assert not (folder / EVALUATIONS).exists()


def test_a_figure_that_is_no_number_is_said_to_be_none(folder, tmp_path):
    results = {"task": {"acc,none": float("nan"), "acc_stderr,none": float("nan"), "f1,none": 0.25}}
    (tmp_path / "file.json").write_text(json.dumps(evaluation(folder, results=results)))
    refresh_card(folder, [tmp_path / "file.json"])
    assert "acc ↑ | not finite | – |" in chapter(folder, "Evaluation")
    index = ModelCard((folder / "README.md").read_text()).data.eval_results
    assert [row.metric_type for row in index] == ["f1"]


@pytest.mark.parametrize("rows", [5, [5], ["ab"], [["only one"]]])
def test_a_verification_of_another_form_leaves_the_folder_as_it_is(rows, folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    values = {"rows": rows, "converted": folder.name, "failure": None, "trained_routing": []}
    (tmp_path / "file.json").write_text(json.dumps(values))
    with pytest.raises(Refused, match="file.json: rows: got .*, allowed: a list of labels and values"):
        refresh_card(folder, verification=tmp_path / "file.json")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name, values", [
    (RECORD, {"hub": []}), (RECORD, {"conversion": {"rows": 3}}), (RECORD, {"verification": [1]}),
    (RUN, {"data": []}), (RUN, {"log": [3]}), (RUN, {"parameters": {"total": 1}}), (RUN, {"command": "a 'b"}),
    (RUN, {"earlier_runs": 3}), (EVALUATIONS, {"rows": [{}]}), (EVALUATIONS, {"rows": [3]}),
])  # fmt: skip
def test_a_damaged_file_beside_the_card_is_refused_in_one_line(name, values, folder, run_cli):
    (folder / name).write_text(json.dumps(values))
    code, _, err = run_cli("card", folder)
    assert code == 2 and err.count("\n") == 1 and folder.name in err and name in err


def test_what_was_written_by_hand_stays_and_the_figures_are_renewed(folder, tmp_path):
    refresh_card(folder, base_model="owner/tiny")
    card = folder / "README.md"
    text = (
        card.read_text()
        .replace("# my-delta", "# My own title")
        .replace("- Train the weights in float32", "- By hand: train")
    )
    text = text.replace("license: mit", "license: apache-2.0\ninference: false").replace(
        "- custom_code", "- custom_code\n- mine"
    )
    text = text.replace("## Conversion\n", "## My thanks\n\nTo all.\n\n## Conversion\n").replace(
        "| bitwise equal | yes |", "| bitwise equal | oh yes |"
    )
    card.write_text(text)
    refresh_card(folder, results=[results_file(tmp_path / "a.json", str(folder))])
    text, data = card.read_text(), ModelCard.load(card).data
    assert "# My own title" in text and "By hand: train" in text and "## My thanks\n\nTo all." in text
    assert (
        data.license == "apache-2.0"
        and data["inference"] is False
        and "mine" in data.tags
        and "delta-block" in data.tags
    )
    assert "oh yes" not in text and "| bitwise equal | yes |" in text  # measured
    titles = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert titles.index("My thanks") == titles.index("Conversion") - 1
    assert titles.index("Evaluation") == titles.index("Verification") + 1
    # and what is asked for by name is done
    refresh_card(folder, license_id="mit", base_model="owner/other", language=["de", "en"])
    data = ModelCard.load(card).data
    assert (data.license, data.base_model, data.language) == ("mit", "owner/other", ["de", "en"])


def test_an_untouched_card_is_renewed_throughout(folder):
    refresh_card(folder, base_model="owner/tiny")
    text = (folder / "README.md").read_text()
    assert "[owner/tiny](https://huggingface.co/owner/tiny) with another residual" in text
    refresh_card(folder)
    assert (folder / "README.md").read_text() == text  # nothing new, nothing changed


def test_a_card_without_a_head_or_chapters_is_completed(folder):
    (folder / "README.md").write_text("Only a line.\n")
    refresh_card(folder, base_model="owner/tiny")
    text = (folder / "README.md").read_text()
    assert "Only a line." in text and "## Verification" in text and ModelCard(text).data.license == "mit"
    new = card_text(Facts("m", tiny_config("delta"), "DepthRouteForCausalLM"))
    assert renewed(new, new, new) == new


def test_a_model_from_scratch_has_a_card_too(tmp_path):
    DepthRouteForCausalLM(tiny_config("delta", num_hidden_layers=2)).save_pretrained(tmp_path / "fresh")
    lacking = refresh_card(tmp_path / "fresh")
    assert lacking == [problems("---\nlibrary_name: x\npipeline_tag: x\ntags: [x]\n---\n", False)[0]]
    text = (tmp_path / "fresh" / "README.md").read_text()
    assert "A model with another residual" in text and "## Conversion" not in text and "## Verification" not in text
    assert refresh_card(tmp_path / "fresh", license_id="mit") == []
    push(tmp_path / "fresh", "me/fresh", PushOptions(allow_unverified=True), dry_run=True)


CLASSES = {
    "DepthRouteForCausalLM": ("text-generation", "AutoModelForCausalLM"),
    "DepthRouteModel": ("feature-extraction", "AutoModel.from_pretrained"),
    "DepthRouteForSequenceClassification": ("text-classification", "AutoModelForSequenceClassification"),
}


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_pipeline_and_the_example_are_those_of_the_class(architecture):
    pipeline, call = CLASSES[architecture]
    facts = Facts("model", tiny_config("delta"), architecture)
    assert card_metadata(facts)["pipeline_tag"] == pipeline
    text = card_text(facts)
    assert call in text and sum(example in text for _, example in CLASSES.values()) == 1
    assert "SentenceTransformer(" not in text and "$" not in text


def test_an_embedding_model_of_sentence_transformers_is_one_for_the_hub(folder):
    facts = Facts("model", tiny_config("delta"), "DepthRouteModel", sentence_transformers=True)
    metadata = card_metadata(facts)
    assert (metadata["library_name"], metadata["pipeline_tag"]) == ("sentence-transformers", "sentence-similarity")
    assert "sentence-transformers" in metadata["tags"] and 'SentenceTransformer("model"' in card_text(facts)


def test_the_sources_pipeline_is_carried_where_the_class_can_serve_it():
    for told, tag in (("text-ranking", "text-ranking"), ("image-to-text", "text-generation")):
        record = {"hub": {"pipeline_tag": told}}
        assert card_metadata(Facts("m", tiny_config("delta"), "DepthRouteForCausalLM", record))["pipeline_tag"] == tag


def test_norwegian_is_a_language(copy_of, tmp_path):
    source = copy_of("qwen3")
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: mine\nlanguage:\n- no\n- en\n---\n")
    convert(source, tmp_path / "out", verify=False)
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert data.language == ["no", "en"] and data.license_name == "mine"


GOOD = {"license": "mit", "base_model": "a/b", "library_name": "l", "pipeline_tag": "p", "tags": ["t"]}


@pytest.mark.parametrize(
    "entries, found",
    [
        ({}, []),
        ({"license": None}, ["license: missing"]),
        ({"license": "Apache 2.0"}, ["license: got 'Apache 2.0'"]),
        ({"license": "other"}, ["license_name: missing"]),
        ({"license": ["mit", "apache-2.0"]}, []),
        ({"base_model": None}, ["base_model: missing"]),
        ({"base_model": "models/a/b"}, ["base_model: got 'models/a/b'"]),
        ({"base_model_relation": "child"}, ["base_model_relation: got 'child'"]),
        ({"language": ["English"]}, ["language: got 'English'"]),
        ({"language": ["en", "zh-Hant", "multilingual"]}, []),
        ({"pipeline_tag": None, "tags": []}, ["pipeline_tag: missing", "tags: missing"]),
        ({"model-index": [{"name": "x"}]}, ["metadata: "]),
    ],
)
def test_what_the_hub_would_not_take_is_named(entries, found):
    values = {key: value for key, value in {**GOOD, **entries}.items() if value is not None}
    lines = problems(f"---\n{json.dumps(values)}\n---\n\n# Model\n", converted=True)
    assert len(lines) == len(found) and all(line.startswith(start) for line, start in zip(lines, found))


def test_the_command_says_what_is_lacking(folder, run_cli):
    edit_json(folder / "depthroute_conversion.json", hub={})
    (folder / "README.md").unlink()
    code, out, err = run_cli("card", folder)
    assert code == 1 and "written to" in out and "license: missing" in err and "base_model: missing" in err
    code, _, err = run_cli("card", folder, "--license", "other", "--license-name", "mine", "--base-model", "owner/tiny")
    assert code == 0, err
    code, _, err = run_cli("card", folder / "absent")
    assert code == 2 and "absent" in err
