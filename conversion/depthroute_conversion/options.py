# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`--set field=value` on the command line."""

import json
from collections.abc import Iterable
from typing import Any

import yaml

from depthroute.errors import Refused


def parse_settings(settings: Iterable[str]) -> dict[str, Any]:
    """`["depth_num_heads=4", "depth_logit_scale=1e-2"]` as fields; a value is JSON, or else YAML.

    Raises:
        Refused: no `=`, no field name, a field given twice, or a value that is neither.
    """
    fields: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise Refused(f"--set: got {setting!r}, allowed: field=value")
        if name in fields:
            raise Refused(f"--set: got {name} twice, allowed: once")
        fields[name] = _parse_value(name, text)
    return fields


def _parse_value(name: str, text: str) -> Any:
    try:
        return json.loads(text)  # first: YAML 1.1 takes 1e-5 for a string
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Refused(f"--set: {name}: got {text!r}, allowed: a JSON or YAML value") from error
