# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A whole model with the backend that is measured, beside the same model with the reference.

`parity` looks at reads one by one; here the loop prepares them together, gradients go through all of them, and cached tokens
take the short path that decoding has.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from depthroute import DepthRouteForCausalLM
from depthroute.errors import CheckFailed
from depthroute.modeling.compat import CACHE_NAME


EXACT = 1e-6
"""Largest difference in float64, as a fraction of the largest entry: orders of sums, where Qwen3's norms and loss round to float32
(6e-8) what differs in the last bit, through some tens of sublayers."""

GAP = {torch.float64: EXACT, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""The same in the measured dtype: rounding errors of single reads, which `parity` limits, through some tens of sublayers; a
gross error in one dtype alone is seen here, all others in float64."""


@contextmanager
def with_backend(model: DepthRouteForCausalLM, name: Any) -> Iterator[None]:
    """The same model with another `depth_backend`, which is asked for in every read."""
    before = model.config.depth_backend
    model.config.depth_backend = name
    try:
        yield
    finally:
        model.config.depth_backend = before


def evaluate(model: DepthRouteForCausalLM, token_ids: Tensor) -> dict[str, Tensor]:
    """Logits of a training forward, gradients of the routing, of the embedding and of every layer's last matrix, logits
    without gradients, and logits of the last token [B, 1, V] behind the others in a cache."""
    routing = model.routing_parameters()
    others = {name: parameter for name, parameter in model.named_parameters() if name.endswith(("down_proj.weight", "embed_tokens.weight"))}  # fmt: skip
    watched = {**routing, **others}
    output = model(input_ids=token_ids, labels=token_ids, use_cache=False)
    gradients = torch.autograd.grad(output.loss, list(watched.values()), allow_unused=True, materialize_grads=True)
    found = {f"gradient of {name}": gradient for name, gradient in zip(watched, gradients)}
    found["logits"] = output.logits.detach()
    with torch.no_grad():
        found["logits without gradients"] = model(input_ids=token_ids, use_cache=False).logits
        if token_ids.shape[1] > 1:
            cache: dict[str, Any] = {CACHE_NAME: DynamicCache(config=model.config)}
            model(input_ids=token_ids[:, :-1], use_cache=True, **cache)
            found["decoded logits"] = model(input_ids=token_ids[:, -1:], use_cache=True, **cache).logits
    return found


def check_backend(model: DepthRouteForCausalLM, token_ids: Tensor, name: str) -> float:
    """Compare the model's backend with the reference, in float64 and in the model's own dtype.

    Args:
        model: with the backend that is measured.
        token_ids: [B, T].
        name: of the system, for the line of an error.

    Returns:
        The largest difference in float64, as a fraction of the largest entry of what differs.

    Raises:
        CheckFailed: a difference above `EXACT`, or in the model's own dtype above `GAP`.
    """
    wide = model if model.dtype == torch.float64 else copy.deepcopy(model).double()
    with with_backend(wide, "reference"):
        truth = evaluate(wide, token_ids)
    worst = compare(evaluate(wide, token_ids), truth, EXACT, f"{name}: in float64")
    if wide is not model:
        compare(
            evaluate(model, token_ids), truth, GAP[model.dtype], f"{name}: in {str(model.dtype).removeprefix('torch.')}"
        )
    return worst


def compare(found: dict[str, Tensor], truth: dict[str, Tensor], allowed: float, where: str) -> float:
    """The largest difference, as a fraction of the largest entry.

    Raises:
        CheckFailed: it is above `allowed`; the line begins with `where`.
    """
    worst = 0.0
    # a gradient that is zero but for rounding is measured by the others of its kind
    scale = max(truth[key].abs().max().item() for key in truth if key.startswith("gradient"))
    for key, exact in truth.items():
        largest = exact.abs().max().item()
        if key.startswith("gradient"):
            largest = max(largest, 1e-3 * scale)
        difference = (found[key].double() - exact).abs().max().item() / largest
        if not difference <= allowed:
            raise CheckFailed(f"{where} {key} differ by {difference:.3g} from the reference, allowed: {allowed:.3g}")
        worst = max(worst, difference)
    return worst
