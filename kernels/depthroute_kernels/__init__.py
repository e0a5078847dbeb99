# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The depth read as a public operator, and the benchmarks of models built on it."""

from .dispatch import IMPLEMENTATIONS, depth_read


__all__ = ["IMPLEMENTATIONS", "depth_read"]
