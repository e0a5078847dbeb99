# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`convert`: a stock checkpoint in, a DepthRoute checkpoint out, verified before it appears."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute import PRESETS, DepthRouteConfig, DepthRouteModel, DepthRoutePreTrainedModel, __version__
from depthroute.errors import CheckFailed, Refused, one_line
from depthroute.modeling.configuration_depthroute import nearest_names
from depthroute.modeling.depth_schedule import live_reads, read_count, read_name

from .card import write_card
from .folder import check_apart
from .hashes import check_hashes, files_to_check, recorded_hashes, source_fingerprint
from .keys import KeyPlan, plan_keys
from .progress import Progress, announce, steps
from .reports import ConversionReport, read_fields
from .routed import Request, RoutedSource
from .routing import initial_value, meta_model
from .source import Source, open_source
from .unfinished import UnfinishedFolder, check_target, unfinished_folder
from .verification import VERIFY_STEPS, compare
from .way_back import leave_way_back, note_origin
from .weights import bytes_of, is_finite
from .writing import MAX_SHARD_SIZE, PlannedTensor, ShardPlan, cast_pieces, plan_shards, write_weights


DEFAULT_PRESET = "delta-block"

_OUT_OF_RANGE = (ValueError, TypeError, LookupError, AttributeError)

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
    max_shard_size: int | str = MAX_SHARD_SIZE,
    layerwise: bool | None = None,
    ignore_code: bool = False,
) -> ConversionReport:
    """Convert a Qwen3, Qwen3-MoE, Llama, Mistral or Qwen2 checkpoint to depth routing.

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
        max_shard_size: bytes of a weight file at most, or such as "5GB"; one file where everything fits.
        layerwise: verify with one layer in memory, or with the whole model; default: as `verification.fits` has it.
        ignore_code: convert a folder that comes with code of its own as the stock architecture that it names (`open_source`).

    Raises:
        Refused: anything about the input; nothing is left behind.
        Unfinished: the disk is full, or fails. Finished shards are kept beside `out`, and the same call goes on from there, as
            it does after a kill.
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
        "ignore_code": ignore_code,
    }
    target = check_target(out, overwrite)
    announce(f"opening {source}", progress)
    opened = open_source(source, ignore_code)
    check_apart(opened.path, target)
    if isinstance(opened, RoutedSource):
        config = opened.target_config(Request(preset, block_size, anchored, num_heads, settings))
    else:
        requested = {**requested, "preset": preset or DEFAULT_PRESET}
        config = build_config(
            opened, preset or DEFAULT_PRESET, block_size, anchored is not False, num_heads or 1, settings
        )
    config.dtype = out_dtype or opened.dtype()
    where = "configuration" if settings else _configuration_file(opened)
    model = meta_model(config, opened.architecture.ours, where)
    plan = plan_keys(
        opened.label,
        opened.shapes(),
        {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()},
        [] if isinstance(opened, RoutedSource) and opened.carries_routing else model.routing_parameters(),
        opened.rules,
        bool(config.tie_word_embeddings),
    )
    work = _plan(opened, config, model, plan, out_dtype, max_shard_size)
    recorded = recorded_hashes(files_to_check(opened.path))
    with steps(5 + (VERIFY_STEPS if verify else 0), progress) as step:
        step("checking recorded hashes", sum(file.stat().st_size for file in recorded))
        check_hashes(recorded, step)
        with unfinished_folder(target, work.request(), overwrite) as folder:
            report = replace(_write(work, folder, step), out=str(target), requested=requested)
            if verify:
                verification = replace(compare(opened, folder.files, step, layerwise), converted=target.name)
                _check(report, verification)
                report = replace(report, verification=verification)
            step("writing the model card")
            write_card(folder.files, opened, config, report, folder.hashes)
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
    except _OUT_OF_RANGE as error:
        _check_backbone(source)
        raise Refused(one_line(error)) from error


def _check_backbone(source: Source) -> None:
    """
    Raises:
        Refused: the source's own configuration is at fault, whatever is asked for; its file is named.
    """
    try:
        DepthRouteConfig.from_preset("standard", base=source.config)
    except _OUT_OF_RANGE as error:
        raise Refused(f"{_configuration_file(source)}: {one_line(error)}") from error


def _configuration_file(source: Source) -> Path:
    return source.path / "config.json" if source.path.is_dir() else source.path


@dataclass(frozen=True)
class _Work:
    """What a conversion is going to write."""

    source: Source
    config: DepthRouteConfig
    model: DepthRoutePreTrainedModel
    plan: KeyPlan
    shards: ShardPlan
    dtype: torch.dtype
    cast_to: torch.dtype | None

    def read(self, key: str) -> Tensor:
        """A tensor of the output by its key: the source's, not cast yet, or the initial value of the routing."""
        if key in self.plan.copied:
            return read_finite(self.source, self.plan.copied[key])
        return initial_value(self.model, key, self.shards.tensors[key].dtype)

    def request(self) -> dict[str, Any]:
        """What every written byte of the weights depends on, by topic."""
        files = {name: [(key, self.plan.copied.get(key)) for key in keys] for name, keys in self.shards.files.items()}
        types = {key: str(tensor.dtype) for key, tensor in self.shards.tensors.items()}
        return {
            "source": source_fingerprint(self.source.path),
            "configuration": self.config.to_dict(),
            "layout of shards": hashlib.sha256(json.dumps([files, types]).encode()).hexdigest(),
            "version of depthroute": __version__,
        }


