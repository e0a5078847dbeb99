# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The configuration of a source, checked before a weight is looked at."""

import json
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from depthroute.errors import Refused, one_line
from depthroute.modeling.configuration_depthroute import read_backbone_config

from .architectures import ARCHITECTURES, architectures_of, language_models
from .keys import listed


METHOD = "fp8"
"""The one kind of quantized weights that is read, by its `quant_method`."""

_QUANTIZE_AFTER = "convert the checkpoint that it was quantized from, and quantize the conversion"
_INSTEAD = {
    "awq": _QUANTIZE_AFTER,
    "gptq": _QUANTIZE_AFTER,
    "bitsandbytes": "convert the checkpoint that it was quantized from, and load the conversion with a BitsAndBytesConfig",
    "compressed-tensors": "convert the checkpoint that it was quantized from, or one of its publisher's with quant_method 'fp8'",
}
"""What to do in place of converting a quantized checkpoint, by its method."""


def read_stock_config(folder: Path, ignore_code: bool = False) -> tuple[PreTrainedConfig, str | None]:
    """The configuration of a model of a hosted type, and the one name among its `architectures`, if there is one. An entry
    `quantization_config` that it has is one of FP8.

    Args:
        folder: the model folder.
        ignore_code: accept a folder that comes with code of its own.

    Raises:
        Refused: `config.json` is missing, unreadable or out of range; another architecture; quantized weights, named by
            their method.
    """
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise Refused(
            f"{path}: missing, the folder holds a PEFT adapter; allowed: a whole model (merge the adapter first)"
        )
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{path}: {type(error).__name__}, allowed: a readable model configuration") from error
    if not isinstance(entries, dict):
        raise Refused(f"{path}: got a {type(entries).__name__}, allowed: a model configuration")
    declared = _check_architecture(path, entries)
    if not ignore_code:
        names = " or ".join(item.name for item in architectures_of(entries["model_type"]))
        check_code(path, entries, f"{names} as transformers has it")
    if entries.get("quantization_config") is not None:
        _check_quantization(path, entries["quantization_config"])
    try:
        return read_backbone_config(folder), declared
    except (ValueError, OSError, LookupError, TypeError, AttributeError, StrictDataclassError) as error:
        raise Refused(f"{path}: {one_line(error)}") from error


def _check_architecture(path: Path, entries: dict) -> str | None:
    given = entries.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise Refused(f"{path}: architectures: got {given!r}, allowed: a list of one of {', '.join(ARCHITECTURES)}")
    model_type = entries.get("model_type")
    allowed = [item.name for item in architectures_of(model_type)]
    if not allowed or len(given) > 1 or not set(given) <= set(allowed):
        shown = ", ".join(map(str, given)) or "none"
        names = " or ".join(allowed) or f"{language_models()}, or their forms without a head or for classification"
        raise Refused(f"{path}: architectures: got {shown} (model_type {model_type!r}), allowed: {names}")
    return given[0] if given else None


def check_code(path: Path, entries: dict, known: str) -> None:
    """Refuse a folder that comes with code of its own: its tensors may mean something else there than in `known`.

    Raises:
        Refused: naming the code.
    """
    modules = sorted(item.name for item in path.parent.glob("*.py"))
    if "auto_map" in entries or modules:
        got = f"auto_map: got {entries['auto_map']}" if "auto_map" in entries else f"got {listed(modules)} beside it"
        raise Refused(
            f"{path}: {got}, code of its own, which is never run; allowed: a model without, or --ignore-code where its tensors "
            f"are those of {known}"
        )


def _check_quantization(path: Path, settings: object) -> None:
    method = _quantization_method(settings)
    if method != METHOD:
        advice = _INSTEAD.get(method, "convert the checkpoint that it was quantized from")
        raise Refused(
            f"{path}: quantization_config: got {method!r}, allowed: unquantized weights, or quant_method {METHOD!r} with "
            f"scales; instead {advice}"
        )


def _quantization_method(settings: object) -> str:
    if not isinstance(settings, dict):
        return str(settings)
    if any(settings.get(name) for name in ("load_in_8bit", "load_in_4bit")):
        return "bitsandbytes"
    return str(settings.get("quant_method", "unnamed"))
