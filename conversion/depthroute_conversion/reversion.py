# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`revert`: the way back from a conversion to the stock model it was made of."""

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute import DepthRouteConfig, __version__
from depthroute.errors import Refused, one_line
from depthroute.modeling.configuration_depthroute import read_backbone_config

from .architectures import ARCHITECTURES, Architecture
from .folder import check_apart
from .hashes import source_fingerprint
from .keys import listed, plan_keys
from .probes import max_difference, probe_ids, standard_deviation
from .progress import Progress, steps
from .represet import moved_routing, our_architecture
from .routing import meta_model, promises_equality, read_converted_config
from .source import FolderSource
from .unfinished import UnfinishedFolder, check_target, unfinished_folder
from .verification import clear_away, fits, source_outputs
from .way_back import ENTRY, WAY_BACK, Origin, WayBack, read_way_back, sha256_of
from .weights import INDEX, read_headers
from .writing import METADATA, PlannedTensor, plan_shards, write_shard


_NO_FUNCTION = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "output_router_logits",
    "pad_token_id", "router_aux_loss_coef", "transformers_version", "use_cache",
}  # fmt: skip
"""Entries of a backbone's configuration that say nothing about what its weights compute."""


@dataclass(frozen=True)
class Loss:
    """What the outputs lose with the routing, on the fixed probe.

    Attributes:
        max_abs_difference: max |Δ| of the outputs.
        std: standard deviation of the converted model's.
        mean_kl: mean KL divergence of the stock model's next-token distribution from the converted model's, in nats per
            token; None where the output is not logits over a vocabulary.
    """

    max_abs_difference: float
    std: float
    mean_kl: float | None

    @property
    def relative_difference(self) -> float:
        """max |Δ| in standard deviations of the outputs."""
        return self.max_abs_difference / self.std if self.std else math.inf

    def __str__(self) -> str:
        kl = "" if self.mean_kl is None else f", mean KL {self.mean_kl:.4g} nats per token"
        return f"max |Δlogits| {self.max_abs_difference:.4g} ({self.relative_difference:.3g} of their std){kl}"


