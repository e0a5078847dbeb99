# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Between the presets of our own family, as far as the function stays what it is.

    routing never trained, the standard function exactly    → anything that starts at that function
    anything else                                           → the same fields; `depth_anchored` may change where plain and
                                                              anchored reads are one function up to the rms eps

The second kind carries its routing: the tensors of its reads are copied like all others. So do imported checkpoints.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from depthroute import (
    DepthRouteConfig,
    DepthRouteForCausalLM,
    DepthRouteForSequenceClassification,
    DepthRouteModel,
)
from depthroute.errors import Refused
from depthroute.modeling.configuration_depthroute import backbone_fields, family_fields
from depthroute.modeling.modeling_depthroute import RESIDUALS

from .architectures import Architecture
from .routed import EXPORT_GAP, ROUNDING_GAP, Request, RoutedSource, built, why_anchoring_matters
from .routing import initial_routing, meta_model, promises_equality, read_converted_config
from .source import FolderSource
from .weights import StoredTensor, read_headers


OUR_ARCHITECTURES: dict[str, Architecture] = {
    ours.__name__: Architecture("depthroute", ours, ours, output, head)
    for ours, output, head in (
        (DepthRouteForCausalLM, "logits", "lm_head"),
        (DepthRouteModel, "last_hidden_state", None),
        (DepthRouteForSequenceClassification, "logits", "score"),
    )
}
"""By the class's name."""


def restarted_config(label: str, start: DepthRouteConfig, request: Request) -> DepthRouteConfig:
    """The configuration of an output with new routing that starts at the standard function, which is `start`'s.

    Raises:
        Refused: what was asked for starts at another function.
    """
    preset = request.preset or start.preset_name
    own = {name: getattr(start, name) for name in family_fields()} if preset == start.preset_name else {}
    options = {**own, **({} if preset == "standard" else {"depth_anchored": True}), **request.options()}
    if preset == start.preset_name:
        config = built(label, lambda: DepthRouteConfig(**{**backbone_fields(start), **options}))
    else:
        config = built(label, lambda: DepthRouteConfig.from_preset(preset, base=start, **options))
    if RESIDUALS[config.residual_type].starts_exactly and not promises_equality(config):
        none: dict[str, tuple[int, ...]] = {}
        scaled = config.residual_type in ("rezero", "layerscale")
        reason = "its branches start switched off" if scaled else why_anchoring_matters(config, _no_tensor, none)
        if reason is not None:
            raise Refused(
                f"depth_anchored: got False, but {label} computes the standard function, and {preset} would not: {reason}; "
                "allowed: anchored"
            )
    return config


def _no_tensor(key: str) -> Tensor:
    raise KeyError(key)


class OwnSource(RoutedSource):
    """A folder of our own family. The configuration of what is stored is that of the function that it computes: its own, or the
    standard residual's where that is the same; then its tensors are without those of the routing, which starts anew.

    Attributes:
        routing: its own configuration.
        carries_routing: whether the routing comes along.
    """

    def __init__(self, folder: FolderSource, routing: DepthRouteConfig, carries_routing: bool):
        super().__init__(folder, routing)
        self.carries_routing = carries_routing

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.folder.shapes()

    def dtypes(self) -> dict[str, torch.dtype]:
        return self.folder.dtypes()

    def read(self, key: str) -> Tensor:
        return self.folder.read(key)

    def is_verbatim(self, key: str) -> bool:
        return self.folder.is_verbatim(key)

    def files(self) -> dict[str, Path]:
        return self.folder.files()

    def target_config(self, request: Request) -> DepthRouteConfig:
        if self.carries_routing:
            return super().target_config(request)
        return restarted_config(self.label, self.routing, request)

    def allowed_gap(self, config: DepthRouteConfig) -> float:
        if self.carries_routing:
            if config.depth_anchored != self.routing.depth_anchored:
                return EXPORT_GAP
            return 0.0 if config.depth_backend == self.routing.depth_backend else ROUNDING_GAP
        return 0.0 if promises_equality(config) else EXPORT_GAP


def is_own(folder: Path) -> bool:
    """Whether a folder's `config.json` says that it is of our family."""
    try:
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(entries, dict) and entries.get("model_type") == "depthroute"


def open_own(folder: Path, label: str, hub_id: str | None) -> OwnSource:
    """A folder that `convert` wrote, or that was trained from scratch.

    Raises:
        Refused: no configuration of ours, a class that cannot be converted, or weights that cannot be read.
    """
    config = read_converted_config(folder)
    architecture = our_architecture(folder, config)
    stored = read_headers(folder)
    moved = moved_routing(folder, config, architecture, stored)
    exact = promises_equality(config) and not moved
    routing = set(meta_model(config, architecture.ours).routing_parameters())
    kept = {key: item for key, item in stored.items() if not (exact and key in routing)}
    decisions = () if exact else (f"its routing comes along: {config.preset_name}",)
    computed = DepthRouteConfig.from_preset("standard", base=config) if exact else config
    found = FolderSource(folder, label, computed, architecture, kept, hub_id, decisions)
    return OwnSource(found, config, carries_routing=not exact)


def our_architecture(folder: Path, config: DepthRouteConfig) -> Architecture:
    """The class of a folder of ours.

    Raises:
        Refused: one that no conversion writes.
    """
    given = list(config.architectures or ["DepthRouteForCausalLM"])
    if len(given) != 1 or given[0] not in OUR_ARCHITECTURES:
        raise Refused(
            f"{folder / 'config.json'}: architectures: got {given}, allowed: one of {', '.join(OUR_ARCHITECTURES)}"
        )
    return OUR_ARCHITECTURES[given[0]]


def moved_routing(
    folder: Path, config: DepthRouteConfig, architecture: Architecture, stored: Mapping[str, StoredTensor]
) -> list[str]:
    """The routing parameters of a folder that are not at their initial values, in the stored type.

    Raises:
        Refused: one is missing.
    """
    source = FolderSource(folder, folder.name, config, architecture, stored)
    shapes = {
        key: tuple(value.shape) for key, value in meta_model(config, architecture.ours).routing_parameters().items()
    }
    for key, shape in shapes.items():
        if key not in stored or tuple(stored[key].shape) != shape:
            raise Refused(f"{folder}: {key}: missing, or of another shape; allowed: every parameter of its routing")
    # rounded like the parameter itself
    types = {stored[key].dtype for key in shapes}
    initial = {dtype: initial_routing(meta_model(config, architecture.ours), dtype) for dtype in types}
    return [key for key in shapes if not torch.equal(source.read(key), initial[stored[key].dtype][key])]
