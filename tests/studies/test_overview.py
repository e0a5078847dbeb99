# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The overview: which variant for what, from which numbers, and what it does not claim."""

from copy import deepcopy

import pytest
from synthetic_results import one_group, synthetic_arm, synthetic_results

from depthroute import PRESETS
from depthroute.studies.advice import own_advice
from depthroute.studies.costs import Bench, cheapest, main_bench, read_benches
from depthroute.studies.evidence import best_rows, directions, rows_of, scale_sentence
from depthroute.studies.overview import overview
from depthroute.studies.overview_plot import draw_overview, panels


SEEDS = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def benches():
    return read_benches()


@pytest.fixture
def scratch():
    """One clearly lower than `standard`, one that cannot be told from it, one clearly higher."""
    arms = {
        "standard": synthetic_arm("standard", 0.0, SEEDS, spread=0.001),
        "rounding twin": synthetic_arm("rounding twin", 0.0, SEEDS, spread=0.001, preset="standard"),
        "delta-block": synthetic_arm("delta-block", -0.03, SEEDS, spread=0.001),
        "attnres": synthetic_arm("attnres", 0.0, SEEDS, spread=0.03),
        "attnres-states": synthetic_arm("attnres-states", 0.05, SEEDS, spread=0.001),
        "mhc-2": synthetic_arm("mhc-2", -0.04, SEEDS, preset="mhc", fields={"hyper_num_streams": 2}),
    }
    return synthetic_results({"all": arms}, [], study="scratch", baseline="standard")


@pytest.fixture
def converted():
    """One seed alone, far apart."""
    arms = {
        name: synthetic_arm(name, effect, (1,), spread=0.001)
        for name, effect in {"standard": 0.0, "delta-block": -0.2, "rezero": 0.1}.items()
    }
    arms["rounding twin"] = deepcopy(arms["standard"])
    for arm in arms.values():
        arm["command"] = "depthroute train --model base"
    return synthetic_results({"all": arms}, [], study="converted", baseline="standard")


