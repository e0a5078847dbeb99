# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What depth routing costs beside stock Qwen3. Timing and counting only what has been shown to compute the right thing.

model.py           `run_benchmark`: whole models beside stock Qwen3
operator_run.py    `run_operator_benchmark`: one read, or the reads of one block, beside other libraries
gpu.py             a script: everything that only a GPU can tell, in one file

settings.py        what is asked for
parity.py          what must hold before a model is measured: its reads, one by one
backend_parity.py  and the whole of it
equations.py       reads and writes in float64, step by step
operator_cases.py  reads: tensors, equations, the fewest bytes
own_reads.py       our implementations of them
peers.py           other libraries'
failures.py        what other people's code may raise
measure.py         time, bytes saved for backward, peak memory of one step
machine.py         where that was
report.py          the result of models as a table and as a figure
operator_report.py the same of reads
"""

from .model import run_benchmark
from .operator_cases import OperatorSettings
from .operator_run import run_operator_benchmark
from .settings import BenchmarkSettings


__all__ = ["BenchmarkSettings", "OperatorSettings", "run_benchmark", "run_operator_benchmark"]
