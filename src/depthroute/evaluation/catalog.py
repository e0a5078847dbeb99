# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Names of the tasks that come with the package, and where they lie."""

from pathlib import Path


TASK_FOLDER = Path(__file__).parent / "tasks"
"""What `--include_path` of lm-eval takes to know our tasks and groups."""

PERPLEXITY_METRIC = str(Path(__file__).parent / "metrics" / "depthroute_perplexity.py")
"""What `evaluate.load` takes for perplexity without a network."""

LOCAL_TASKS = ("depthroute_choice", "depthroute_perplexity", "depthroute_generation")
"""Multiple choice, rolling perplexity and generation on data in this package; together the group `depthroute_local`."""

DELTA_PAPER_TASKS = (
    "hellaswag",
    "arc_easy",
    "arc_challenge",
    "piqa",
    "winogrande",
    "boolq",
    "mmlu",
    "lambada_openai",
)
"""The eight tasks of Delta AttnRes (arXiv 2605.18855), lm-eval's own; together the group `delta_paper`. They download."""

HELD_OUT_MODULES = (
    "bisect",
    "calendar",
    "cmd",
    "colorsys",
    "configparser",
    "copy",
    "difflib",
    "filecmp",
    "fractions",
    "graphlib",
    "heapq",
    "ipaddress",
    "mailbox",
    "pathlib",
    "pprint",
    "queue",
    "sched",
    "shutil",
    "statistics",
    "string",
    "textwrap",
    "timeit",
    "zipfile",
)
"""Modules of Python's standard library that the local tasks are made of. Leave them out of training data, or the scores
are not of unseen text."""
