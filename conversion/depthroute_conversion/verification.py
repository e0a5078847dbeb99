# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The proof that a conversion changed nothing, or by how much: same token ids through the source, in transformers' own
class, and through the folder that was written, loaded from disk."""

import gc
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel

from depthroute import DepthRouteConfig, DepthRouteModel, DepthRoutePreTrainedModel
from depthroute.errors import Refused, one_line
from depthroute.modeling.configuration_depthroute import read_backbone_config
from depthroute.modeling.modeling_depthroute import RESIDUALS
from depthroute.modeling.residual_standard import StandardResidual

from .architectures import Architecture
from .experts import apart
from .keys import KeyRules, plan_keys
from .progress import Step, announce, steps
from .reports import VerificationReport
from .source import Source, open_source
from .weights import StoredTensor, read_headers, read_tensors


PROBES = ((1, 1), (1, 7), (3, 16), (1, 64))
"""Shapes [B, T] of the token ids. Where the source or the conversion has a sliding window that is shorter than the context, one
more sequence is `BEYOND_WINDOW` longer than the longest such window (cut at the context): what no shorter one could see."""

BEYOND_WINDOW = 8
COMPARED = 64
"""Last positions of a sequence whose logits are compared: all, but for a sequence beyond a window."""

SEED = 20260518
VERIFY_STEPS = 5
CONTROLS = ("gate_bias", "mlp_scale", "query")
"""What the negative control may change, by the last part of its name. No residual has two of them."""


def verify(source: str | Path, converted: str | Path, progress: bool = False) -> VerificationReport:
    """Compare a converted folder with its source on fixed token ids.

    The source is cast to the output's dtype first, and both sets of weights lie in memory alike (`align_weights`). One model
    is in memory at a time. Nothing is written. The report says what was found; `report.check()` raises where that is a failure.

    Args:
        source: a folder, a hub id or a .gguf file.
        converted: a folder that `convert` wrote, trained since or not.
        progress: show a progress bar on standard error.

    Raises:
        Refused: the source or the folder cannot be opened, or the folder is no conversion of that source: missing or
            unexpected keys, or other shapes.
    """
    folder = Path(converted).expanduser().resolve()
    _read_config(folder)  # at once: opening a source may take minutes
    announce(f"opening {source}", progress)
    opened = open_source(source)
    with steps(VERIFY_STEPS, progress) as step:
        return compare(opened, folder, step)


def compare(source: Source, folder: Path, step: Step) -> VerificationReport:
    """`verify` on an opened source; takes `VERIFY_STEPS` steps."""
    config = _read_config(folder)
    stored = read_headers(folder)
    architecture = source.architecture
    shapes, routing = model_shapes(config, architecture.ours)
    tied = bool(config.tie_word_embeddings)
    written = {key: item.shape for key, item in stored.items()}
    # every key, those of the routing too: loading would start missing ones afresh, which must not pass for a conversion
    plan_keys(str(folder), written, shapes, [], KeyRules(), tied)
    plan_keys(f"{source.label}, as the source of {folder.name}", source.shapes(), shapes, routing, source.rules, tied)
    step("comparing the weights")
    changed = _changed_tensors(source, {key: item for key, item in stored.items() if key not in routing})
    dtype = config.dtype or next(iter(stored.values())).dtype
    windows = [getattr(each, "sliding_window", None) for each in (source.config, config)]
    probes = probe_ids(config.vocab_size, config.max_position_embeddings, windows)

    step(f"computing logits of {source.label}")
    stock = align_weights(source.load_stock(dtype))
    expected = outputs(architecture, stock, probes)
    del stock
    gc.collect()

    step("loading the converted folder")
    model = architecture.ours.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    align_weights(model.eval())
    trained = moved_routing(model)
    step("computing its logits")
    got = outputs(architecture, model, probes)
    step("negative control")
    perturbed = perturb(model)
    control = outputs(architecture, model, probes)

    return VerificationReport(
        source=source.label,
        converted=folder.name,
        preset=config.preset_name,
        equality_promised=promises_equality(config),
        dtype=str(dtype).removeprefix("torch."),
        probes=[list(ids.shape) for ids in probes],
        max_abs_difference=max_difference(expected, got),
        logits_std=torch.cat([item.flatten() for item in expected]).double().std().item(),
        bitwise_equal=all(map(torch.equal, expected, got)),
        perturbed=perturbed,
        control_difference=max_difference(expected, control),
        control_differs=not all(map(torch.equal, got, control)),
        trained_routing=trained,
        changed=changed,
    )


def _read_config(folder: Path) -> DepthRouteConfig:
    try:
        config = read_backbone_config(folder) if folder.is_dir() else None
    except (ValueError, OSError, StrictDataclassError) as error:
        raise Refused(f"{folder}: {one_line(error)}") from error
    if not isinstance(config, DepthRouteConfig):
        got = "no folder" if config is None else f"model_type {config.model_type!r}"
        raise Refused(f"{folder}: got {got}, allowed: a folder that `depthroute convert` wrote")
    return config


def promises_equality(config: DepthRouteConfig) -> bool:
    """Whether a conversion computes at its start what its source computes, bit for bit: every anchored one whose residual
    can, and the standard residual."""
    residual = RESIDUALS[config.residual_type]
    return residual.starts_exactly and (config.depth_anchored or residual is StandardResidual)


def meta_model(config: DepthRouteConfig, ours: type[DepthRoutePreTrainedModel]) -> DepthRoutePreTrainedModel:
    """The model without memory for its parameters.

    Raises:
        Refused: a value of the configuration that only building finds out about: an activation or a rope type that there is
            none of, a number of heads that divides nothing.
    """
    try:
        with torch.device("meta"):
            return ours(config)
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        looked_at = ("hidden_act", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters")
        values = ", ".join(f"{name} = {getattr(config, name, None)}" for name in looked_at)
        raise Refused(
            f"configuration: no model can be built of it ({type(error).__name__}: {one_line(error)}), "
            f"got {values}; allowed: values that transformers knows"
        ) from error


def model_shapes(
    config: DepthRouteConfig, ours: type[DepthRoutePreTrainedModel]
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The shape of every tensor of the model by key, and the keys of its routing."""
    model = meta_model(config, ours)
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}, list(model.routing_parameters())


