# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Definitions of studies: those of the package are whole, and mistakes in a file are named."""

import pytest
import yaml

from depthroute.errors import Refused
from depthroute.studies import read_study, study_names
from depthroute.studies.definition import DEFINITIONS, SIZES


ASKED_FOR = {
    "beyond": {"delta-block, value route", "delta-block, details", "delta-block, 4 heads", "delta-block, 8 heads",
               "attnres-block, 4 heads", "attnres-block, 8 heads", "all together"},
    "dar-routing": {"standard", "attnres-block", "dar", "self", "cross_value", "fixed", "mhc-2", "SepV"},
    "delta-vs-attnres": {"standard", "attnres-states", "attnres", "attnres-block", "delta", "delta-block"},
    "rd-controls": {"attnres-block", "rd-attnres", "shared", "average", "uniform"},
    "retrofit": {"standard", "delta-block, anchored", "delta-block, plain", "delta-block, null source"},
    "wav-depth": {"standard", "attnres-block", "wav", "split only", "rezero", "layerscale"},
}  # fmt: skip


def test_the_studies_are_those_that_are_promised():
    assert study_names() == sorted(ASKED_FOR)


@pytest.mark.parametrize("name", ASKED_FOR)
def test_a_study_has_its_arms_sizes_and_claims(name):
    study = read_study(name)
    assert ASKED_FOR[name] <= set(study.arms)
    assert set(study.sizes) == set(SIZES)
    assert study.claims and study.question and study.paper
    noise, baseline = study.arms[study.noise_arm], study.arms[study.baseline]
    assert (noise.preset, noise.fields) == (baseline.preset, baseline.fields)
    assert noise.options == {"attn_implementation": "eager"}


GOOD = {
    "title": "t",
    "question": "q",
    "paper": "p",
    "baseline": "a",
    "noise_arm": "a",
    "arms": {"a": {"preset": "standard"}, "bee": {"preset": "delta"}},
    "sizes": {"cpu": {"seeds": [1]}},
    "claims": [{"says": "s", "measure": "loss", "arm": "bee", "against": "a", "expect": "lower"}],
}


def written(folder, **changes):
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **changes}), encoding="utf-8")
    return file


def test_a_file_of_ones_own(tmp_path):
    study = read_study(written(tmp_path))
    assert study.name == "mine" and study.sizes["cpu"].groups == {"all": {}} and study.notes == []


def claim(**changes):
    return {"claims": [{**GOOD["claims"][0], **changes}]}


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"arms": {"a": {"preset": "standrad"}}}, r"mine.yaml: arms: a: preset: got 'standrad', nearest: standard"),
        ({"arms": {"a": {"presets": "standard"}}}, r"arms: a: presets: unknown entry, nearest: preset"),
        ({"arms": {}}, r"mine.yaml: arms: got {}, allowed: a mapping with entries"),
        ({"baseline": "be"}, r"baseline: got 'be', nearest: bee"),
        ({"noise_arm": "be"}, r"noise_arm: got 'be', nearest: bee"),
        (claim(arm="be"), r"claims\[0\]: arm: got 'be', nearest: bee"),
        (claim(expect="better"), r"claims\[0\]: expect: got 'better', allowed: lower, higher"),
        (claim(expect="same"), r"claims\[0\]: within: got none, allowed: a number"),
        (claim(against=None), r"claims\[0\]: against: got none, allowed: an arm"),
        (claim(colour="red"), r"claims\[0\]: colour: unknown entry"),
        ({"sizes": {"tpu": {"seeds": [1]}}}, r"sizes: got 'tpu', allowed: cpu, gpu, paper"),
        ({"sizes": {"cpu": {"seeds": [1, 1]}}}, r"sizes: cpu: seeds: got \[1, 1\], allowed: one or more, each once"),
        ({"sizes": {"cpu": {}}}, r"sizes: cpu"),
        ({"sizes": {"cpu": {"seeds": [1], "settings": "gpus"}}}, r"settings: got 'gpus', nearest: gpu"),
        ({"sizes": {"cpu": {"seeds": [1], "text": {"document": 1}}}}, r"text: document: unknown entry, nearest: documents"),
        ({"titel": "t"}, r"mine.yaml: titel: unknown entry, nearest: title"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(changes, said, tmp_path):
    with pytest.raises(Refused, match=said):
        read_study(written(tmp_path, **changes))


def test_a_file_that_is_no_study(tmp_path):
    (tmp_path / "list.yaml").write_text("- a\n", encoding="utf-8")
    with pytest.raises(Refused, match="list.yaml: got list, allowed: a mapping"):
        read_study(tmp_path / "list.yaml")
    with pytest.raises(Refused, match="absent.yaml: .*allowed: a readable YAML file"):
        read_study(tmp_path / "absent.yaml")


def test_settings_are_no_studies():
    assert not {file.stem for file in (DEFINITIONS / "settings").glob("*.yaml")} & set(study_names())
