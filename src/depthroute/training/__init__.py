# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Training: Trainer, optimizer groups, data, and the routing of a model by itself."""

from .arguments import DepthRouteTrainingArguments, RunArguments, parse_arguments
from .health import RoutingHealthCallback
from .lora import check_adapter_config, check_adapters, lora_config
from .optimizer import default_routing_learning_rate, optimizer_groups
from .routing_state import freeze_base, load_routing, routing_module_names, routing_parameters, save_routing
from .trainer import DepthRouteTrainer


__all__ = [
    "DepthRouteTrainer",
    "DepthRouteTrainingArguments",
    "RoutingHealthCallback",
    "RunArguments",
    "check_adapter_config",
    "check_adapters",
    "default_routing_learning_rate",
    "freeze_base",
    "load_routing",
    "lora_config",
    "optimizer_groups",
    "parse_arguments",
    "routing_module_names",
    "routing_parameters",
    "save_routing",
]
