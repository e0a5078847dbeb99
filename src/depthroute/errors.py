# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The ways in which a command can end badly, and how any error becomes one line."""


class Refused(ValueError):
    """The input is not accepted, and nothing was written. Exit code 2. The message is one line that names the field or
    file, the value got, and what is allowed."""


class CheckFailed(RuntimeError):
    """The work ran and a check that was promised to hold did not. Exit code 1. One line, as above."""


class Unfinished(RuntimeError):
    """The work was stopped from outside, by a full disk or a failing one, and what was finished is kept. Exit code 3. One line
    that says where it is and how to go on."""


def one_line(error: BaseException) -> str:
    """An error's message on one line; of a validation error of transformers' strict configurations, its first cause."""
    if type(error).__name__.startswith("StrictDataclass"):
        while error.__cause__ is not None:
            error = error.__cause__
    return " ".join(str(error).split()) or type(error).__name__
