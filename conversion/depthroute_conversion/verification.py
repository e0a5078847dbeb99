# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The proof that a conversion changed nothing, or by how much: every tensor, and the same token ids through the source, in
transformers' own class, and through the folder that was written.

Where the whole model is more than one shard of the folder, or more than there is memory for, outputs are computed layer by
layer (`layerwise.py`), with the same result.
"""

import gc
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from depthroute import DepthRouteConfig, DepthRoutePreTrainedModel

from .architectures import Architecture
from .experts import apart, apart_shapes
from .keys import KeyRules, plan_keys
from .layerwise import empty_model, evaluate_layerwise, model_reader
from .memory import available_memory
from .probes import (
    COMPARED,
    align_weights,
    control,
    max_difference,
    outputs,
    perturb,
    probe_ids,
    standard_deviation,
)
from .progress import Progress, announce, steps
from .reports import VerificationReport
from .routed import RoutedSource
from .routing import (
    initial_routing,
    meta_model,
    moved_parameters,
    moved_routing,
    promises_equality,
    read_converted_config,
)
from .source import Source, open_source
from .weights import StoredTensor, pieces, read_headers, read_range, read_tensor


__all__ = [
    "VERIFY_STEPS",
    "align_weights",
    "compare",
    "initial_routing",
    "max_difference",
    "meta_model",
    "moved_routing",
    "outputs",
    "probe_ids",
    "promises_equality",
    "read_converted_config",
    "verify",
]

VERIFY_STEPS = 3
SPARE = 10**8
"""Bytes of a model that is small: it may be in memory twice."""


def verify(
    source: str | Path,
    converted: str | Path,
    progress: bool = False,
    layerwise: bool | None = None,
    ignore_code: bool = False,
) -> VerificationReport:
    """Compare a converted folder with its source, tensor by tensor and on fixed token ids.

    The source is cast to the output's dtype first. One model is in memory at a time, or one layer of it. Nothing is written. The
    report says what was found; `report.check()` raises where that is a failure.

    Args:
        source: a folder, a hub id or a .gguf file.
        converted: a folder that `convert` wrote, trained since or not.
        progress: show a progress bar on standard error.
        layerwise: compute outputs with one layer in memory, or with all of them; default: as `fits` has it. The result is the
            same.
        ignore_code: as `open_source` has it.

    Raises:
        Refused: the source or the folder cannot be opened, or the folder is no conversion of that source: missing or
            unexpected keys, or other shapes.
    """
    folder = Path(converted).expanduser().resolve()
    read_converted_config(folder)  # at once: opening a source may take minutes
    announce(f"opening {source}", progress)
    opened = open_source(source, ignore_code)
    with steps(VERIFY_STEPS, progress) as step:
        return compare(opened, folder, step, layerwise)


def compare(source: Source, folder: Path, step: Progress, layerwise: bool | None = None) -> VerificationReport:
    """`verify` on an opened source; takes `VERIFY_STEPS` steps."""
    config = read_converted_config(folder)
    stored = read_headers(folder)
    architecture = source.architecture
    empty = meta_model(config, architecture.ours, folder / "config.json")
    shapes = {key: tuple(tensor.shape) for key, tensor in empty.state_dict().items()}
    routing = list(empty.routing_parameters())
    tied = bool(config.tie_word_embeddings)
    written = {key: item.shape for key, item in stored.items()}
    # every key, those of the routing too: loading would start missing ones afresh, which must not pass for a conversion
    plan_keys(str(folder), written, shapes, [], KeyRules(), tied)
    carried = isinstance(source, RoutedSource) and source.carries_routing
    added = [] if carried else routing
    plan_keys(f"{source.label}, as the source of {folder.name}", source.shapes(), shapes, added, source.rules, tied)
    step("comparing the weights", sum(item.size for item in stored.values()))
    changed = changed_tensors(source, {key: item for key, item in stored.items() if key not in added}, step)
    dtype = written_dtype = config.dtype or next(iter(stored.values())).dtype
    allowed_gap = 0.0 if promises_equality(config) else math.inf
    if isinstance(source, RoutedSource):
        allowed_gap = source.allowed_gap(config)
        # a bound on rounding, which is that of float32
        dtype = torch.float32 if allowed_gap else dtype
    trained = moved_parameters(empty, added, lambda key: read_tensor(key, stored[key]).to(dtype), written_dtype)
    windows = [getattr(each, "sliding_window", None) for each in (source.config, config)]
    probes = probe_ids(config.vocab_size, config.max_position_embeddings, windows)

    if layerwise is None:
        layerwise = not fits(stored, dtype, set(source.dtypes().values()))
    of_converted = _layerwise_converted if layerwise else _whole_converted
    expected = source_outputs(source, dtype, probes, step, layerwise)
    got, controlled, perturbed = of_converted(_Written(folder, config, architecture, stored, dtype), probes, step)

    return VerificationReport(
        source=source.label,
        converted=folder.name,
        preset=config.preset_name,
        equality_promised=allowed_gap == 0,
        allowed_gap=allowed_gap,
        dtype=str(dtype).removeprefix("torch."),
        probes=[list(ids.shape) for ids in probes],
        max_abs_difference=max_difference(expected, got),
        logits_std=standard_deviation(expected),
        bitwise_equal=all(map(torch.equal, expected, got)),
        perturbed=perturbed,
        control_difference=max_difference(expected, controlled),
        control_differs=not all(map(torch.equal, got, controlled)),
        trained_routing=trained,
        changed=changed,
    )


def fits(stored: Mapping[str, StoredTensor], dtype: torch.dtype, read: Collection[torch.dtype] = ()) -> bool:
    """Whether a whole model is to be in memory at once: it is no more than the largest of the folder's files, which is what a
    conversion may use, and no more than half of the memory that there is. While transformers casts one, it takes up to twice
    its memory; a copy of `SPARE` bytes is not counted.

    Args:
        stored: the folder's tensors.
        dtype: what they are computed in.
        read: the types that the source's are read in.
    """
    files: dict[Path, int] = {}
    for item in stored.values():
        files[item.file] = files.get(item.file, 0) + item.size
    size = _size(stored, dtype)
    is_cast = any(other != dtype for other in (*read, *(item.dtype for item in stored.values())))
    needed = 2 * size if is_cast and size > SPARE else size
    return needed <= min(max(files.values()), available_memory() // 2)


def _size(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> int:
    return sum(item.numel for item in stored.values()) * dtype.itemsize


def clear_away(stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> None:
    """Free a model of these tensors that is no longer in use, and may hold itself in cycles, before the next one is loaded. A
    small one is not worth the time that looking for it takes."""
    if _size(stored, dtype) > SPARE:
        gc.collect()


def changed_tensors(source: Source, stored: Mapping[str, StoredTensor], progress: Progress) -> list[str]:
    """Our keys whose stored bytes are not the source's, cast to their type. Experts are compared one by one, so that layouts
    may differ: a trained conversion is saved in transformers' own. In memory are one tensor of the source and a piece of ours.
    """
    places = {}
    for key, item in stored.items():
        first = 0
        for name, shape in (apart_shapes(key, item.shape) or {key: item.shape}).items():
            places[name] = (key, shape, first)
            first += math.prod(shape)
    changed, rules = [], source.rules
    for key in source.shapes():
        if rules.is_derived(key):
            continue
        for name, tensor in apart([(key, source.read(key))]):
            ours = rules.to_ours(name)
            if ours in places:
                where, shape, first = places[ours]
                if shape != tuple(tensor.shape) or not _same_bytes(tensor, where, stored[where], first, progress):
                    changed.append(ours)
    return changed


def _same_bytes(tensor: Tensor, key: str, item: StoredTensor, first: int, progress: Progress) -> bool:
    for piece in pieces(tensor, item.dtype):
        ours = read_range(key, item, first, piece.numel())
        if not torch.equal(piece.view(torch.uint8), ours.view(torch.uint8)):
            return False
        first += piece.numel()
        progress.advance(piece.nbytes)
    return True


def source_outputs(
    source: Source, dtype: torch.dtype, probes: list[Tensor], step: Progress, layerwise: bool
) -> list[Tensor]:
    """What the source computes for each probe, in `dtype`, with one layer in memory or with all of them."""
    return (_layerwise_source if layerwise else _whole_source)(source, dtype, probes, step)


def _whole_source(source: Source, dtype: torch.dtype, probes: list[Tensor], step: Progress) -> list[Tensor]:
    step(f"computing outputs of {source.label}")
    stock = align_weights(source.load_stock(dtype))
    return outputs(source.architecture, stock, probes)


def _layerwise_source(source: Source, dtype: torch.dtype, probes: list[Tensor], step: Progress) -> list[Tensor]:
    shapes, rules = source.shapes(), source.rules
    size = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    step(f"computing outputs of {source.label}, layer by layer", size)
    model = empty_model(source.architecture.stock, source.config, dtype)
    keys = {rules.to_ours(key) for key in shapes if not rules.is_derived(key)}

    def read(key: str) -> Tensor:
        tensor = source.read(rules.to_source(key))
        step.advance(tensor.numel() * dtype.itemsize)
        return tensor

    tied = rules.tied if source.config.tie_word_embeddings else {}
    computing = source.computing(model, lambda key: read(key).to(dtype))
    computations = [partial(source.architecture.evaluate, computing, ids, COMPARED) for ids in probes]
    return evaluate_layerwise(model, model_reader(model, read, keys, tied), computations, resident=_routing(model))


def _routing(model: PreTrainedModel) -> list[str]:
    """What has to be in memory all the time: a group of layers may prepare its reads together."""
    return list(model.routing_parameters()) if isinstance(model, DepthRoutePreTrainedModel) else []


@dataclass(frozen=True)
class _Written:
    """A conversion as it was written, and the type to compute it in."""

    folder: Path
    config: DepthRouteConfig
    architecture: Architecture
    stored: Mapping[str, StoredTensor]
    dtype: torch.dtype


Outputs = tuple[list[Tensor], list[Tensor], str]
"""A conversion's outputs, those with one parameter changed, and its name."""


