# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Whole studies on two-step runs: every arm of every study, stopped and gone on with, and what is refused."""

import copy
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from study_helpers import small_study

from depthroute import cli_studies
from depthroute.demo.base import write_tiny_base
from depthroute.demo.corpus import library_documents
from depthroute.errors import Refused, Unfinished
from depthroute.studies import one_run, read_study, study_names
from depthroute.studies import reproduce as reproduce_module
from depthroute.studies.page import page
from depthroute.studies.plan import PlannedRun
from depthroute.studies.reproduce import reproduce


ONE = ["120 steps"]
"""Of the groups of rd-controls, where one is enough."""


def quiet(_):
    pass


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_tiny_base(library_documents()[0][:2], folder, seed=0, context=64)
    return folder


@pytest.fixture(scope="session")
def shared_out(tmp_path_factory):
    """One working folder for all studies, as users have it: equal runs are done once."""
    return tmp_path_factory.mktemp("studies")


@pytest.mark.parametrize("name", study_names())
def test_a_study_runs_all_its_arms_and_writes_its_page(name, tmp_path, shared_out, tiny_base):
    study = read_study(name)
    file = small_study(name, tmp_path, seeds=[1])
    base = str(tiny_base) if name == "retrofit" else None
    results = reproduce(file, out=shared_out, pages=tmp_path / "pages", workers=1, base=base, tell=quiet)
    assert list(results["groups"]) == list(study.sizes["cpu"].groups)
    for group in results["groups"].values():
        assert list(group["arms"]) == list(study.arms)
        for arm_name, arm in group["arms"].items():
            (run,) = arm["runs"]
            assert arm["preset"] == study.arms[arm_name].preset
            assert arm["steps"] in (2, 3) and run["curve"][0][0] == 0 and run["curve"][-1][0] == arm["steps"]
            assert run["loss"] == pytest.approx(sum(run["windows"]) / len(run["windows"]), abs=1e-5)  # float32 sums
            assert bool(run["by_depth"]) == bool(run["measures"].get("max weight, deepest third")
                                                 or run["measures"].get("max weight, deepest third, stream 0"))  # fmt: skip
        baseline = group["arms"][study.baseline]["runs"][0]
        twin = group["arms"][study.noise_arm]["runs"][0]
        assert twin["loss"] == pytest.approx(baseline["loss"], abs=1e-4)  # two steps apart in rounding only
    written = tmp_path / "pages" / "results" / f"{name}-cpu.json"
    assert json.loads(written.read_text(encoding="utf-8")) == json.loads(json.dumps(results))
    text = (tmp_path / "pages" / f"{name}.md").read_text(encoding="utf-8")
    assert text == page(results) and study.title in text
    assert (tmp_path / "pages" / f"{name}.png").stat().st_size > 1000
    assert not list(shared_out.glob("runs/*/model"))


def without_times(results):
    results = copy.deepcopy(results)
    del results["seconds"], results["command"]
    for group in results["groups"].values():
        for arm in group["arms"].values():
            for run in arm["runs"]:
                del run["seconds"]
    return results


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    file = small_study("rd-controls", folder, seeds=[1, 2], save_strategy="steps", save_steps=1)
    return without_times(reproduce(file, out=folder, workers=1, groups=ONE, arms=["rd-attnres"], tell=quiet))


def stopped_at(count, function):
    """`function`, interrupted by the user in its call number `count`."""
    calls = []

    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == count:
            raise KeyboardInterrupt
        return function(*arguments, **options)

    return call


@pytest.mark.parametrize("where", ["between two runs", "inside a run, behind a checkpoint"])
def test_a_study_that_was_stopped_goes_on_to_the_same_numbers(where, tmp_path, uninterrupted, monkeypatch):
    file = small_study("rd-controls", tmp_path, seeds=[1, 2], save_strategy="steps", save_steps=1)
    options = {
        "out": tmp_path,
        "workers": 1,
        "groups": ONE,
        "arms": ["rd-attnres"],
        "tell": quiet,
    }
    with monkeypatch.context() as patch:
        if where == "between two runs":
            patch.setattr(reproduce_module, "perform", stopped_at(3, reproduce_module.perform))
        else:
            patch.setattr(one_run, "window_losses", stopped_at(3, one_run.window_losses))
        with pytest.raises(Unfinished, match=r"2 of 6 runs done; the same command goes on"):
            reproduce(file, **options)
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 2
    assert bool(list(tmp_path.glob("runs/*/model/checkpoint-1"))) == (where != "between two runs")
    performed = []
    monkeypatch.setattr(one_run, "run_training", lambda *a, **o: performed.append(1) or run_training(*a, **o))
    assert without_times(reproduce(file, **options)) == uninterrupted
    assert len(performed) == 4


