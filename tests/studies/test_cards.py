# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The presets' cards: what is committed is what the result files give, a number that changes there changes here, and files that no
command wrote are refused."""

import json
import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
from synthetic_results import CLAIMS, one_group, synthetic_arm, synthetic_results

from depthroute import PRESETS, DepthRouteConfig, DepthRouteForCausalLM
from depthroute.errors import Refused
from depthroute.studies.advice import own_advice, read_advice
from depthroute.studies.cards import RESULTS_FOLDER, card, write_cards
from depthroute.studies.costs import RESULTS, Bench, cost_chapter, read_benches
from depthroute.studies.evidence import best_row, read_results, rows_of, variation_of
from depthroute.studies.overview import OVERVIEW, PLOT, overview
from depthroute.studies.preset_facts import EXAMPLE_SIZES, field_rows, parameters_of, starting_rules
from depthroute.training.optimizer import routing_group


MODEL_CARDS = Path(__file__).parents[2] / "model_cards"
SEEDS = (1, 2, 3)


def controls(**values):
    """A study with `standard`, a baseline of its own, its twin, and two routed arms."""
    return synthetic_results({"all": one_group(**values)}, CLAIMS, study="controls")


def retrofit(seeds=SEEDS):
    """A study in which a checkpoint is converted; one arm in the plain form."""
    arms = {
        "standard": synthetic_arm("standard", 0.0, seeds),
        "delta-block": synthetic_arm("delta-block", -0.02, seeds),
        "delta-block, plain": synthetic_arm(
            "delta-block, plain", 0.1, seeds, preset="delta-block", fields={"depth_anchored": False}
        ),
    }
    for arm in arms.values():
        arm["command"] = "depthroute train --model=base --seed=1"
    return synthetic_results({"all": arms}, [], study="retrofit", baseline="standard")


@pytest.fixture(scope="module")
def benches():
    return read_benches()


@pytest.fixture
def folder(tmp_path):
    """Two studies' results with their pages, and a template as beside the committed cards."""
    (tmp_path / RESULTS_FOLDER).mkdir(parents=True)
    for results in (controls(), retrofit()):
        write_results(tmp_path, results)
    (tmp_path / "template.md").write_text("a template")
    return tmp_path


def write_results(folder, results):
    text = json.dumps(results)
    (folder / RESULTS_FOLDER / f"{results['study']}-{results['size']}.json").write_text(text)
    (folder / "evidence" / f"{results['study']}.md").write_text("a page")