def initial_routing(model: DepthRoutePreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The routing parameters' initial values, by key, as `_init_weights` sets them. `model` is on the meta device, and only
    these are given memory."""
    owners = {}
    for key, parameter in model.routing_parameters().items():
        owner, _, name = key.rpartition(".")
        owners[owner] = model.get_submodule(owner)
        setattr(owners[owner], name, nn.Parameter(torch.empty_like(parameter, device="cpu", dtype=dtype)))
    for module in owners.values():
        model._init_weights(module)
    return {key: parameter.detach() for key, parameter in model.routing_parameters().items()}


def moved_routing(model: DepthRoutePreTrainedModel) -> list[str]:
    """The routing parameters that are not at the values of a freshly initialised model of the same configuration."""
    initial = initial_routing(meta_model(model.config, type(model)), model.dtype)
    return [key for key, value in model.routing_parameters().items() if not torch.equal(value, initial[key])]


def _changed_tensors(source: Source, stored: dict[str, StoredTensor]) -> list[str]:
    """Our keys whose stored tensor is not the source's, cast to its type. Experts are compared one by one, so that layouts
    may differ: a trained conversion is saved in transformers' own."""
    written = dict(apart(read_tensors(stored)))
    changed = []
    for key, tensor in apart(source.tensors()):
        ours = written.get(source.rules.to_ours(key))
        if ours is not None and not (ours.shape == tensor.shape and torch.equal(tensor.to(ours.dtype), ours)):
            changed.append(source.rules.to_ours(key))
    return changed


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
    largest = [(a.double() - b.double()).abs().max().item() for a, b in zip(expected, got, strict=True)]
    return math.nan if any(map(math.isnan, largest)) else max(largest)


@torch.no_grad()
def perturb(model: DepthRoutePreTrainedModel) -> str:
    """The negative control: add noise of unit variance to the last layer's `CONTROLS` (the final read's, where no layer has
    any), and return its name. Where there is no routing (`standard`), add 10 to one weight of the last layer's attention."""
    routing = model.routing_parameters()
    names = [key for leaf in CONTROLS for key in routing if key.rpartition(".")[2] == leaf]
    if not names:
        prefix = "" if isinstance(model, DepthRouteModel) else "model."
        name = f"{prefix}layers.{model.config.num_hidden_layers - 1}.self_attn.o_proj.weight"
        model.get_parameter(name)[0, 0] += 10
        return name
    # mHC's final gates only scale streams that are equal at the start, which the final norm undoes
    name = ([name for name in names if "final_read" not in name] or names)[-1]
    parameter = routing[name]
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(SEED))
    nn.Parameter.add_(parameter, noise.to(parameter.dtype))
    return name
