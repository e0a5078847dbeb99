# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Telling a loss spike from noise."""

from collections import deque
from math import isfinite
from statistics import median


class SpikeDetector:
    """Tells a loss spike from noise: a value above the median of the last ones by 6 robust standard deviations (1.4826 times
    the median absolute deviation) and by a tenth of the median, or one that is not finite. Silent for the first 8."""

    def __init__(self, window: int = 32, minimum: int = 8):
        self.values: deque[float] = deque(maxlen=window)
        self.minimum = minimum

    def exceeded(self, value: float) -> float | None:
        """The median that `value` is a spike above; None where it is none. It is then one of the last values."""
        if len(self.values) < self.minimum:
            self.values.extend([value] if isfinite(value) else [])
            return None
        middle = median(self.values)
        deviation = 1.4826 * median(abs(other - middle) for other in self.values)
        if not isfinite(value):
            return middle
        self.values.append(value)
        return middle if value - middle > max(6 * deviation, 0.1 * abs(middle)) else None