@dataclass(frozen=True)
class RevertReport:
    """What a way back wrote.

    Attributes:
        folder: the conversion's name.
        out: the output folder.
        source: what the conversion was made of.
        architecture: the class in transformers.
        tensors: how many were written.
        identical: whether every one has the key, type and bytes that the source had.
        differs: why not, or which tensors do not.
        left_out: keys of the source that are no weights, and were not kept.
        dropped_routing: routing parameters that were trained, and are gone.
        loss: what that costs; None where the routing computed the standard function exactly.
        kept_files: tokenizer, chat template, generation configuration, licence.
    """

    folder: str
    out: str
    source: str
    architecture: str
    tensors: int
    identical: bool
    differs: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    dropped_routing: list[str] = field(default_factory=list)
    loss: Loss | None = None
    kept_files: list[str] = field(default_factory=list)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value, for printing."""
        state = "byte for byte those of the source" if self.identical else "; ".join(self.differs)
        dropped = (
            [("dropped routing", f"{len(self.dropped_routing)} trained parameters")] if self.dropped_routing else []
        )
        return [
            ("source", self.source),
            ("architecture", self.architecture),
            ("tensors", f"{self.tensors}, {state}"),
            *([("left out (no weights)", listed(self.left_out))] if self.left_out else []),
            *dropped,
            *([("lost with the routing", str(self.loss))] if self.loss else []),
            ("kept files", ", ".join(self.kept_files) or "none"),
        ]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def revert(
    folder: str | Path,
    out: str | Path,
    drop_routing: bool = False,
    as_is: bool = False,
    overwrite: bool = False,
    progress: bool = False,
) -> RevertReport:
    """Write the stock model that a conversion was made of: its tensors byte for byte, under its keys and in its files, with its
    configuration; tokenizer, chat template, generation configuration and licence as the conversion has them.

    Args:
        folder: a folder that `convert` wrote, trained since or not.
        out: the output folder. It appears whole or not at all.
        drop_routing: accept that trained routing is gone; the report says what the outputs lose.
        as_is: accept tensors that are not the source's bytes, because they were trained, or were cast or dequantised by the
            conversion.
        overwrite: replace an existing model folder, once the new one is complete.
        progress: show a progress bar on standard error.

    Raises:
        Refused: no conversion of a stock model; trained routing without `drop_routing`; bytes that are not the source's without
            `as_is`, named. Nothing is written.
    """
    path = Path(folder).expanduser().resolve()
    config = read_converted_config(path)
    target = check_target(out, overwrite)
    check_apart(path, target)
    way_back = read_way_back(path)
    stock = _stock_architecture(path, way_back.origin)
    ours = our_architecture(path, config)
    stored = read_headers(path)
    moved = moved_routing(path, config, ours, stored)
    if moved and not drop_routing:
        raise Refused(
            f"{path}: trained routing: {len(moved)} parameters have moved: {listed(moved)}; allowed: --drop-routing, which says "
            "what is lost with it"
        )
    source = FolderSource(path, path.name, config, ours, stored)
    files = _plan(source, way_back, set(meta_model(config, ours.ours).routing_parameters()))
    size = sum(file.size for file in files)
    lossy = bool(moved) or not promises_equality(config)
    request = {
        "source": source_fingerprint(path),
        "options": [drop_routing, as_is],
        "version of depthroute": __version__,
    }
    with steps(3 + 2 * lossy, progress) as step:
        step("comparing with the hashes of the source", size)
        differs = way_back.differs or _changed(source, way_back, step)
        if differs and not as_is:
            raise Refused(
                f"{path}: not the source's bytes: {'; '.join(differs)}; allowed: --as-is, the weights as they are now"
            )
        entries = {"architectures": [way_back.origin.architecture], **way_back.origin.config}
        if differs:
            entries, changed = _present_config(source, stock, entries, files)
            differs = [*differs, *changed]
        with unfinished_folder(target, request, overwrite) as work:
            step("writing the weights", size)
            _write(work, source, way_back, files, step)
            text = json.dumps(entries, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            (work.files / "config.json").write_text(text, encoding="utf-8")
            step("keeping the tokenizer")
            kept = source.copy_side_files(work.files).kept
            loss = _measure(source, work.files, stock, step) if lossy else None
    return RevertReport(
        folder=path.name,
        out=str(target),
        source=way_back.origin.source,
        architecture=stock.name,
        tensors=sum(len(file.tensors) for file in files),
        identical=not differs,
        differs=differs,
        left_out=way_back.left_out,
        dropped_routing=moved,
        loss=loss,
        kept_files=kept,
    )


@dataclass(frozen=True)
class _PlannedFile:
    """A file to write: its header's metadata, and the source's keys with ours."""

    name: str
    metadata: dict[str, str] | None
    ours: dict[str, str]
    tensors: dict[str, PlannedTensor]

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors.values())


def _plan(source: FolderSource, way_back: WayBack, routing: Collection[str]) -> list[_PlannedFile]:
    """The files of the source, where they are known; or every tensor that is not the routing's under its own name.

    Raises:
        Refused: a tensor of the source is not in the folder, or another one is.
    """
    stored = {key: PlannedTensor(item.shape, item.dtype) for key, item in source.stored.items() if key not in routing}
    if way_back.differs:
        shards = plan_shards(stored)
        return [
            _PlannedFile(name, dict(METADATA), {key: key for key in keys}, {key: stored[key] for key in keys})
            for name, keys in shards.files.items()
        ]
    known = {tensor.ours for tensor in way_back.tensors.values()}
    if lacking := sorted(known - set(stored)):
        raise Refused(
            f"{source.path}: {len(lacking)} tensors of its source are missing: {listed(lacking)}; allowed: all"
        )
    if foreign := sorted(set(stored) - known):
        raise Refused(
            f"{source.path}: {len(foreign)} tensors are none of its source's, as {WAY_BACK} has them: {listed(foreign)}; "
            "allowed: those alone"
        )
    ours = {key: tensor.ours for key, tensor in way_back.tensors.items()}
    return [
        _PlannedFile(
            name, file.metadata, {key: ours[key] for key in file.keys}, {key: stored[ours[key]] for key in file.keys}
        )
        for name, file in way_back.files.items()
    ]


def _changed(source: FolderSource, way_back: WayBack, step: Progress) -> list[str]:
    """What is not the source's bytes any more, in one line at most."""
    changed = []
    for key, tensor in way_back.tensors.items():
        found = source.read(tensor.ours)
        step.advance(found.nbytes)
        if sha256_of(found) != tensor.sha256:
            changed.append(key)
    return [f"{len(changed)} tensors have changed since: {listed(changed)}"] if changed else []


