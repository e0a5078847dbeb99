# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The routing of a model by itself: find it under any wrapper, freeze the rest, save it to one small file, load it back."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..errors import Refused
from ..modeling.configuration_depthroute import HOSTING_FIELDS, family_fields


METADATA_KEY = "depthroute"

READS = {"attn_read", "final_read", "mlp_read"}
"""The modules that hold routing."""

# how it is computed, and which backbone hosts it: the same routing fits
_NOT_OF_THE_ROUTING = ("depth_backend", *HOSTING_FIELDS)

# what PEFT puts into a name when a module is in `modules_to_save`: the frozen original, and one copy for each adapter
_ORIGINAL, _COPIES = "original_module", "modules_to_save"


def routed_model(model: nn.Module) -> Any:
    """The DepthRoute model inside `model`, which may be wrapped by PEFT, DDP or torch.compile; None where there is none."""
    return next((module for module in model.modules() if hasattr(type(module), "routing_parameters")), None)


def routing_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The routing parameters that take part in the forward pass, by their names in a checkpoint
    (`model.layers.0.mlp_read.query`), also where `model` is wrapped. Empty for a model without routing.

    Under PEFT these are the active adapter's copies, where the reads are in `modules_to_save`.
    """
    owner = routed_model(model)
    if owner is None:
        return {}
    decoder = owner.base_model  # the decoder itself, with or without a head around it
    found = {}
    for name, parameter in decoder.routing_parameters().items():
        path, _, leaf = name.rpartition(".")
        parts = path.split(".")
        if _COPIES in parts or parts[-1] == _ORIGINAL:
            at = parts.index(_COPIES) if _COPIES in parts else len(parts) - 1
            path = ".".join(parts[:at])
            wrapper = decoder.get_submodule(path)
            active = next((adapter for adapter in wrapper.active_adapters if adapter in wrapper.modules_to_save), None)
            used = [_ORIGINAL] if active is None or wrapper.disable_adapters else [_COPIES, active]
            if parts[at:] != used:
                continue
        found[f"model.{path}.{leaf}"] = parameter
    return found


def routing_module_names(model: nn.Module) -> list[str]:
    """What to give PEFT as `modules_to_save` so that adapters keep the routing: those of `attn_read`, `final_read` and
    `mlp_read` that this model has. Empty for a model without routing.

    Raises:
        Refused: the routing is no modules but parameters of the layers themselves (`rezero`, `layerscale`), which PEFT cannot
            save: it would keep whole layers, or silently nothing.
    """
    names = {name.split(".")[-2] for name in routing_parameters(model)}
    if names and not names <= READS:
        scales = sorted({name.split(".")[-1] for name in routing_parameters(model)})
        raise Refused(
            f"modules_to_save: got {' and '.join(scales)}, parameters of the layers, which PEFT cannot save; allowed: training "
            "without adapters, or a loop of your own: set requires_grad of routing_parameters(model) after get_peft_model, and "
            "keep them with save_routing"
        )
    return sorted(names)


def freeze_base(model: nn.Module) -> None:
    """Leave only the routing parameters trainable. Gradients reach them under reentrant checkpointing too.

    Raises:
        Refused: the model has no routing parameters.
    """
    routing = routing_parameters(model)
    if not routing:
        raise Refused("freeze_base: got a model without routing parameters, allowed: a model with depth reads")
    model.requires_grad_(False)
    for parameter in routing.values():
        parameter.requires_grad_(True)
    # a reentrant checkpoint passes gradients on only where one of its inputs wants them
    routed_model(model).enable_input_require_grads()


def _routing_fields(config: Any) -> dict[str, Any]:
    names = [name for name in family_fields() if name not in _NOT_OF_THE_ROUTING]
    return {name: getattr(config, name) for name in ["hidden_size", "num_hidden_layers", *names]}


def save_routing(model: nn.Module, file: str | Path) -> None:
    """Write the routing parameters, and the configuration fields that they belong to, to a safetensors file.

    Args:
        model: a DepthRoute model, wrapped or not.
        file: a few hundred kB where a read is two vectors [D]; more with gates or projections.

    Raises:
        Refused: the model has no routing parameters, or the folder of `file` does not exist.
    """
    routing = routing_parameters(model)
    if not routing:
        raise Refused(f"{file}: got a model without routing parameters, allowed: a model with depth reads")
    if not Path(file).parent.is_dir():
        raise Refused(f"{file}: got a folder that does not exist, allowed: a file in an existing folder")
    tensors = {name: parameter.detach().cpu().contiguous().clone() for name, parameter in routing.items()}
    fields = _routing_fields(routed_model(model).config)
    save_file(tensors, file, metadata={"format": "pt", METADATA_KEY: json.dumps(fields)})


def _read_routing(file: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    if not Path(file).is_file():
        raise Refused(f"{file}: no such file, allowed: a file that save_routing wrote")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except SafetensorError as error:
        raise Refused(f"{file}: {error}, allowed: a safetensors file that save_routing wrote") from error
    if METADATA_KEY not in metadata:
        raise Refused(f"{file}: its metadata has no entry {METADATA_KEY!r}, allowed: a file that save_routing wrote")
    return tensors, json.loads(metadata[METADATA_KEY])


def load_routing(model: nn.Module, file: str | Path) -> None:
    """Set a model's routing parameters to those in a file that `save_routing` wrote. All are checked before one is set.

    Raises:
        Refused: the file is no such file, or its fields, names or shapes are not the model's; each that differs is named.
    """
    tensors, fields = _read_routing(file)
    routing = routing_parameters(model)
    if not routing:
        raise Refused(f"{file}: got a model without routing parameters, allowed: a model with depth reads")
    own = _routing_fields(routed_model(model).config)
    differing = [f"{key}: {fields.get(key)} in the file, {own.get(key)} in the model" for key in {**own, **fields}
                 if fields.get(key) != own.get(key)]  # fmt: skip
    if differing:
        raise Refused(f"{file}: {'; '.join(differing)}; allowed: the same fields")
    if odd := sorted(tensors.keys() ^ routing.keys()):
        raise Refused(f"{file}: not in both file and model: {', '.join(odd)}")
    for name, parameter in routing.items():
        if parameter.shape != tensors[name].shape:
            raise Refused(f"{file}: {name}: got {list(tensors[name].shape)}, allowed: {list(parameter.shape)}")
    with torch.no_grad():
        for name, parameter in routing.items():
            parameter.copy_(tensors[name])
