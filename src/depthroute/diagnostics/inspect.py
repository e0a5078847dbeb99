# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute inspect`: figures and numbers of a saved model's routing over a text."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..errors import Refused
from ..extras import require
from ..files import check_model, check_output_folder, whole_output, write_json
from ..modeling.configuration_depthroute import family_fields
from .metrics import ReadStatistics, read_statistics
from .record import record_routing, token_batches


HEATMAP, BY_DEPTH, NUMBERS = "routing_heatmap.png", "routing_depth.png", "routing.json"


def inspect(
    model: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    max_tokens: int = 4096,
    max_length: int | None = None,
    batch_size: int = 4,
    device: str | None = None,
    overwrite: bool = False,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda batches, count: batches,
) -> dict[str, Any]:
    """Run a model over a text and write what its depth reads attended to.

    Writes into `out`: `routing_heatmap.png` (mean weight, reads × sources), `routing_depth.png` (largest weight and
    entropy by depth) and `routing.json` (what is returned).

    Args:
        model: a DepthRoute folder or hub id.
        text: a UTF-8 file. It is tokenised as a whole; its first `max_tokens` tokens are used.
        max_length: tokens per window, each read by itself; default: 512, or all that the model allows where that is less.
        out: a folder; made if need be. Nothing is written unless all is.
        overwrite: replace these files in a folder that is not empty.
        progress: wraps the batches, given their number, for a progress bar.

    Returns:
        `model`, `text`, `preset`, `fields` (the routing fields of the configuration), `tokens` (how many were seen), and
        `reads`: in order of depth, each read's `name` and the entries of `ReadStatistics`.

    Raises:
        Refused: no model, one that routes nothing, no readable text, a number below 1, or an output folder in use.
    """
    for name, value in (("max_tokens", max_tokens), ("max_length", max_length), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise Refused(f"{name}: got {value}, allowed: a number ≥ 1")
    require("matplotlib", "plot")
    source = check_model(model)
    check_output_folder(out, overwrite)
    content = _read_text(Path(text))
    config = AutoConfig.from_pretrained(source)
    _check_routes(config, source)
    longest = config.max_position_embeddings
    if max_length is not None and max_length > longest:
        raise Refused(f"max_length: got {max_length}, allowed: at most max_position_embeddings = {longest}")

    token_ids = AutoTokenizer.from_pretrained(source)(content, verbose=False)["input_ids"][:max_tokens]
    if not token_ids:
        raise Refused(f"{text}: no tokens, allowed: a text file that is not empty")
    network = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    network.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    batches = list(token_batches(token_ids, max_length or min(512, longest), batch_size))
    with_last_logits = ({**batch, "logits_to_keep": 1} for batch in batches)
    routing = record_routing(network, progress(with_last_logits, len(batches)))
    reads = {name: read_statistics(weights) for name, weights in routing.items()}

    report = {
        "model": str(model),
        "text": str(text),
        "preset": config.preset_name,
        "fields": {name: getattr(config, name) for name in family_fields()},
        "tokens": len(token_ids),
        "reads": [{"name": name, **asdict(read)} for name, read in reads.items()],
    }
    with whole_output(out, overwrite) as folder:
        subtitle = f"{Path(source).resolve().name} ({config.preset_name}), {Path(text).name}, {len(token_ids)} tokens"
        _draw(folder, reads, subtitle)
        write_json(folder / NUMBERS, report)
    return report


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise Refused(f"{file}: {reason}, allowed: a readable UTF-8 text file") from error


def _check_routes(config: Any, source: str) -> None:
    if config.model_type != "depthroute":
        raise Refused(
            f"{source}: model_type: got {config.model_type!r}, allowed: depthroute (make one with `depthroute convert`)"
        )
    if config.residual_type == "standard":
        raise Refused(
            f"{source}: residual_type: got 'standard', allowed: depth_attention, a standard residual routes nothing"
        )


def _draw(folder: Path, reads: dict[str, ReadStatistics], subtitle: str) -> None:
    from .plots import routing_by_depth, routing_heatmap

    routing_heatmap(reads, subtitle).savefig(folder / HEATMAP)
    routing_by_depth(reads, subtitle).savefig(folder / BY_DEPTH)
