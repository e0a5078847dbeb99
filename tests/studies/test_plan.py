# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Plans: matched runs, spelled as commands that `depthroute train` accepts."""

import shlex

import pytest

from depthroute.studies import read_study, study_names
from depthroute.studies.definition import SIZES
from depthroute.studies.plan import plan_runs
from depthroute.training.arguments import parse_arguments
from depthroute.training.starting import model_config


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", study_names())
def test_every_run_is_a_command_that_train_accepts(name, size, tmp_path):
    study = read_study(name)
    runs = plan_runs(study, size, "")
    assert {run.arm for run in runs} == set(study.arms)
    first_of_arm = {run.arm: run for run in reversed(runs)}
    first_of_group = {run.group: run for run in reversed(runs)}
    for run in [*first_of_arm.values(), *first_of_group.values()]:
        words = shlex.split(run.command)
        assert words[:2] == ["depthroute", "train"]
        told, training = parse_arguments([*words[2:], f"--output_dir={tmp_path}", "--bf16=false"])  # not on every CPU
        assert told.preset == study.arms[run.arm].preset and training.seed == run.seed
        if told.from_scratch:
            config = model_config(told, vocab_size=100)
            for field, value in (study.arms[run.arm].fields or {}).items():
                assert getattr(config, field) == value


@pytest.mark.parametrize("name", study_names())
def test_arms_differ_in_what_they_are_and_in_nothing_else(name):
    study = read_study(name)
    for size in SIZES:
        for group in study.sizes[size].groups:
            common = []
            for run in plan_runs(study, size, "", groups=[group]):
                own = {"preset", "fields", "seed", *(study.arms[run.arm].options or {})}
                common.append({key: value for key, value in run.entries.items() if key not in own})
            assert all(entries == common[0] for entries in common)


def test_seeds_come_one_after_the_other_so_that_a_stopped_study_has_pairs():
    runs = plan_runs(read_study("rd-controls"), "cpu", "")
    for group in ("120 steps", "300 steps"):
        seeds = [run.seed for run in runs if run.group == group]
        assert seeds == sorted(seeds)
    assert len(runs) == 2 * 6 * 5


def test_only_some():
    runs = plan_runs(read_study("rd-controls"), "paper", "", seeds=[7], groups=["343M"], arms=["average"])
    assert [(run.group, run.arm, run.seed) for run in runs] == [
        ("343M", "attnres-block", 7),
        ("343M", "rounding twin", 7),
        ("343M", "average", 7),
    ]


def test_an_arm_s_own_seeds():
    runs = plan_runs(read_study("retrofit"), "cpu", "")
    assert [run.seed for run in runs if run.arm == "delta-block, plain"] == [1, 2, 3]
    assert [run.seed for run in runs if run.arm == "dar, plain"] == [1]


def test_a_key_tells_runs_apart_and_nothing_else():
    runs = plan_runs(read_study("dar-routing"), "cpu", "text")
    assert len({run.key for run in runs}) == len(runs)
    others = {run.key for run in plan_runs(read_study("rd-controls"), "cpu", "text")}
    shared = {run.arm for run in runs if run.key in others}
    assert shared == {"attnres-block"}  # the same runs in both studies
    assert not {run.key for run in plan_runs(read_study("dar-routing"), "cpu", "other text")} & {r.key for r in runs}


def test_text_of_the_hub_takes_the_place_of_the_library_s():
    run = plan_runs(read_study("rd-controls"), "gpu", "", hub=True)[0]
    assert run.entries["dataset"] == "HuggingFaceFW/fineweb-edu" and "train_files" not in run.entries
    assert "train_files" in plan_runs(read_study("rd-controls"), "gpu", "")[0].entries


def test_files_are_named_without_their_place_in_a_command(tmp_path):
    run = plan_runs(read_study("retrofit"), "cpu", "")[0]
    assert "--train_files train.jsonl" in run.command and "--model=base" in run.command
    arguments = run.arguments(tmp_path, "somewhere")
    assert str(tmp_path / "train.jsonl") in arguments and "--model=somewhere" in arguments
