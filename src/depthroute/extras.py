# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Libraries that only some commands need."""

from importlib import import_module
from types import ModuleType

from .errors import Refused


def require(module: str, extra: str) -> ModuleType:
    """Import a library that the package's `extra` installs.

    Raises:
        Refused: it is not installed; the line names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # installed, but broken: that is another matter
        raise Refused(f"{error.name}: not installed, needed here: pip install 'depthroute[{extra}]'") from error