run_training = one_run.run_training


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    for step, state in ((1, {"global_step": 1}), (2, None), (10, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps(state) if state else "{")
    assert one_run._checkpoint_to_go_on_from(tmp_path) == tmp_path / "checkpoint-1"
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-1"]


def test_several_workers_come_to_the_same_numbers(tmp_path, uninterrupted):
    file = small_study("rd-controls", tmp_path, seeds=[1, 2], save_strategy="steps", save_steps=1)
    results = without_times(reproduce(file, out=tmp_path, workers=2, groups=ONE, arms=["rd-attnres"], tell=quiet))
    assert results.pop("machine").pop("workers") == 2
    assert results == {key: value for key, value in uninterrupted.items() if key != "machine"}


def test_a_run_that_another_study_has_done_is_not_done_again(tmp_path, monkeypatch):
    first = small_study("rd-controls", tmp_path, seeds=[1])
    reproduce(first, out=tmp_path, workers=1, groups=ONE, arms=["rd-attnres"], tell=quiet)
    second = tmp_path / "another.yaml"
    second.write_text(first.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(one_run, "run_training", lambda *a, **o: pytest.fail("done again"))
    lines = []
    results = reproduce(second, out=tmp_path, workers=1, groups=ONE, arms=["rd-attnres"], tell=lines.append)
    assert results["study"] == "another" and "0 runs, 3 are done already" in lines[0]


def test_the_forecast_comes_first_and_can_come_alone(tmp_path):
    file = small_study("rd-controls", tmp_path, seeds=[1, 2])
    lines = []
    forecast = reproduce(file, out=tmp_path, workers=1, groups=ONE, forecast_only=True, tell=lines.append)["forecast"]
    assert forecast["runs"] == 12 and forecast["measured"] and forecast["seconds"] > 0
    assert forecast["tokens"] == 12 * 2 * 2 * 32  # runs, steps, examples, block
    assert len(lines) == 1 and "12 runs; 1,536 tokens" in lines[0]
    assert not (tmp_path / "runs").exists() and not (tmp_path / "evidence").exists()


def test_a_size_that_is_too_much_for_the_machine_is_forecast_by_arithmetic(tmp_path):
    lines = []
    options = {"arms": ["delta"], "groups": ["220M"], "forecast_only": True, "out": tmp_path, "tell": lines.append}
    forecast = reproduce("delta-vs-attnres", "paper", **options)["forecast"]  # without a network
    assert forecast["runs"] == 3 and forecast["tokens"] == 3 * 10_000 * 64 * 1024 and not forecast["measured"]
    assert "(arithmetic" in lines[0] and not list(tmp_path.iterdir())


def test_two_studies_in_one_folder_do_a_run_that_they_share_once(tmp_path, monkeypatch):
    performed = []

    def slowly(*_):
        performed.append(1)
        (places.result_of(run).parent / "model").mkdir()
        time.sleep(0.3)
        return {"loss": 1.0}

    monkeypatch.setattr(one_run, "_performed", slowly)
    run, places = PlannedRun("all", "an arm", 1, {}, ""), one_run.Places(tmp_path / "runs", None, None, False)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(one_run.perform, run, places, 64) for _ in range(2)]
        assert [one.result() for one in both] == [{"loss": 1.0}] * 2
    assert len(performed) == 1 and not list(tmp_path.glob("runs/*/model"))


def test_another_checkpoint_under_the_same_name_is_another_base(tmp_path):
    names = set()
    for parent, content in (("a", b"one"), ("b", b"two"), ("b", b"new")):
        folder = tmp_path / parent / "model"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(content)
        names |= {reproduce_module._base(str(folder), tmp_path, quiet)[1] for _ in range(2)}
        time.sleep(0.02)
    assert len(names) == 3 and all(name.startswith("model@") for name in names)


def test_the_command_on_a_page_names_no_folder_of_the_machine():
    words = ["reproduce", "rd-controls", "--out", "/mine", "--seeds", "1", "--pages=/mine/pages", "--arm", "rd attnres"]
    assert cli_studies._told(words) == "depthroute reproduce rd-controls --seeds 1 --arm 'rd attnres'"


def test_the_first_forecast_and_all_starts_are_told(tmp_path):
    file = small_study("rd-controls", tmp_path, seeds=[1])
    first = reproduce(file, out=tmp_path, workers=1, groups=ONE, arms=["rd-attnres"], tell=quiet)["seconds"]
    second = reproduce(file, out=tmp_path, workers=1, groups=ONE, arms=["rd-attnres"], tell=quiet)["seconds"]
    assert second["forecast"] == first["forecast"] > 0
    assert second["elapsed"] >= first["elapsed"] > 0 and second["runs"] == first["runs"]


def test_models_are_kept_where_asked_for(tmp_path):
    file = small_study("rd-controls", tmp_path, seeds=[1])
    reproduce(file, out=tmp_path, workers=1, groups=ONE, arms=["shared"], keep_models=True, tell=quiet)
    assert len(list(tmp_path.glob("runs/*/model/model.safetensors"))) == 3


@pytest.mark.parametrize(
    "options, said",
    [
        ({"name": "rd-control"}, "study: got 'rd-control', nearest: rd-controls"),
        ({"size": "tpu"}, "size: got 'tpu', allowed for rd-controls: cpu, gpu, paper"),
        ({"arms": ["shard"]}, "arms: got 'shard', nearest: shared"),
        ({"groups": ["everything"]}, "groups: got 'everything'"),
        ({"text": "web"}, "text: got 'web', allowed: library, hub"),
        ({"text": "hub"}, "text: got 'hub', allowed for rd-controls at size cpu: library"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_is_refused_leaves_nothing(options, said, tmp_path):
    options = {"name": "rd-controls", **options}
    with pytest.raises(Refused, match=said):
        reproduce(out=tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
