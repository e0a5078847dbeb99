# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`convert`: a stock checkpoint in, a DepthRoute checkpoint out, verified before it appears."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute import PRESETS, DepthRouteConfig, DepthRouteModel, DepthRoutePreTrainedModel
from depthroute.errors import CheckFailed, Refused, one_line
from depthroute.modeling.configuration_depthroute import nearest_names
from depthroute.modeling.depth_schedule import live_reads, read_count, read_name

from .card import write_card
from .folder import check_apart, check_output, whole_folder
from .keys import KeyPlan, plan_keys
from .progress import Step, announce, steps
from .reports import ConversionReport, read_fields
from .routed import Request, RoutedSource
from .source import Source, open_source
from .verification import VERIFY_STEPS, compare, initial_routing, meta_model
from .way_back import leave_way_back, note_origin


DEFAULT_PRESET = "delta-block"

OUTPUT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert(
    source: str | Path,
    out: str | Path,
    preset: str | None = None,
    block_size: int | None = None,
    anchored: bool | None = None,
    num_heads: int | None = None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    fields: Mapping[str, Any] | None = None,
    verify: bool = True,
    progress: bool = False,
) -> ConversionReport:
    """Convert a Qwen3, Qwen3-MoE or Llama checkpoint to depth routing.

    Every tensor of the source is written as it is, bit for bit (cast only where `dtype` asks for it), experts in the
    source's own layout, and the parameters of the routing are added at their initial values. Tokenizer, chat template, generation configuration and licence are
    kept; the code to load the folder with `trust_remote_code=True` and a model card are added.

    Args:
        source: a local folder with safetensors weights, a hub id, or a `.gguf` file.
        out: the output folder. It appears whole or not at all.
        preset: one of `depthroute.PRESETS`; default: "delta-block", or the one that a source with routing has.
        block_size: layers per block, for presets with blocks; default ceil(L/8).
        anchored: start exactly at the source's function, the default; False: the papers' plain form; a source with routing
            keeps its own form unless told. `mhc` starts near it either way, by
            the eps that its published form adds to its gates, and its report says how near.
        num_heads: depth heads H.
        dtype: "float32", "bfloat16" or "float16"; default: the checkpoint's own.
        overwrite: replace an existing model folder, once the new one is complete.
        fields: further fields of `DepthRouteConfig`.
        verify: compare the written folder with the source before it appears.
        progress: show a progress bar on standard error.

    Raises:
        Refused: anything about the input; nothing is written.
        CheckFailed: equality was promised (`VerificationReport.equality_promised`) and does not hold, or the negative control has no effect;
            nothing is written.
    """
    if preset is not None and preset not in PRESETS:  # at once: opening a source may take minutes
        raise Refused(f"preset: got {preset!r}, nearest: {nearest_names(preset, PRESETS)}")
    settings = dict(fields or {})
    out_dtype = _output_dtype(dtype, settings)
    requested = {
        "preset": preset,
        "dtype": None if out_dtype is None else str(out_dtype).removeprefix("torch."),
        "block_size": block_size,
        "anchored": anchored,
        "num_heads": num_heads,
        "fields": settings,
    }
    target = check_output(out, overwrite)
    announce(f"opening {source}", progress)
    opened = open_source(source)
    check_apart(opened.path, target)
    if isinstance(opened, RoutedSource):
        config = opened.target_config(Request(preset, block_size, anchored, num_heads, settings))
    else:
        requested = {**requested, "preset": preset or DEFAULT_PRESET}
        config = build_config(
            opened, preset or DEFAULT_PRESET, block_size, anchored is not False, num_heads or 1, settings
        )
    config.dtype = out_dtype or opened.dtype()
    model = meta_model(config, opened.architecture.ours)
    plan = plan_keys(
        opened.label,
        opened.shapes(),
        {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()},
        [] if isinstance(opened, RoutedSource) and opened.carries_routing else model.routing_parameters(),
        opened.rules,
        bool(config.tie_word_embeddings),
    )
    with steps(5 + (VERIFY_STEPS if verify else 0), progress) as step, whole_folder(target) as folder:
        report = _write(opened, folder, config, model, plan, out_dtype, step)
        report = replace(report, out=str(target), requested=requested)
        del model
        if verify:
            verification = replace(compare(opened, folder, step), converted=target.name)
            _check(report, verification)
            report = replace(report, verification=verification)
        step("writing the model card")
        write_card(folder, opened, config, report)
    return report


def _check(report: ConversionReport, verification: Any) -> None:
    try:
        verification.check(allow_gap=True)
    except CheckFailed as error:
        raise CheckFailed(f"{error}; nothing was written to {report.out}") from error


