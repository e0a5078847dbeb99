# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Looking at a model's routing: record it over text, summarise it, draw it."""

from .metrics import ReadStatistics, read_statistics
from .record import record_routing


__all__ = ["ReadStatistics", "read_statistics", "record_routing"]
