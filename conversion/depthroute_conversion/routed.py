# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Sources that have routing of their own: what may be made of them without another function."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute import DepthRouteConfig
from depthroute.errors import Refused, one_line
from depthroute.modeling.configuration_depthroute import HOSTING_FIELDS, backbone_fields, family_fields

from .keys import KeyRules
from .side_files import SideFiles
from .source import FolderSource, Source


EXPORT_GAP = 0.05
"""What separates an anchored read from the plain one, in standard deviations of the logits: a plain read is the anchored one
divided by its number of sources, and the eps under the root of the norm behind it weighs more against small activations. A
model of another function is off by about 1."""

ROUNDING_GAP = 1e-3
"""The same function computed in another order of additions, in float32, in the same unit."""

_NO_FUNCTION = {"depth_backend", "depth_anchored", *HOSTING_FIELDS}
"""Fields of the family that say nothing about what the routing computes, but for `depth_anchored`, which is looked at apart. Those
that host a backbone decide about its keys, which are compared."""


@dataclass(frozen=True)
class Request:
    """What was asked of `convert` about routing; None where nothing was."""

    preset: str | None = None
    block_size: int | None = None
    anchored: bool | None = None
    num_heads: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """As fields of the configuration.

        Raises:
            Refused: an option that is given as a field as well.
        """
        given = {
            "depth_block_size": self.block_size,
            "depth_num_heads": self.num_heads,
            "depth_anchored": self.anchored,
        }
        options = {key: value for key, value in given.items() if value is not None}
        if twice := sorted(set(options) & set(self.fields)):
            raise Refused(
                f"{twice[0]}: got {options[twice[0]]} as an option and {self.fields[twice[0]]!r} as a field, allowed: one of "
                "them"
            )
        return {**options, **self.fields}


class RoutedSource(Source):
    """A source with routing of its own: a view of a folder of our family, or of another's AttnRes checkpoint, under our names.

    Attributes:
        folder: what is stored.
        routing: the configuration that computes what the source does.
        carries_routing: whether the tensors of its reads are among its tensors, and copied like all others.
    """

    carries_routing: bool
    rules = KeyRules()

    def __init__(self, folder: FolderSource, routing: DepthRouteConfig):
        self.folder, self.routing = folder, routing
        self.path, self.label, self.hub_id = folder.path, folder.label, folder.hub_id
        self.config, self.architecture, self.decisions = folder.config, folder.architecture, folder.decisions

    def copy_side_files(self, out: Path) -> SideFiles:
        return self.folder.copy_side_files(out)

    def target_config(self, request: Request) -> DepthRouteConfig:
        """The output's configuration.

        Raises:
            Refused: what was asked for is another function than the source's, and why.
        """
        return carried_config(self.label, self.routing, request, self.read, self.shapes())

    @abstractmethod
    def allowed_gap(self, config: DepthRouteConfig) -> float:
        """How far the outputs of a conversion with this configuration may be from the source's, in standard deviations of them;
        0 is bit for bit."""


def why_anchoring_matters(
    config: DepthRouteConfig, read: Callable[[str], Tensor], keys: Mapping[str, Any]
) -> str | None:
    """Why the plain form of an anchored routing is another function; None where it is the same one up to the rms eps.

    Args:
        config: the routing.
        read: its tensors, by our keys.
        keys: those keys.
    """
    if config.residual_type == "dual_stream":
        if config.dual_routing == "fixed":
            return "dual_routing = 'fixed' mixes one stream only"
        if not config.dual_partial_source:
            return "without dual_partial_source the sources do not sum up to the stream"
        for key in keys:
            name = key.rpartition(".")[2]
            # gates of a write: c_0 and c_1 are the last two of four, β^0 + β^1 = 2 where they are opposite
            if name in ("gate_logits", "gate_proj") and keys[key][0] == 4:
                gates = read(key)
                if not torch.equal(gates[2], -gates[3]):
                    return (
                        f"{key}: write gates that no longer sum to 2, so that the streams do not sum up to the stream"
                    )
        return None
    if config.residual_type != "depth_attention":
        return None  # there it says how parameters start, and nothing else
    if config.depth_combine == "add":
        return "depth_combine = 'add': p − p⁰ in place of p adds something else"
    if config.depth_source == "state":
        return "depth_source = 'state': states do not sum up to the stream"
    if config.depth_detail_bases:
        return "depth_detail_bases: details do not sum up to the stream"
    for name in ("depth_value_projection", "depth_null_source"):
        if getattr(config, name):
            return f"{name}: the sources no longer sum up to the stream"
    return None


def carried_config(
    label: str,
    routing: DepthRouteConfig,
    request: Request,
    read: Callable[[str], Tensor],
    keys: Mapping[str, Any],
) -> DepthRouteConfig:
    """The configuration of an output that computes what `routing` does, with the same tensors.

    Raises:
        Refused: what was asked for is another function; the line says which field, or why anchoring matters here.
    """
    own = {name: getattr(routing, name) for name in family_fields()}
    preset = request.preset or routing.preset_name
    if preset == routing.preset_name:
        settings = {**backbone_fields(routing), **own, **request.options()}
        config = built(label, lambda: DepthRouteConfig(**settings))
    else:
        options = {"depth_anchored": routing.depth_anchored, **request.options()}
        config = built(label, lambda: DepthRouteConfig.from_preset(preset, base=routing, **options))
    differing = [
        f"{name} = {getattr(config, name)!r}, not {own[name]!r}"
        for name in own
        if name not in _NO_FUNCTION and getattr(config, name) != own[name]
    ]
    if differing:
        raise Refused(
            f"preset: got {preset}, but {label} has routing of its own that {config.preset_name} would not compute "
            f"({differing[0]}); allowed: {routing.preset_name} with its own fields"
        )
    if config.depth_anchored != routing.depth_anchored:
        reason = why_anchoring_matters(routing, read, keys)
        if reason is not None:
            raise Refused(
                f"depth_anchored: got {config.depth_anchored}, but {label} has {routing.depth_anchored}, and {reason}; "
                f"allowed: {routing.depth_anchored}"
            )
    return config


def built(label: str, build: Callable[[], DepthRouteConfig]) -> DepthRouteConfig:
    try:
        return build()
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Refused(f"{label}: {one_line(error)}") from error
