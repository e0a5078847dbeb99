# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A study's page: every number comes from the results, and what is uncertain is said."""

import json
import re
from pathlib import Path

import pytest
from synthetic_results import CASES

from depthroute.studies.page import page
from depthroute.studies.paired import SHARPNESS, measures_of, paired_difference
from depthroute.studies.plots import figures_of
from depthroute.studies.verdicts import verdicts
from depthroute.studies.wording import listed, number, perplexity_percent, signed, stem


MODEL_CARDS = Path(__file__).parents[2] / "model_cards"


def section(text, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_results_has_a_page(case):
    results = CASES[case]()
    before = json.dumps(results)
    text = page(results)
    assert page(json.loads(before)) == text and json.dumps(results) == before  # a function of the JSON alone
    assert re.search(r"\b(nan|inf|None)\b", text) is None
    for name in figures_of(results):
        assert f"]({name})" in text
    assert "](results/made-up-cpu.json)" in text and results["command"] in text
    widths = {len(re.split(r"(?<!\\)\|", row)) for row in rows_of(section(text, "Arms"))}
    assert len(widths) == 1  # a bar in a cell does not break a table


@pytest.mark.parametrize("case", ["one group", "groups by depth", "fewer seeds in an arm"])
def test_the_arms_table_has_the_differences_of_the_runs(case):
    results = CASES[case]()
    rows = rows_of(section(page(results), "Arms"))
    for entry in results["groups"].values():
        baseline = entry["arms"]["attnres-block"]["runs"]
        for name, arm in entry["arms"].items():
            if name != "attnres-block":
                found = paired_difference(baseline, arm["runs"])
                told = f"{signed(found.mean)} ({signed(found.low)} … {signed(found.high)})"
                (row,) = [row for row in rows if f"`{name}`" in row and told in row]
                assert f"| {perplexity_percent(found.mean)} | {found.better} of {found.count} |" in row


COMMITTED = sorted((MODEL_CARDS / "evidence" / "results").glob("*.json"))


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_a_committed_page_is_what_its_results_give(file):
    results = json.loads(file.read_text(encoding="utf-8"))
    evidence = MODEL_CARDS / "evidence"
    assert (evidence / f"{stem(results)}.md").read_text(encoding="utf-8") == page(results), "run: depthroute reproduce"
    assert all((evidence / name).is_file() for name in figures_of(results))


def test_no_committed_page_is_without_results():
    pages = {file.stem for file in (MODEL_CARDS / "evidence").glob("*.md")}
    assert pages == {stem(json.loads(file.read_text(encoding="utf-8"))) for file in COMMITTED}


def test_a_changed_loss_changes_the_page():
    results = CASES["one group"]()
    before = page(results)
    results["groups"]["all"]["arms"]["states"]["runs"][0]["loss"] += 0.01
    assert page(results) != before


def test_the_first_screen_answers():
    text = page(CASES["one group"]())
    head = text[: text.index("## Arms")]
    assert "Of 4 claims, 2 agree, 1 does not and 1 is too small to tell." in head
    assert "lower than with `attnres-block`, in nats: `rd-attnres` (−0.0311)." in head
    assert "higher than with `attnres-block`, in nats: `standard` (+0.0490)." in head
    assert "1 of 3 comparisons with `attnres-block` cannot be told from zero." in head
    lists = {block.split("**")[1]: block for block in head.split("\n\n**")[2:] for block in ["**" + block]}
    assert "Toy scale: models of 1.23 million parameters, trained on 0.819 million tokens." in head
    assert "A verdict is on the direction that a claim states" in head
    assert "Two routes lower the loss" in lists["Claims that agree with what was measured"]
    assert "The standard residual is better" in lists["Claims that do not agree"]
    assert "States are worse" in lists["Too small to tell"]
    assert len(head.splitlines()) < 30


def test_differences_that_only_correction_takes_away_are_counted():
    head = page(CASES["groups by depth"]()).split("## Arms")[0]
    assert (
        "5 of 6 comparisons with `attnres-block` cannot be told from zero (4 could, had each been the only one)."
        in head
    )
    assert "ReZero is worse (12 layers, 24 layers and 48 layers) [2]" in head


def test_a_null_result_is_a_result():
    results = CASES["one group"]()
    arms = results["groups"]["all"]["arms"]
    del arms["standard"], arms["rd-attnres"]
    head = page(results).split("## Arms")[0]
    assert "0 of 1 comparisons with `attnres-block` can be told from zero." in head and "Validation loss is" not in head


def test_claims_have_measurement_and_verdict():
    results = CASES["one group"]()
    rows = rows_of(section(page(results), "Claims"))[2:]
    for row, one in zip(rows, verdicts(results), strict=True):
        assert one.reason in row and f"**{one.verdict}**" in row and one.claim["says"].split("|")[0].strip() in row
    assert "at least 0.1" in rows[3]


def test_corrected_comparisons_are_counted_and_marked():
    text = section(page(CASES["one group"]()), "Arms")
    assert "Holm's correction for 3 comparisons on this page: 2 of 3." in text
    marked = [row.split("`")[1] for row in rows_of(text) if " * |" in row]
    assert marked == ["standard", "rd-attnres"]


def test_noise_is_told_or_said_to_be_unknown():
    assert "their losses end 0.0020 nats apart" in section(page(CASES["one group"]()), "Noise")
    by_depth = section(page(CASES["groups by depth"]()), "Noise")
    assert "**12 layers**" in by_depth and "was not run beside `attnres-block` at 24 layers and 48 layers" in by_depth
    results = CASES["one group"]()
    arms = results["groups"]["all"]["arms"]
    arms["rounding twin"]["runs"] = arms["attnres-block"]["runs"]
    assert "identical losses in 5 pairs" in section(page(results), "Noise")


def test_one_seed_is_a_warning():
    text = page(CASES["one seed"]())
    assert (
        "ran with one seed: another may give something else, and nothing is concluded from them."
        in text.split("## Arms")[0]
    )
    assert "says nothing on what another seed would give" in section(text, "Arms")
    limits = section(text, "Limits")
    assert "Planned and not run: seeds 2–5." in limits and "windows of one seed" in limits


def test_fewer_seeds_and_notes_are_limits():
    limits = section(page(CASES["fewer seeds in an arm"]()), "Limits")
    assert "Small models on little text." in limits and "`rd-attnres` (3 seeds)" in limits
    assert "Two seeds fewer." in section(page(CASES["groups by depth"]()), "Limits")


def test_routing_has_uniform_weights_beside_the_largest():
    results = CASES["two streams"]()
    text = section(page(results), "Routing")
    header, _, *rows = rows_of(text)
    assert "`standard`" not in header and "uniform weight" not in "".join(rows)
    by_name = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in rows}
    arms = re.findall("`(.*?)`", header)
    runs = results["groups"]["all"]["arms"]["states"]["runs"]
    values = [run["measures"]["max weight, deepest third"] for run in runs]
    uniform = runs[0]["measures"]["uniform weight, deepest third"]
    cell = by_name["max weight, deepest third"][arms.index("states")]
    assert cell.startswith(number(sum(values) / 5, 3)) and cell.endswith(f"({number(uniform, 3)})")
    assert by_name["CKA of streams, same depth"][arms.index("dar")] != "–"
    assert by_name["CKA of streams, same depth"][arms.index("states")] == "–"
    sharp = [measures_of(run)[SHARPNESS] for run in runs]
    assert by_name[SHARPNESS][arms.index("states")].startswith(number(sum(sharp) / 5, 3))