def _write(
    work: UnfinishedFolder, source: FolderSource, way_back: WayBack, files: list[_PlannedFile], step: Progress
) -> None:
    for file in files:
        if not work.is_finished(file.name, step):

            def read(key: str, ours: dict[str, str] = file.ours) -> Tensor:
                return source.read(ours[key])

            work.note(file.name, write_shard(work.files / file.name, file.tensors, read, step, file.metadata))
    if way_back.index is not None or len(files) > 1:
        metadata = {"total_size": sum(file.size for file in files)} if way_back.index is None else way_back.index
        places = {key: file.name for file in files for key in file.tensors}
        text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True) + "\n"
        (work.files / INDEX).write_text(text, encoding="utf-8")


def _stock_architecture(folder: Path, origin: Origin) -> Architecture:
    if origin.architecture not in ARCHITECTURES:
        raise Refused(
            f"{folder}: architecture: its record has {origin.architecture!r}, allowed: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[origin.architecture]


def _present_config(
    source: FolderSource, stock: Architecture, entries: dict[str, Any], files: list[_PlannedFile]
) -> tuple[dict[str, Any], list[str]]:
    """The stock configuration of weights that are no longer the source's, and what in it is no longer the source's either: a
    vocabulary that has grown, other positions.

    Raises:
        Refused: the stock class has no place for what the model is now.
    """
    where = source.path / "config.json"
    # what held for bytes that are gone
    entries = {key: value for key, value in entries.items() if key not in ("quantization_config", "torch_dtype")}
    entries["dtype"] = str(source.dtype()).removeprefix("torch.")
    now = _backbone(source.config, where)
    then = _backbone(stock.stock.config_class.from_dict(entries), where)
    changed = [name for name in now if name not in _NO_FUNCTION and now[name] != then.get(name)]
    entries |= {name: now[name] for name in changed}
    if "rope_parameters" in changed:  # the old spelling of the same
        entries = {key: value for key, value in entries.items() if key not in ("rope_scaling", "rope_theta")}
    config = stock.stock.config_class.from_dict(entries)
    then = _backbone(config, where)
    if lost := [name for name in changed if now[name] != then.get(name)]:
        raise Refused(
            f"{where}: {lost[0]}: got {now[lost[0]]!r}, which {stock.name} has no place for; allowed: {then.get(lost[0])!r}"
        )
    with torch.device("meta"):
        expected = {key: tuple(tensor.shape) for key, tensor in stock.stock(config).state_dict().items()}
    shapes = {key: tensor.shape for file in files for key, tensor in file.tensors.items()}
    plan_keys(str(source.path), shapes, expected, [], stock.rules(shapes), bool(config.tie_word_embeddings))
    return entries, [f"configuration: {name} = {now[name]!r}" for name in changed]


def _backbone(config: Any, where: Path) -> dict[str, Any]:
    """Everything about a backbone, in the same words whichever it is."""
    try:
        values: dict[str, Any] = DepthRouteConfig.from_preset("standard", base=config).to_dict()
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise Refused(f"{where}: {one_line(error)}") from error
    return {name: value for name, value in values.items() if name != ENTRY}


@torch.no_grad()
def _measure(converted: FolderSource, work: Path, stock: Architecture, step: Progress) -> Loss:
    """The outputs of the conversion and of what was written, both in float32, one model in memory at a time, or one layer."""
    config = converted.config
    written = FolderSource(work, "the stock model", read_backbone_config(work), stock, read_headers(work))
    probes = probe_ids(config.vocab_size, config.max_position_embeddings, [config.sliding_window])
    layerwise = not fits(converted.stored, torch.float32)
    before = source_outputs(converted, torch.float32, probes, step, layerwise)
    clear_away(converted.stored, torch.float32)
    after = source_outputs(written, torch.float32, probes, step, layerwise)
    kl = None
    if stock.has_language_head:
        rows = [(a.double().log_softmax(-1), b.double().log_softmax(-1)) for a, b in zip(before, after, strict=True)]
        kl = torch.cat([(a.exp() * (a - b)).sum(-1).flatten() for a, b in rows]).mean().item()
    return Loss(max_difference(before, after), standard_deviation(before), kl)