def row_of(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def linked(preset):
    return f"[`{preset}`]({preset}.md)"


def with_device(bench, device, file):
    result = deepcopy(bench.result)
    result["settings"]["device"] = device
    result["machine"]["gpu"] = "a GPU"
    return Bench(file, result)


def anchored(bench, file="anchored.json", more=1.0):
    result = deepcopy(bench.result)
    result["settings"]["anchored"] = True
    for system in result["systems"].values():
        system["train_step"]["ratio"]["median"] += more
    return Bench(file, result)


def test_every_preset_and_need_has_its_row(scratch, benches):
    text = overview([scratch], benches)
    by_need, all_presets = text.split("## All presets")
    for preset in PRESETS:
        assert f"| {linked(preset)} |" in all_presets
    for need in own_advice()[1]:
        cells = row_of(by_need, need.need)
        wanted = need.presets[0] if need.presets else cheapest(main_bench(benches))
        bench = main_bench(benches, anchored=need.at == "conversion") or main_bench(benches)
        ratio = bench.ratio(wanted, "train_step")
        assert cells[1] == linked(wanted) and cells[-1] == need.because
        assert cells[2] == ("–" if ratio is None else f"{ratio.median:.2f}")


def test_findings_say_what_is_lower_what_is_higher_and_what_cannot_be_told(scratch, benches):
    findings = overview([scratch], benches).split("|")[0]
    assert "of 3 presets compared with `standard`" in findings
    assert "lower with `delta-block`" in findings
    assert "higher with `attnres-states`" in findings
    assert "too little apart to tell with `attnres`." in findings
    assert "Toy scale" in findings and "1.23 million parameters" in findings


def test_bold_is_what_is_clear_of_zero(scratch, benches):
    table = overview([scratch], benches).split("## All presets")[1]
    cells = {preset: row_of(table, linked(preset))[-3] for preset in ("delta-block", "attnres", "mhc", "wav")}
    assert cells["delta-block"].startswith("**−0.0") and cells["delta-block"].endswith(
        "([scratch](evidence/scratch.md))"
    )
    assert not cells["attnres"].startswith("**")
    assert " as `mhc-2` " in cells["mhc"]
    assert cells["wav"] == "–"


def test_many_comparisons_are_corrected_for(scratch):
    arms = scratch["groups"]["all"]["arms"]
    arms["delta"] = synthetic_arm("delta", -0.01, SEEDS, spread=0.005)
    rows = best_rows(rows_of(scratch), converts=False)
    p = rows["delta"].difference.p_value
    assert 0.002 < p < 0.05
    alone = {"delta": rows["delta"]}
    # the same difference among others that are nothing
    crowd = alone | {f"nothing {index}": rows["attnres"] for index in range(int(0.06 / p) + 1)}
    assert directions(alone)["delta"] == -1
    assert directions(crowd)["delta"] == 0


def test_one_seed_is_never_told_apart(converted, benches):
    assert directions(best_rows(rows_of(converted), converts=True)) == {"delta-block": 0, "rezero": 0}
    assert " of one seed ([converted](evidence/converted.md))" in overview([converted], benches)


def test_a_baseline_other_than_standard_is_named(benches):
    arms = one_group()
    del arms["standard"]
    text = overview([synthetic_results({"all": arms}, [], study="controls")], benches)
    assert "against `attnres-block` ([controls]" in row_of(text, linked("rd-attnres"))[-3]
    assert "compared with `standard`" not in text
    assert "overview.png" not in text  # nothing against standard: nothing to draw


def test_without_evidence_nothing_is_claimed(benches):
    text = overview([], benches)
    assert "**No evidence yet**" in text and "overview.png" not in text and "Toy scale" not in text
    assert all(row_of(text.split("## All presets")[1], linked(preset))[-3:-1] == ["–", "–"] for preset in PRESETS)


def test_without_costs_nothing_is_cheapest(scratch):
    text = overview([scratch], [])
    assert row_of(text, "Lowest cost of those that route")[1] == "not measured"
    assert "no result of `depthroute bench` is committed" in text
    assert not panels([scratch], [])


def test_the_cheapest_is_the_one_with_the_shortest_train_step(benches):
    changed = Bench("cpu-12-layers.json", deepcopy(main_bench(benches).result))
    systems = changed.result["systems"]
    systems["wav"]["train_step"]["ratio"] = dict.fromkeys(("median", "q1", "q3"), 0.01)
    systems["standard"]["train_step"]["ratio"] = dict.fromkeys(("median", "q1", "q3"), 0.001)  # routes nothing
    assert cheapest(changed) == "wav"
    assert row_of(overview([], [changed]), "Lowest cost of those that route")[1] == linked("wav")


def test_of_train_steps_that_are_alike_the_fewest_bytes_are_cheapest(benches):
    changed = Bench("cpu-12-layers.json", deepcopy(main_bench(benches).result))
    for number, (name, system) in enumerate(changed.result["systems"].items()):
        system["train_step"]["ratio"] = {"median": 2 + number / 100, "q1": 2.0, "q3": 3.0}
        system["saved_bytes"]["ratio"] = 1.5 if name != "dar" else 1.4
    assert cheapest(changed) == "dar"
    changed.result["systems"]["dar"]["train_step"]["ratio"] = {"median": 4.0, "q1": 3.1, "q3": 5.0}
    assert cheapest(changed) != "dar"


def test_gpu_costs_are_missing_once_until_there_are_some(benches):
    main = main_bench(benches)
    assert overview([], [main]).count("GPU") == 1
    on_gpu = with_device(main, "cuda", "gpu.json")
    text = overview([], [main, on_gpu])
    assert "No cost was measured on a GPU" not in text
    assert f"train step, {main.settings['layers']} layers, GPU" in text
    assert main_bench([on_gpu, main]) is main


def test_conversions_cost_what_anchored_reads_cost(scratch, converted, benches):
    main = main_bench(benches)
    slower = anchored(main)
    text = overview([scratch, converted], [main, slower])
    assert row_of(text, "Retrofit a pretrained checkpoint")[2] == (
        f"{main.ratio('delta-block', 'train_step').median + 1:.2f}"
    )
    drawn = {panel.converts: panel for panel in panels([scratch, converted], [main, slower])}
    assert drawn[False].bench is main and drawn[True].bench is slower


def test_the_plot_has_a_point_for_each_preset_with_cost_and_difference(scratch, converted, benches, tmp_path):
    main = main_bench(benches)
    first, second = panels([scratch, converted], [main])
    assert {point.preset for point in first.points} == {"delta-block", "attnres", "attnres-states"}  # not mhc-2
    assert [point.preset for point in second.points] == [
        name for name in ("delta-block", "rezero") if main.ratio(name, "train_step")
    ]
    for point in first.points:
        assert point.cost == main.result["systems"][point.preset]["train_step"]["ratio"]["median"]
        assert point.row.study == "scratch"
    file = tmp_path / "plot.png"
    draw_overview([scratch, converted], [main], file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "![train step against difference of loss, by preset](overview.png)" in overview([scratch], [main])


@pytest.mark.parametrize("size, said", [("cpu", "Toy scale"), ("gpu", "Small scale"), ("paper", "The papers' sizes")])
def test_the_scale_is_said_as_it_is(scratch, size, said):
    assert scale_sentence(rows_of(scratch | {"size": size})).startswith(said)