def test_the_run_can_be_repeated_from_the_page():
    results = CASES["groups by depth"]()
    results["groups"]["48 layers"]["arms"]["wav"]["tokens"] = 1000
    results["text"]["base"] = "SmolLM2"
    text = section(page(results), "The run")
    machine = results["machine"]
    for told in ("`abc1234`, 2026-11-30", machine["processor"], "torch 2.13.0", "forecast 25.0 min, taken 25.5 min", "30, seeds 1–3",
                 "819,200, but 1,000 (wav at 48 layers)", "0.001; 0.003", "500 documents for training", "checkpoint | SmolLM2"):  # fmt: skip
        assert told in text
    for entry in results["groups"].values():
        for arm in entry["arms"].values():
            assert arm["command"] in text
    results["commit"] = None
    assert "not known (no repository)" in page(results)


def test_a_run_that_diverged_is_told():
    results = CASES["one group"]()
    results["groups"]["all"]["arms"]["rd-attnres"]["runs"][0]["loss"] = None
    (row,) = [row for row in rows_of(section(page(results), "Arms")) if row.startswith("| `rd-attnres`")]
    assert "not finite in 1 of 5" in row


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (signed(0.01234), "+0.0123"),
        (signed(-0.01234), "−0.0123"),
        (signed(0.0), "0"),
        (signed(-0.000012), "−1.2e−05"),
        (signed(float("nan")), "not finite"),
        (number(0.5, 2), "0.50"),
        (perplexity_percent(-0.0301), "−2.97%"),
        (listed(["a"]), "a"),
        (listed(["a", "b", "c"]), "a, b and c"),
    ],
)
def test_numbers_and_lists_read_as_they_should(text, expected):
    assert text == expected