def written(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_committed_card_is_what_the_result_files_give(preset, benches):
    committed = (MODEL_CARDS / f"{preset}.md").read_text(encoding="utf-8")
    assert committed == card(preset, read_results(MODEL_CARDS / RESULTS_FOLDER), benches), "run: depthroute cards"


def test_the_committed_overview_is_what_the_result_files_give(benches):
    studies = read_results(MODEL_CARDS / RESULTS_FOLDER)
    committed = (MODEL_CARDS / OVERVIEW).read_text(encoding="utf-8")
    assert committed == overview(studies, benches), "run: depthroute cards"
    assert (MODEL_CARDS / PLOT).is_file() == (PLOT in committed)


def test_links_of_the_committed_cards_lead_somewhere():
    for file in (*(MODEL_CARDS / f"{preset}.md" for preset in PRESETS), MODEL_CARDS / OVERVIEW):
        targets = re.findall(r"\]\((?!https:)([^)]+)\)", file.read_text(encoding="utf-8"))
        assert targets and all((MODEL_CARDS / target).is_file() for target in targets)


def test_the_card_s_difference_is_that_of_the_losses(benches):
    results = controls()
    arms = results["groups"]["all"]["arms"]
    pairs = zip(arms["rd-attnres"]["runs"], arms["standard"]["runs"])
    differences = [first["loss"] - second["loss"] for first, second in pairs]
    shown = f"−{-sum(differences) / len(differences):.4f} nats"
    text = card("rd-attnres", [results], benches)
    assert shown in text
    assert "| `standard` |" in text and "lower in 5 of 5 pairs" in text
    assert "“The divergence of the routes is 0.218” (paper: A made-up paper). Here (controls): **agrees**" in text


@pytest.mark.parametrize("preset", ["rd-attnres", "delta-block"])
def test_a_changed_loss_changes_the_card_and_the_overview(preset, benches):
    before = [controls(), retrofit()]
    after = deepcopy(before)
    for results in after:
        for arm in results["groups"]["all"]["arms"].values():
            if arm["preset"] == preset:
                arm["runs"][0]["loss"] += 0.01
    assert card(preset, before, benches) != card(preset, after, benches)
    assert overview(before, benches) != overview(after, benches)
    assert card("wav", before, benches) == card("wav", after, benches)


def test_a_changed_cost_changes_the_card_and_the_overview(benches):
    changed = [Bench(bench.file, deepcopy(bench.result)) for bench in benches]
    for bench in changed:
        bench.result["systems"]["delta-block"]["train_step"]["ratio"]["median"] += 7
    assert card("delta-block", [], benches) != card("delta-block", [], changed)
    assert overview([], benches) != overview([], changed)
    assert card("wav", [], benches) == card("wav", [], changed)


def test_a_card_without_evidence_or_cost_says_so():
    text = card("wav", [], [])
    assert "None yet: no committed study" in text
    assert "Not measured: no committed result" in text
    assert "nats" not in text


def test_rows_name_what_they_are_against():
    rows = {row.arm: row for row in rows_of(controls())}
    assert "rounding twin" not in rows
    assert rows["rd-attnres"].against == "standard" and rows["standard"].against is None
    assert rows["rd-attnres"].noise.level == pytest.approx(0.002)

    results = controls()
    del results["groups"]["all"]["arms"]["standard"]
    rows = {row.arm: row for row in rows_of(results)}
    assert rows["rd-attnres"].against == "attnres-block" and rows["attnres-block"].against is None


def test_an_arm_without_a_finite_loss_says_so(benches):
    results = controls(seeds=(1,))
    results["groups"]["all"]["arms"]["rd-attnres"]["runs"][0]["loss"] = None
    assert "| not finite |" in card("rd-attnres", [results], benches)


def test_a_conversion_is_anchored_unless_an_arm_says_otherwise():
    rows = {row.arm: row for row in rows_of(retrofit())}
    assert all(row.converts for row in rows.values())
    assert rows["delta-block"].variation == {}
    assert rows["delta-block, plain"].variation == {"depth_anchored": False}
    assert not any(row.converts for row in rows_of(controls()))


@pytest.mark.parametrize(
    "preset, fields, variation",
    [
        ("delta-block", {"depth_block_size": 2}, {}),
        ("rd-attnres", {"depth_value_route": "decoupled"}, {}),
        ("rd-attnres", {"depth_value_route": "uniform"}, {"depth_value_route": "uniform"}),
        ("wav", {"depth_block_size": 3, "depth_detail_bases": ["split"]}, {"depth_detail_bases": ["split"]}),
        ("mhc", {"hyper_num_streams": 2}, {"hyper_num_streams": 2}),
    ],
)
def test_what_makes_an_arm_another_thing_than_its_preset(preset, fields, variation):
    assert variation_of(preset, fields, converts=False) == variation


def test_the_row_that_stands_for_a_preset():
    near = synthetic_results({"all": one_group()}, [], study="near")
    wide = deepcopy(near) | {"study": "wide"}
    wide["groups"]["all"]["arms"]["delta"] = synthetic_arm("delta", -0.01, SEEDS)
    large = deepcopy(near) | {"size": "gpu"}
    single = synthetic_results({"all": one_group(seeds=(1,))}, [], study="single")

    def chosen(*studies):
        row = best_row([row for results in studies for row in rows_of(results)], "rd-attnres", converts=False)
        return None if row is None else (row.study, row.size)

    assert chosen(near, single) == ("near", "cpu")  # over seeds, not over windows
    assert chosen(near, wide) == ("wide", "cpu")  # more presets beside it
    assert chosen(near, wide, large) == ("near", "gpu")  # the larger size
    assert chosen(retrofit()) is None
    varied = deepcopy(wide)
    varied["groups"]["all"]["arms"]["rd-attnres"]["fields"] = {"depth_value_route": "average"}
    assert chosen(varied, single) == ("single", "cpu")  # the preset itself
    assert chosen(varied) == ("wide", "cpu")


def test_costs_on_a_card_are_those_of_every_file(benches):
    assert len(benches) >= 2
    text = cost_chapter("delta-block", benches)
    for bench in benches:
        assert bench.link in text and bench.configuration in text and bench.machine in text
        ratio = bench.result["systems"]["delta-block"][next(iter(bench.measures))]["ratio"]
        assert f"| `delta-block` | {ratio['median']:.2f} ({ratio['q1']:.2f}–{ratio['q3']:.2f})" in text


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_fields_and_rates_are_those_of_the_code(preset):
    small = EXAMPLE_SIZES | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = DepthRouteForCausalLM(DepthRouteConfig.from_preset(preset, **small))
    own = parameters_of(preset)
    assert own.total - own.routing == parameters_of("standard").total
    assert bool(own.routing) == bool(model.routing_parameters())
    if own.reads and not model.config.depth_detail_bases and preset != "dar" and preset != "dar-full":
        # vectors of the width alone
        assert own.routing == 32 * sum(p.numel() for p in model.routing_parameters().values())
    config = DepthRouteConfig.from_preset(preset, **EXAMPLE_SIZES)
    assert all(value == str(getattr(config, name)) for name, value, _ in field_rows(preset))
    group = routing_group(model, learning_rate=0.001)
    if group is not None:
        assert f"{group['lr'] / 0.001:g} times the base rate" in starting_rules(preset)[-1]


def test_writing_twice_gives_the_same_files_and_leaves_the_template(folder):
    names = write_cards(folder)
    first = written(folder)
    assert set(names) == {*(f"{preset}.md" for preset in PRESETS), OVERVIEW, PLOT}
    assert set(first) == {*names, "template.md"}
    assert first["template.md"] == b"a template"
    assert first[PLOT].startswith(b"\x89PNG")
    assert write_cards(folder) == names
    assert written(folder) == first
    assert (folder / "evidence" / "controls.md").read_text() == "a page"


def test_a_plot_of_results_that_are_gone_goes_too(folder):
    write_cards(folder)
    shutil.rmtree(folder / "evidence")
    assert PLOT not in write_cards(folder)
    assert not (folder / PLOT).exists()
    assert "No evidence yet" in (folder / OVERVIEW).read_text(encoding="utf-8")


def without(*path):
    def change(results):
        for key in path[:-1]:
            results = results[key]
        del results[path[-1]]

    return change


@pytest.mark.parametrize(
    "change",
    [
        without("study"),
        without("noise_arm"),
        without("definition"),
        without("groups", "all", "arms"),
        without("groups", "all", "arms", "rd-attnres", "preset"),
        without("groups", "all", "arms", "rd-attnres", "runs", 0, "seed"),
        lambda results: results["groups"]["all"]["arms"]["rd-attnres"].update(preset="rd"),
        lambda results: results["groups"]["all"]["arms"]["rd-attnres"].update(runs=[]),
        lambda results: results.update(size="huge"),
        lambda results: results.update(study="another"),
    ],
    ids=[
        "no study", "no noise arm", "no definition", "no arms", "no preset", "no seed", "unknown preset", "no runs",
        "unknown size", "another name",
    ],
)  # fmt: skip
def test_results_that_no_command_wrote_are_refused_and_nothing_is_written(folder, change):
    results = controls()
    change(results)
    (folder / RESULTS_FOLDER / "controls-cpu.json").write_text(json.dumps(results))
    before = written(folder)
    with pytest.raises(Refused, match=r"^controls-cpu\.json: .*allowed: ") as refusal:
        write_cards(folder)
    assert "\n" not in str(refusal.value)
    assert written(folder) == before


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '"text"', "\x00"])
def test_files_that_are_no_results_are_refused(folder, text):
    (folder / RESULTS_FOLDER / "broken.json").write_text(text)
    with pytest.raises(Refused, match=r"^broken\.json: .*depthroute reproduce"):
        write_cards(folder)