def _whole_converted(written: _Written, probes: list[Tensor], step: Progress) -> Outputs:
    clear_away(written.stored, written.dtype)
    step("computing outputs of the conversion")
    model = written.architecture.ours.from_pretrained(
        written.folder, dtype=written.dtype, attn_implementation="sdpa", local_files_only=True
    )
    align_weights(model.eval())
    got = outputs(written.architecture, model, probes)
    perturbed = perturb(model)
    return got, outputs(written.architecture, model, probes), perturbed


def _layerwise_converted(written: _Written, probes: list[Tensor], step: Progress) -> Outputs:
    dtype = written.dtype
    step("computing outputs of the conversion, layer by layer", _size(written.stored, dtype))
    model = empty_model(written.architecture.ours, written.config, dtype)

    def read(key: str) -> Tensor:
        tensor = read_tensor(key, written.stored[key])
        step.advance(tensor.numel() * dtype.itemsize)
        return tensor

    tied = KeyRules().tied if written.config.tie_word_embeddings else {}
    perturbed, change = control(model)
    computations = [partial(written.architecture.evaluate, model, ids, COMPARED) for ids in probes]
    found = evaluate_layerwise(
        model,
        model_reader(model, read, written.stored, tied),
        [*computations, *computations],
        resident=_routing(model),
        changes={len(probes) + index: {perturbed: change} for index in range(len(probes))},
    )
    return found[: len(probes)], found[len(probes) :], perturbed
