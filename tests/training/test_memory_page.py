# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""docs/training-at-scale.md: its numbers are those of the memory function, its options and names exist."""

import re
from pathlib import Path

import pytest

from depthroute.errors import Refused
from depthroute.modeling.configuration_depthroute import DepthRouteConfig
from depthroute.training.arguments import option_names
from depthroute.training.engines import engine_files
from depthroute.training.memory import parameter_sizes
from depthroute.training.memory_tables import BACKBONES, renewed


PAGE = (Path(__file__).parents[2] / "docs" / "training-at-scale.md").read_text(encoding="utf-8")


def test_the_numbers_are_computed():
    assert renewed(PAGE) == PAGE, "python -m depthroute.training.memory_tables docs/training-at-scale.md"
    assert all(f"<!-- memory: {size} -->" in PAGE for size in BACKBONES)
    assert len(re.findall(r"^\| .*`delta-block`", PAGE, re.MULTILINE)) == 6


def test_a_page_without_known_tables_is_refused():
    with pytest.raises(Refused, match="memory: got '7B', allowed: 0.6B, 8B, 30B-A3B"):
        renewed("<!-- memory: 7B -->\n<!-- end -->")
    with pytest.raises(Refused, match="found no table"):
        renewed("no table")


# Qwen3's own model cards: 0.6B (0.44B without embeddings), 8.2B, 30.5B
@pytest.mark.parametrize("size, billions", [("0.6B", 0.596), ("8B", 8.19), ("30B-A3B", 30.53)])
def test_the_backbones_have_their_published_sizes(size, billions):
    config = DepthRouteConfig.from_preset("standard", base=BACKBONES[size])
    assert parameter_sizes(config).total / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_commands_name_what_there_is():
    engines = re.findall(r"--print-engine (\w[\w-]*)\)", PAGE)
    assert engines and set(engines) <= engine_files().keys()
    options = {
        name
        for command in re.findall(r"depthroute train --model.*?```", PAGE, re.DOTALL)
        for name in re.findall(r"--(\w+)", command)
    }
    assert options and options <= {*option_names(), "print"}
