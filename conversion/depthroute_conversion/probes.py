# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The token ids that a conversion and its source are compared on, the comparison, and its negative control."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from depthroute import DepthRouteModel, DepthRoutePreTrainedModel

from .architectures import Architecture


PROBES = ((1, 1), (1, 7), (3, 16), (1, 64))
"""Shapes [B, T] of the token ids. Where the source or the conversion has a sliding window that is shorter than the context, one
more sequence is `BEYOND_WINDOW` longer than the longest such window (cut at the context): what no shorter one could see."""

BEYOND_WINDOW = 8
COMPARED = 64
"""Last positions of a sequence whose logits are compared: all, but for a sequence beyond a window."""

SEED = 20260518
CONTROLS = ("gate_bias", "mlp_scale", "query")
"""What the negative control may change, by the last part of its name. No residual has two of them."""


def probe_ids(vocab_size: int, longest: int, windows: Sequence[int | None] = ()) -> list[Tensor]:
    """The fixed token ids: int64 [B, T] for each of `PROBES`, and one sequence longer than the sliding windows that are below
    `longest`, the context; all below `vocab_size`, and no longer than `longest`."""
    generator = torch.Generator().manual_seed(SEED)
    binding = [window for window in windows if window is not None and window < longest]
    beyond = [(1, max(binding) + BEYOND_WINDOW)] if binding else []
    shapes = dict.fromkeys((rows, min(length, longest)) for rows, length in (*PROBES, *beyond))
    return [torch.randint(vocab_size, shape, generator=generator) for shape in shapes]


@torch.no_grad()
def align_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Move every weight out of the file that it is mapped from, into memory as torch allocates it; returns `model`.

    A matrix product of the same numbers may differ in its last bits where they lie at another offset from a 64-byte
    boundary, and offsets differ between two files. Only numbers are to be compared here.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def outputs(architecture: Architecture, model: PreTrainedModel, probes: list[Tensor]) -> list[Tensor]:
    """What must be equal, for each probe: `Architecture.evaluate` of the last `COMPARED` positions."""
    return [architecture.evaluate(model, ids, COMPARED) for ids in probes]


def max_difference(expected: list[Tensor], got: list[Tensor]) -> float:
    """max |Δ| over all probes, in float64; NaN if any logit is."""
    pairs = zip(expected, got, strict=True)
    largest = [(a - b).abs().max().item() for one, other in pairs for a, b in zip(_rows(one), _rows(other))]
    return math.nan if any(map(math.isnan, largest)) else max(largest)


def standard_deviation(tensors: list[Tensor]) -> float:
    """Of all elements together, in float64."""
    count = sum(tensor.numel() for tensor in tensors)
    mean = math.fsum(row.sum().item() for tensor in tensors for row in _rows(tensor)) / count
    squares = math.fsum((row - mean).square().sum().item() for tensor in tensors for row in _rows(tensor))
    return math.sqrt(squares / (count - 1))


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """Its rows in float64, one at a time: of a large vocabulary all together would take more memory than a layer."""
    return (row.double() for row in tensor.reshape(-1, tensor.shape[-1]))


def control(model: DepthRoutePreTrainedModel) -> tuple[str, Callable[[Tensor], Tensor]]:
    """The negative control: which parameter is changed, and to what. Noise of unit variance is added to the last layer's
    `CONTROLS` (the final read's, where no layer has any); where there is no routing (`standard`), 10 to one weight of the last
    layer's attention. `model` may be on the meta device."""
    names = [key for leaf in CONTROLS for key in model.routing_parameters() if key.rpartition(".")[2] == leaf]
    if not names:
        prefix = "" if isinstance(model, DepthRouteModel) else "model."
        return f"{prefix}layers.{model.config.num_hidden_layers - 1}.self_attn.o_proj.weight", _first_plus_10
    # mHC's final gates only scale streams that are equal at the start, which the final norm undoes
    return ([name for name in names if "final_read" not in name] or names)[-1], _with_noise


def _first_plus_10(weight: Tensor) -> Tensor:
    changed = weight.clone()
    changed[0, 0] += 10
    return changed


def _with_noise(parameter: Tensor) -> Tensor:
    return parameter + torch.randn(parameter.shape, generator=torch.Generator().manual_seed(SEED)).to(parameter.dtype)


@torch.no_grad()
def perturb(model: DepthRoutePreTrainedModel) -> str:
    """Apply the negative control to a model, and return the parameter's name."""
    name, change = control(model)
    parameter = model.get_parameter(name)
    nn.Parameter.copy_(parameter, change(parameter.detach()))
    return name
