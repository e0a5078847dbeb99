# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The one place that knows which transformers release is installed.

Supported: transformers 5.17 to 5.24. The one difference that matters to a model is the name of the KV-cache argument:
`past_key_values` up to 5.23, `cache` from 5.24 on. A release that does not know the name it is given swallows it and
computes wrong logits, so the name is read off the installed release and never guessed.
"""

import inspect
import re
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import transformers


OLDEST_SUPPORTED = (5, 17)
NEWEST_TESTED = (5, 24)


def check_transformers_version(version: str) -> None:
    """Refuse releases older than 5.17 and warn once about releases newer than the tested ones.

    Raises:
        ImportError: one line, "DepthRoute needs transformers ≥ 5.17, found Y".
    """
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found < OLDEST_SUPPORTED:
        raise ImportError(
            f"DepthRoute needs transformers ≥ {OLDEST_SUPPORTED[0]}.{OLDEST_SUPPORTED[1]}, found {version}"
        )
    if found > NEWEST_TESTED:
        warnings.warn(
            f"DepthRoute is tested up to transformers {NEWEST_TESTED[0]}.{NEWEST_TESTED[1]}, found {version}: "
            "run `depthroute verify` on a conversion before relying on it",
            stacklevel=2,
        )


check_transformers_version(transformers.__version__)

from transformers.masking_utils import create_causal_mask  # noqa: E402  (only after the version check)


CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""The installed release's name of the KV-cache argument of layers, mask functions and outputs."""

_EITHER_NAME = ("cache", "past_key_values")


def cache_argument(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a `forward` that is written with `cache=` be called with either name, and show the installed release's name
    in its signature, which `generate` and the Trainer read."""
    signature = inspect.signature(forward)
    shown = [
        parameter.replace(name=CACHE_NAME) if name == "cache" else parameter
        for name, parameter in signature.parameters.items()
    ]

    @wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(name) for name in _EITHER_NAME if kwargs.get(name) is not None]
        for name in _EITHER_NAME:
            kwargs.pop(name, None)
        if given:
            kwargs["cache"] = given[0]
        return forward(self, *args, **kwargs)

    call.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return call