def _plan(
    source: Source,
    config: DepthRouteConfig,
    model: DepthRoutePreTrainedModel,
    plan: KeyPlan,
    cast_to: torch.dtype | None,
    max_shard_size: int | str,
) -> _Work:
    shapes, dtypes = source.shapes(), source.dtypes()
    ours = {theirs: key for key, theirs in plan.copied.items()}
    # in the source's order, in which its files are read from front to back
    tensors = {ours[key]: PlannedTensor(shapes[key], cast_to or dtypes[key]) for key in shapes if key in ours}
    routing = model.routing_parameters()
    tensors |= {key: PlannedTensor(tuple(routing[key].shape), config.dtype) for key in plan.added}
    return _Work(source, config, model, plan, plan_shards(tensors, max_shard_size), config.dtype, cast_to)


def _write(work: _Work, folder: UnfinishedFolder, step: Progress) -> ConversionReport:
    source, config, plan, tensors = work.source, work.config, work.plan, work.shards.tensors
    check_tied(source, plan, work.cast_to)
    step("writing the weights", work.shards.total_size)
    write_weights(folder, work.shards, work.read, step)
    save_config_and_code(work.model, folder)
    # saving notes the model's type, which was built in the default one
    config.dtype = work.dtype
    note_origin(config, source)
    config.save_pretrained(folder.files)
    step("noting the way back")
    leave_way_back(folder.files, source, plan, work.cast_to)
    step("keeping the tokenizer")
    side_files = source.copy_side_files(folder.files)
    reads = [read_name(config, s) for s in range(read_count(config))]
    live = {read_name(config, s) for s in live_reads(config)}
    prefix = "" if isinstance(work.model, DepthRouteModel) else "model."
    return ConversionReport(
        source=source.label,
        out=str(folder.files),
        preset=config.preset_name,
        settings={key: getattr(config, key) for key in read_fields(config)},
        dtype=str(config.dtype).removeprefix("torch."),
        copied_tensors=len(plan.copied),
        copied_parameters=sum(math.prod(tensors[key].shape) for key in plan.copied),
        added_tensors=len(plan.added),
        added_parameters=sum(math.prod(tensors[key].shape) for key in plan.added),
        live_reads=len(live),
        inert_reads=[f"{prefix}{name}" for name in reads if name not in live],
        kept_files=side_files.kept,
        left_files=side_files.left,
        warnings=side_files.warnings,
        decisions=list(source.decisions),
    )


def save_config_and_code(model: DepthRoutePreTrainedModel, folder: UnfinishedFolder) -> None:
    """What transformers saves of a model besides its weights: configuration, code, generation configuration."""
    # elsewhere: it removes shards that it has not written
    beside = folder.root / "beside"
    model.save_pretrained(beside, state_dict={})
    for file in sorted(beside.iterdir()):
        file.replace(folder.files / file.name)
    beside.rmdir()


def check_tied(source: Source, plan: KeyPlan, cast_to: torch.dtype | None) -> None:
    """
    Raises:
        Refused: a tied head that the source spells out, with another tensor than the embedding.
    """
    for head, to in plan.shared.items():
        theirs = source.rules.to_source(head)
        # by their hashes: one of them is in memory at a time
        if _digest(source, theirs, cast_to) != _digest(source, plan.copied[to], cast_to):
            raise Refused(
                f"tie_word_embeddings: got True, but {theirs} is not {to} in {source.label}; "
                "allowed: equal tensors, or --set tie_word_embeddings=false"
            )


def _digest(source: Source, key: str, cast_to: torch.dtype | None) -> str:
    digest = hashlib.sha256()
    tensor = source.read(key)
    for piece in cast_pieces(key, tensor, cast_to or tensor.dtype):
        digest.update(bytes_of(piece))
    return digest.hexdigest()


def read_finite(source: Source, key: str) -> Tensor:
    """A tensor of the source.

    Raises:
        Refused: it holds NaN or infinities.
    """
    tensor = source.read(key)
    if not is_finite(tensor):
        raise Refused(
            f"{source.files().get(key, source.path)}: {key}: got values that are NaN or infinite, allowed: finite ones"
        )
    return tensor
