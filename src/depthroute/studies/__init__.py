# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Studies: the papers' claims measured with matched pairs, and the pages and cards that are made of what came out.

A study (`definitions/NAME.yaml`) is a grid of `depthroute train` runs: arms × seeds, in groups of one size of model. `plan` spells
the runs, `one_run` does one and measures the model, `reproduce` does them all and goes on where it was stopped; `page` and `cards`
are functions of the result files alone.
"""

from .definition import Study, read_study, study_names


__all__ = ["Study", "read_study", "study_names"]