def _output_dtype(dtype: str | torch.dtype | None, settings: dict[str, Any]) -> torch.dtype | None:
    if "dtype" in settings:
        if dtype is not None:
            raise Refused(f"dtype: got {dtype} and the field {settings['dtype']!r}, allowed: one of the two")
        dtype = settings.pop("dtype")
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in OUTPUT_DTYPES:
        raise Refused(f"dtype: got {name!r}, allowed: {', '.join(OUTPUT_DTYPES)}")
    return OUTPUT_DTYPES[name]


def build_config(
    source: Source, preset: str, block_size: int | None, anchored: bool, num_heads: int, fields: Mapping[str, Any]
) -> DepthRouteConfig:
    """The output's configuration: the source's sizes, the preset, the options, and any field over them.

    Raises:
        Refused: an unknown preset or field (with the nearest names), a value out of range, an option that means nothing for
            the preset, or one that is given as a field as well.
    """
    options: dict[str, Any] = {}
    if block_size is not None:
        options["depth_block_size"] = block_size
    if num_heads != 1:
        options["depth_num_heads"] = num_heads
    if not anchored:
        options["depth_anchored"] = False
    if twice := sorted(set(options) & set(fields)):
        raise Refused(
            f"{twice[0]}: got {options[twice[0]]} as an option and {fields[twice[0]]!r} as a field, allowed: one of them"
        )
    if preset != "standard":
        options.setdefault("depth_anchored", True)
    try:
        return DepthRouteConfig.from_preset(preset, base=source.config, **{**options, **fields})
    except (ValueError, TypeError) as error:
        raise Refused(one_line(error)) from error


def _write(
    source: Source,
    folder: Path,
    config: DepthRouteConfig,
    model: DepthRoutePreTrainedModel,
    plan: KeyPlan,
    cast_to: torch.dtype | None,
    step: Step,
) -> ConversionReport:
    dtype = config.dtype
    step("reading the weights")
    tensors = read_planned(source, plan, cast_to)
    initial = initial_routing(model, dtype)
    added = {key: initial[key] for key in plan.added}
    step("writing the weights")
    # as they are: the model itself stays without memory, and experts keep their layout
    model.save_pretrained(folder, state_dict={**tensors, **added}, save_original_format=False)
    # saving notes the model's type, which was built in the default one
    config.dtype = dtype
    note_origin(config, source)
    config.save_pretrained(folder)
    step("noting the way back")
    leave_way_back(folder, source, plan, cast_to)
    step("keeping the tokenizer")
    side_files = source.copy_side_files(folder)
    reads = [read_name(config, s) for s in range(read_count(config))]
    live = {read_name(config, s) for s in live_reads(config)}
    prefix = "" if isinstance(model, DepthRouteModel) else "model."
    return ConversionReport(
        source=source.label,
        out=str(folder),
        preset=config.preset_name,
        settings={key: getattr(config, key) for key in read_fields(config)},
        dtype=str(dtype).removeprefix("torch."),
        copied_tensors=len(tensors),
        copied_parameters=sum(tensor.numel() for tensor in tensors.values()),
        added_tensors=len(added),
        added_parameters=sum(tensor.numel() for tensor in added.values()),
        live_reads=len(live),
        inert_reads=[f"{prefix}{name}" for name in reads if name not in live],
        kept_files=side_files.kept,
        left_files=side_files.left,
        warnings=side_files.warnings,
    )


def read_planned(source: Source, plan: KeyPlan, cast_to: torch.dtype | None) -> dict[str, Tensor]:
    """The source's tensors by our keys, cast to `cast_to` where it is given.

    Raises:
        Refused: a tied head whose tensor is another than the embedding, or a value that overflows in `cast_to`.
    """
    ours = {theirs: key for key, theirs in plan.copied.items()}
    shared = {source.rules.to_source(key): to for key, to in plan.shared.items()}
    tensors, heads = {}, {}
    for key, tensor in source.tensors():
        if key in ours:
            tensors[ours[key]] = _cast(key, tensor, cast_to)
        elif key in shared:
            heads[key] = _cast(key, tensor, cast_to)
    for key, head in heads.items():
        if not torch.equal(head, tensors[shared[key]]):
            raise Refused(
                f"tie_word_embeddings: got True, but {key} is not {shared[key]} in {source.label}; "
                "allowed: equal tensors, or --set tie_word_embeddings=false"
            )
    return tensors


def _cast(key: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if not torch.isfinite(cast).all() and torch.isfinite(tensor).all():
        largest = tensor.abs().max().item()
        raise Refused(
            f"dtype: got {dtype}, in which {key} overflows (largest value {largest:.4g}); allowed: a wider type"
        )
    return cast
