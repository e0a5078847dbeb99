# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Evaluation with lm-eval: `evaluate`, and tasks that need no network."""

from .catalog import DELTA_PAPER_TASKS, HELD_OUT_MODULES, LOCAL_TASKS, TASK_FOLDER
from .evaluate import evaluate, results_table


__all__ = ["DELTA_PAPER_TASKS", "HELD_OUT_MODULES", "LOCAL_TASKS", "TASK_FOLDER", "evaluate", "results_table"]
