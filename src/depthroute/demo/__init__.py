# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The main job on a real model, start to end: convert, verify, fine-tune beside a control, evaluate, draw, and say plainly
what of it is noise.

settings.py  sizes of the real and of the tiny run
base.py      where the base model comes from
corpus.py    the text: the running Python's standard library
measure.py   what is measured of one model
noise.py     paired differences and whether they mean anything
report.py    table, figure, summary and model card
run.py       `run_demo`
"""

from .run import run_demo
from .settings import DemoSettings


__all__ = ["DemoSettings", "run_demo"]