def test_a_missing_page_or_folder_is_refused(folder):
    (folder / "evidence" / "retrofit.md").unlink()
    with pytest.raises(Refused, match=r"retrofit\.md: missing beside its results"):
        write_cards(folder)
    with pytest.raises(Refused, match="no such folder"):
        write_cards(folder / "nowhere")
    assert not (folder / "nowhere").exists()


@pytest.mark.parametrize(
    "change",
    [
        without("settings"),
        without("machine", "torch"),
        without("systems", "delta", "forward"),
        without("systems", "delta", "train_step", "ratio", "q1"),
        lambda result: result["systems"]["delta"].update(preset="dleta"),
    ],
    ids=["no settings", "no torch", "no forward", "no quartile", "unknown preset"],
)
def test_benchmarks_that_no_command_wrote_are_refused(tmp_path, change):
    result = json.loads((RESULTS / "cpu-12-layers.json").read_text(encoding="utf-8"))
    (tmp_path / "operator.json").write_text(json.dumps({"cases": []}))  # of single reads: no business of the cards
    (tmp_path / "models.json").write_text(json.dumps(result))
    assert [bench.file for bench in read_benches(tmp_path)] == ["models.json"]
    change(result)
    (tmp_path / "models.json").write_text(json.dumps(result))
    with pytest.raises(Refused, match=r"^models\.json: .*depthroute bench"):
        read_benches(tmp_path)


def test_advice_is_words_on_every_preset():
    advice, needs = own_advice()
    assert set(advice) == set(PRESETS)
    texts = [text for one in advice.values() for text in (one.take, one.leave, one.watch)]
    assert all(text.endswith(".") for text in texts)
    # numbers stand beside it, and are generated
    reasons = [need.because for need in needs]
    assert not any(re.search(r"\d", text.replace("Qwen3", "")) for text in (*texts, *reasons))


@pytest.mark.parametrize(
    "text, refusal",
    [
        ("presets: {}\nneeds: []", "got nothing on 'standard'"),
        ("presets: {delta: {take: a.}}\nneeds: []", "allowed: `presets` and `needs`"),
        ("presets: {dleta: {take: a., leave: b., watch: c.}}\nneeds: []", "got 'dleta', nearest: delta"),
        ("needs: []", "allowed: `presets` and `needs`"),
        ("[", "allowed: `presets` and `needs`"),
    ],
    ids=["a preset too few", "an entry too few", "unknown preset", "no presets", "no YAML"],
)
def test_advice_that_is_not_whole_is_refused(tmp_path, text, refusal):
    file = tmp_path / "advice.yaml"
    file.write_text(text)
    with pytest.raises(Refused, match=re.escape(refusal)):
        read_advice(file)
