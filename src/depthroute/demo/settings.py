# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Sizes of a demo run. All of them are fixed numbers, so that a run can be repeated; none depends on the machine's speed.

Everything is float32: on processors without instructions for bfloat16, products in it take twenty times as long.
"""

from dataclasses import dataclass

from ..errors import Refused


STEPS_PER_MINUTE = 2
"""Fine-tuning steps of the default sizes, twice (conversion and control), with everything else that the demo does beside
them, for each minute on two cores."""


@dataclass(frozen=True)
class DemoSettings:
    """
    Attributes:
        preset: one of `depthroute.PRESETS`.
        seed: of data order, and of the tiny base's weights.
        tiny: train a tiny base on the spot.
        steps: optimizer steps of each fine-tune.
        batch, tokens: sequences of a step, and their tokens.
        learning_rate: peak of the base parameters'; the routing has its preset's default multiple.
        validation_windows: each of `tokens` tokens, each from another file.
        documents: of the multiple-choice task; None: all.
        sample_tokens: of the generated sample.
        inspected_tokens: of the routing figures.
        base_steps, base_batch, base_learning_rate: of the tiny base's own training.
    """

    preset: str = "delta-block"
    seed: int = 0
    tiny: bool = False
    steps: int = 20
    batch: int = 1
    tokens: int = 512
    learning_rate: float = 5e-5
    validation_windows: int = 16
    documents: int | None = 16
    sample_tokens: int = 40
    inspected_tokens: int = 2048
    base_steps: int = 160
    base_batch: int = 8
    base_learning_rate: float = 5e-3

    @classmethod
    def full(cls, minutes: float = 10, preset: str = "delta-block", seed: int = 0) -> "DemoSettings":
        """The run on a real model.

        Args:
            minutes: what it may take on two cores; it sets the number of steps, not a clock.

        Raises:
            Refused: less than one minute.
        """
        if not 1 <= minutes < float("inf"):
            raise Refused(f"minutes: got {minutes}, allowed: a number ≥ 1")
        return cls(preset=preset, seed=seed, steps=round(STEPS_PER_MINUTE * minutes))

    @classmethod
    def small(cls, preset: str = "delta-block", seed: int = 0) -> "DemoSettings":
        """The same stages on a tiny base."""
        return cls(
            preset=preset,
            seed=seed,
            tiny=True,
            steps=60,
            batch=8,
            tokens=128,
            learning_rate=1e-3,
            validation_windows=32,
            documents=None,
            inspected_tokens=4096,
        )
