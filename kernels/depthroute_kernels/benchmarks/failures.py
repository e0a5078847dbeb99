# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What may go wrong in code that is measured and not ours, or on a device that is not known: to be reported, not to end a run."""

from functools import cache
from importlib import import_module

from depthroute.errors import CheckFailed


@cache
def failures() -> tuple[type[BaseException], ...]:
    """Errors of Python, torch (RuntimeErrors, memory among them) and, where it is installed, Triton's compiler."""
    known: tuple[type[BaseException], ...] = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        CheckFailed,
        ImportError,
        LookupError,
        MemoryError,
        NameError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    )
    try:
        return (*known, import_module("triton.errors").TritonError)
    except ImportError:
        return known


def in_one_line(error: BaseException) -> str:
    """The error's type and the first line of what it says, cut at 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
