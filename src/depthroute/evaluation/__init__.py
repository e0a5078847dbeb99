# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation with lm-eval: `evaluate`, paired comparisons, tasks and a metric that need no network."""

from .catalog import DELTA_PAPER_TASKS, HELD_OUT_MODULES, LOCAL_TASKS, PERPLEXITY_METRIC, TASK_FOLDER
from .compare import compare, comparison_table
from .evaluate import evaluate, results_table


__all__ = [
    "DELTA_PAPER_TASKS",
    "HELD_OUT_MODULES",
    "LOCAL_TASKS",
    "PERPLEXITY_METRIC",
    "TASK_FOLDER",
    "compare",
    "comparison_table",
    "evaluate",
    "results_table",
]
