# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What every implementation takes and gives: defined, with its equations, where the model asks for it."""

from depthroute.modeling.depth_backend import MergeInput, MergeOutput, Part, PhaseInput, PhaseOutput, Prior


__all__ = ["MergeInput", "MergeOutput", "Part", "PhaseInput", "PhaseOutput", "Prior"]
