# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What depth routing costs beside stock Qwen3. Timing and counting only what has been shown to compute the right thing.

parity.py     what must hold before a case is measured
equations.py  reads and writes in float64, step by step
measure.py    time, bytes saved for backward, peak memory of one step
model.py      `run_benchmark`: whole models, interleaved in one run
report.py     the result as a table and as a figure
"""

from .model import BenchmarkSettings, run_benchmark


__all__ = ["BenchmarkSettings", "run_benchmark"]
