# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`depthroute inspect`: figures, numbers and a report of one saved model, or of two side by side, over a text."""

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ..device import check_device
from ..errors import Refused
from ..extras import require
from ..files import check_model, check_output_folder, whole_output, write_json
from ..modeling.configuration_depthroute import family_fields
from .diagnose import Diagnosis, diagnose
from .record import token_batches, token_pairs
from .rescue import stream_count


if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS, COMPARED_NUMBERS, PAGE, OVERLAY = "routing.json", "comparison.json", "report.html", "comparison.png"

Progress = Callable[[Iterable[Any], int], Iterable[Any]]


def _no_progress(batches: Iterable[Any], count: int) -> Iterable[Any]:
    return batches


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
    progress: Progress = _no_progress,
) -> dict[str, Any]:
    """Run a model over a text and write what its depth did with it.

    Writes into `out`: `report.html`, one page with everything, which needs no network; `routing.json` (what is returned);
    and the page's figures as PNG files, those of them that have a meaning for the model: `routing_heatmap`,
    `routing_depth`, `source_usage`, `source_similarity`, `route_divergence`, `stream_cka`, `rescue_gain`, `norm_growth`.
    Every model has the last one; a standard residual has no other.

    Args:
        model: a DepthRoute folder or hub id.
        text: a UTF-8 file. It is tokenised as a whole; its first `max_tokens` tokens are used.
        out: a folder; made if need be. Nothing is written unless all is.
        max_length: tokens per window, each read by itself; default: 512, or all that the model allows where that is less.
            For the rescue gain of several streams each window is paired with the next one.
        overwrite: replace these files in a folder that is not empty.
        progress: wraps the batches, given their number, for a progress bar.

    Returns:
        `model`, `text`, `preset`, `fields` (the routing fields of the configuration), `tokens` (how many were seen), and the
        entries of `Diagnosis.to_dict`: among them `reads`, `summary`, and `absent`, the parts that have no meaning for this
        model, with the reason.

    Raises:
        Refused: no DepthRoute model, no readable text, a number below 1, or an output folder in use.
    """
    settings = _Settings(max_tokens, max_length, batch_size, device, progress)
    content = settings.check([model], text, out, overwrite)
    found = _run(model, text, content, settings)
    from .plots import draw
    from .report import report_page

    with whole_output(out, overwrite) as folder:
        pictures = _save(folder, draw(found.diagnosis, found.subtitle))
        write_json(folder / NUMBERS, found.report)
        page = report_page(found.title, found.description, found.diagnosis, pictures, found.report["fields"])
        (folder / PAGE).write_text(page, encoding="utf-8")
    return found.report


def compare(
    model_a: str | Path,
    model_b: str | Path,
    text: str | Path,
    out: str | Path,
    *,
    max_tokens: int = 4096,
    max_length: int | None = None,
    batch_size: int = 4,
    device: str | None = None,
    overwrite: bool = False,
    progress: Progress = _no_progress,
) -> dict[str, Any]:
    """`inspect` of two models over one text (each by its own tokenizer), side by side.

    Writes into `out`: `report.html`, the page with both; `comparison.json` (what is returned); `comparison.png`, both
    models' curves on the same axes; and every figure of either, with `a_` and `b_` before its name. Models are loaded one
    after the other.

    Args:
        model_a, model_b: DepthRoute folders or hub ids.
        text, out, max_tokens, max_length, batch_size, device, overwrite, progress: as `inspect`.

    Returns:
        `a` and `b`: what `inspect` returns for each; `summary`: per quantity the numbers `a`, `b` (None where it has no
        meaning for that model) and `difference`, b − a.

    Raises:
        Refused: as `inspect`.
    """
    settings = _Settings(max_tokens, max_length, batch_size, device, progress)
    content = settings.check([model_a, model_b], text, out, overwrite)
    found = [_run(model, text, content, settings) for model in (model_a, model_b)]
    names = (found[0].title, found[1].title)
    if names[0] == names[1]:
        names = (f"a: {names[0]}", f"b: {names[1]}")
    first, second = (one.diagnosis for one in found)
    numbers = [first.summary(), second.summary()]
    summary = {}
    for name in [*numbers[0], *(name for name in numbers[1] if name not in numbers[0])]:
        a, b = (one.get(name) for one in numbers)
        summary[name] = {"a": a, "b": b, "difference": None if a is None or b is None else b - a}
    report = {"a": found[0].report, "b": found[1].report, "summary": summary}
    from .plots import compared_by_depth, draw
    from .report import comparison_page

    with whole_output(out, overwrite) as folder:
        pictures = [_save(folder, draw(one.diagnosis, one.subtitle), f"{letter}_") for letter, one in zip("ab", found)]
        figure = compared_by_depth(first, second, names, found[0].text_line)
        overlay = _save(folder, {Path(OVERLAY).stem: figure})[Path(OVERLAY).stem]
        write_json(folder / COMPARED_NUMBERS, report)
        page = comparison_page(
            names,
            found[0].text_line,
            (first, second),
            (pictures[0], pictures[1]),
            overlay,
            (found[0].report["fields"], found[1].report["fields"]),
        )
        (folder / PAGE).write_text(page, encoding="utf-8")
    return report


