# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""DepthRoute: depth-routing residuals (AttnRes, Delta AttnRes, RD-AttnRes, WAV, DAR) and the papers' baselines for Qwen3-style
decoders, dense and sparse, in Hugging Face Transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .modeling.configuration_depthroute import PRESETS, DepthRouteConfig
from .modeling.modeling_depthroute import (
    DepthRouteForCausalLM,
    DepthRouteForQuestionAnswering,
    DepthRouteForSequenceClassification,
    DepthRouteForTokenClassification,
    DepthRouteModel,
    DepthRoutePreTrainedModel,
)
from .modeling.residual_base import RoutingWeights
from .modeling.residual_baselines import HyperRead
from .modeling.residual_depth_attention import DepthRead
from .modeling.residual_dual_stream import DualRead


if TYPE_CHECKING:
    from depthroute_conversion import convert, push, refresh_card, revert, verify

    from .diagnostics.inspect import inspect

__version__ = "0.1.0"

AutoConfig.register("depthroute", DepthRouteConfig)
AutoModel.register(DepthRouteConfig, DepthRouteModel)
AutoModelForCausalLM.register(DepthRouteConfig, DepthRouteForCausalLM)
AutoModelForSequenceClassification.register(DepthRouteConfig, DepthRouteForSequenceClassification)
AutoModelForTokenClassification.register(DepthRouteConfig, DepthRouteForTokenClassification)
AutoModelForQuestionAnswering.register(DepthRouteConfig, DepthRouteForQuestionAnswering)

_LAZY = {
    "convert": "depthroute_conversion",
    "inspect": "depthroute.diagnostics.inspect",
    "push": "depthroute_conversion",
    "refresh_card": "depthroute_conversion",
    "revert": "depthroute_conversion",
    "verify": "depthroute_conversion",
}
"""Public names whose modules are imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "PRESETS",
    "DepthRead",
    "DepthRouteConfig",
    "DepthRouteForCausalLM",
    "DepthRouteForQuestionAnswering",
    "DepthRouteForSequenceClassification",
    "DepthRouteForTokenClassification",
    "DepthRouteModel",
    "DepthRoutePreTrainedModel",
    "DualRead",
    "HyperRead",
    "RoutingWeights",
    "convert",
    "inspect",
    "push",
    "refresh_card",
    "revert",
    "verify",
]