class _Settings:
    """How a text is run over, checked."""

    def __init__(
        self, max_tokens: int, max_length: int | None, batch_size: int, device: str | None, progress: Progress
    ):
        self.max_tokens, self.max_length, self.batch_size = max_tokens, max_length, batch_size
        self.device = check_device(device)
        self.progress = progress

    def check(self, models: list[str | Path], text: str | Path, out: str | Path, overwrite: bool) -> str:
        """All that can be refused before a model is loaded; the text's content."""
        for name in ("max_tokens", "max_length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Refused(f"{name}: got {value}, allowed: a number ≥ 1")
        require("matplotlib", "plot")
        sources = [check_model(model) for model in models]
        check_output_folder(out, overwrite)
        content = _read_text(Path(text))
        for source in sources:
            config = AutoConfig.from_pretrained(source)
            if config.model_type != "depthroute":
                raise Refused(
                    f"{source}: model_type: got {config.model_type!r}, allowed: depthroute (make one with `depthroute convert`)"
                )
            longest = config.max_position_embeddings
            if self.max_length is not None and self.max_length > longest:
                raise Refused(
                    f"max_length: got {self.max_length}, allowed: at most max_position_embeddings = {longest}"
                )
        return content


class _Found:
    """What was found out about one model, and the lines that name it."""

    def __init__(self, model: str | Path, text: str | Path, config: Any, diagnosis: Diagnosis):
        self.diagnosis = diagnosis
        self.title = f"{Path(model).resolve().name} ({config.preset_name})"
        self.text_line = f"text: {Path(text).name}, {diagnosis.tokens} tokens"
        self.subtitle = f"{self.title}, {self.text_line}"
        self.description = f"{self.text_line}, {diagnosis.layers} layers"
        self.report = {
            "model": str(model),
            "text": str(text),
            "preset": config.preset_name,
            "fields": {name: getattr(config, name) for name in family_fields()},
            "tokens": diagnosis.tokens,
            **diagnosis.to_dict(),
        }


def _run(model: str | Path, text: str | Path, content: str, settings: _Settings) -> _Found:
    source = check_model(model)
    token_ids = AutoTokenizer.from_pretrained(source)(content)["input_ids"][: settings.max_tokens]
    if not token_ids:
        raise Refused(f"{text}: no tokens, allowed: a text file that is not empty")
    network = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(settings.device)
    config = network.config
    windows = (token_ids, settings.max_length or min(512, config.max_position_embeddings), settings.batch_size)
    batches = [{**batch, "logits_to_keep": 1} for batch in token_batches(*windows)]
    pairs = list(token_pairs(*windows)) if stream_count(config) > 1 else []
    diagnosis = diagnose(
        network, settings.progress(batches, len(batches)), settings.progress(pairs, len(pairs)) if pairs else ()
    )
    return _Found(model, text, config, diagnosis)


def _save(folder: Path, figures: Mapping[str, "Figure"], prefix: str = "") -> dict[str, bytes]:
    """Write figures as PNG files; the files' bytes by name."""
    pictures = {}
    for name, figure in figures.items():
        buffer = BytesIO()
        figure.savefig(buffer, format="png")
        pictures[name] = buffer.getvalue()
        (folder / f"{prefix}{name}.png").write_bytes(pictures[name])
    return pictures


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise Refused(f"{file}: {reason}, allowed: a readable UTF-8 text file") from error
