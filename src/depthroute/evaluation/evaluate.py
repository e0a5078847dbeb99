# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A thin road to lm-eval: its model class, its tasks and its numbers, on any causal language model."""

import difflib
import fnmatch
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..device import check_device
from ..errors import Refused
from ..extras import require
from ..files import check_model, download, is_hub_id
from .catalog import LOCAL_TASKS, TASK_FOLDER


if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LOCAL_NAMES = (*LOCAL_TASKS, "depthroute_local")


def task_manager(tasks: Sequence[str]) -> "TaskManager":
    """lm-eval's task manager, with our tasks beside its own.

    Args:
        tasks: names of tasks, groups and tags, patterns of them (`mmlu_*`), or paths of task files.

    Raises:
        Refused: an unknown name, with the nearest ones; or lm-eval is not installed.
    """
    require("lm_eval", "eval")
    from lm_eval.tasks import TaskManager

    if not tasks:
        raise Refused(f"tasks: got none, allowed: {', '.join(_LOCAL_NAMES)}, delta_paper, or any name of lm-eval")
    # to index lm-eval's own thousands takes ten seconds and more
    ours_alone = set(tasks) <= set(_LOCAL_NAMES)
    manager = TaskManager(include_path=str(TASK_FOLDER), include_defaults=not ours_alone)
    known = manager.all_tasks
    for name in tasks:
        if not (fnmatch.filter(known, name) or Path(name).is_file()):
            close = difflib.get_close_matches(name, known, n=5, cutoff=0.6) or [*_LOCAL_NAMES, "delta_paper"]
            raise Refused(f"tasks: got {name!r}, nearest: {', '.join(close)}")
    return manager


def evaluate(
    model: "str | Path | PreTrainedModel",
    tasks: str | Sequence[str],
    batch_size: int | str = 1,
    limit: int | float | None = None,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    device: str | None = None,
    dtype: str = "auto",
    max_batch_size: int = 64,
    max_length: int | None = None,
    num_fewshot: int | None = None,
    peft: str | Path | None = None,
    apply_chat_template: bool = False,
    enable_thinking: bool | None = None,
    think_end_token: str | int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate a model with lm-eval.

    Args:
        model: a model folder or hub id of any causal language model, or a model in memory (then with `tokenizer`, and
            on its own device, in its own dtype). DepthRoute models run in the installed classes.
        tasks: one or more of lm-eval's names or patterns, of ours (`depthroute_choice`, `depthroute_perplexity`,
            `depthroute_generation`, all three: `depthroute_local`, the Delta paper's eight: `delta_paper`), or paths of
            task files.
        batch_size: sequences per forward pass, ≥ 1; "auto" or "auto:N" for lm-eval's search from `max_batch_size` down.
        limit: documents per task: a number ≥ 1, or a fraction below 1. None: all.
        device: as torch names it; default: the first GPU, otherwise the CPU.
        dtype: of the weights: a name of torch's, or "auto" for that of the checkpoint.
        max_length: tokens of context; default, and at most: what the model's configuration allows.
        num_fewshot: solved examples in the prompt, ≥ 0; default: the task's own number.
        peft: folder or hub id of an adapter for the model; its routing is used where it has one (`modules_to_save`).
        apply_chat_template: put prompts into the tokenizer's chat template.
        enable_thinking: handed to the chat template; None: the template's own default.
        think_end_token: token, or its id, behind which a generated answer begins; needed with `enable_thinking=True`.
        options: anything else that `lm_eval.simple_evaluate` takes (`system_instruction`, `gen_kwargs`, `log_samples`, …).

    Under `accelerate launch` or torchrun each process evaluates its part of the documents, on a CPU too.

    Returns:
        lm-eval's own result: `results[task]["acc,none"]`, `…["acc_stderr,none"]`, and, unless `log_samples` is False,
        `samples[task]` with every log-likelihood. Empty in all processes but the first.

    Raises:
        Refused: a value that cannot be meant, an unknown task, a folder without a model, or lm-eval is not installed.
    """
    tasks = [tasks] if isinstance(tasks, str) else list(tasks)
    _check_numbers(batch_size, limit, max_batch_size, max_length)
    if num_fewshot is not None and num_fewshot < 0:
        raise Refused(f"num_fewshot: got {num_fewshot}, allowed: a number ≥ 0")
    if isinstance(model, (str, Path)):
        source: Any = check_model(model)
    elif tokenizer is None:
        raise Refused("tokenizer: got None, allowed: the tokenizer of the model in memory")
    else:
        source = model
    if max_length is not None:
        _check_context(source, max_length)
    if enable_thinking is not None and not apply_chat_template:
        raise Refused(f"enable_thinking: got {enable_thinking} without apply_chat_template, allowed: with it")
    if enable_thinking and think_end_token is None:
        raise Refused("think_end_token: got None with enable_thinking, allowed: the token that ends the thinking")
    adapter = None if peft is None else _check_adapter(peft)
    manager = task_manager(tasks)

    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    device = check_device(device)  # lm-eval takes another one, without a word, for a name that it does not know
    with _without_notes():
        lm = HFLM(
            pretrained=source,
            backend="causal",
            tokenizer=tokenizer,
            device=device,
            dtype=_check_dtype(dtype),
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            max_length=max_length,
            enable_thinking=enable_thinking,
            think_end_token=think_end_token,
        )
        _divide_among_processes(lm)
        if apply_chat_template and not lm.tokenizer.chat_template:
            raise Refused("apply_chat_template: got a tokenizer without chat template, allowed: one that has it")
        if adapter is not None:
            _load_adapter(lm, adapter)
        result = simple_evaluate(
            model=lm,
            tasks=manager.match_tasks(tasks) + [name for name in tasks if Path(name).is_file()],
            batch_size=batch_size,
            device=device,
            limit=limit,
            task_manager=manager,
            num_fewshot=num_fewshot,
            apply_chat_template=apply_chat_template,
            **options,
        )
    return dict(result or {})


def _divide_among_processes(lm: Any) -> None:
    """lm-eval divides the documents where a machine has several GPUs, and otherwise lets every process do all of them."""
    if hasattr(lm, "accelerator"):
        lm._rank, lm._world_size = lm.accelerator.process_index, lm.accelerator.num_processes


def _check_adapter(peft: str | Path) -> str:
    require("peft", "train")
    path = Path(peft)
    if path.is_dir():
        if not (path / "adapter_config.json").is_file():
            raise Refused(f"peft: {path}: no adapter_config.json in this folder, allowed: an adapter's folder")
        return str(path)
    if not is_hub_id(str(peft)):
        raise Refused(f"peft: got {str(peft)!r}, allowed: an adapter's folder or hub id")
    return str(download(str(peft), ["adapter_*", "*.safetensors"], field="peft", local="an adapter's folder"))


def _load_adapter(lm: Any, adapter: str) -> None:
    """Not lm-eval's own `peft`: it cuts the embedding down to the tokenizer's size, which changes every probability of a model
    whose embedding has rows to spare, as Qwen3's has."""
    from peft import PeftModel

    lm._model = PeftModel.from_pretrained(lm.model, adapter).eval()
    lm.peft = adapter


_NOTES = (
    "`pretrained` model kwarg is not of type `str`",
    "Passed an already-initialized model through `pretrained`",
    "depthroute_choice: Custom kwargs",
    "depthroute_perplexity: Custom kwargs",
    "depthroute_generation: Custom kwargs",
)


@contextmanager
def _without_notes() -> Iterator[None]:
    """Leave out what lm-eval notes about any model in memory and any data set that a function loads."""
    loggers = [logging.getLogger(name) for name in ("lm_eval.models.huggingface", "lm_eval.api.task")]

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_NOTES)

    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def _check_numbers(batch_size: int | str, limit: float | None, max_batch_size: int, max_length: int | None) -> None:
    if not re.fullmatch(r"auto(:[1-9]\d*)?|[1-9]\d*", str(batch_size)):
        raise Refused(f"batch_size: got {batch_size!r}, allowed: a number ≥ 1, auto, or auto:N")
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and float(limit).is_integer())):
        raise Refused(f"limit: got {limit}, allowed: a whole number ≥ 1 of documents, or a fraction between 0 and 1")
    for name, value in (("max_batch_size", max_batch_size), ("max_length", max_length)):
        if value is not None and value < 1:
            raise Refused(f"{name}: got {value}, allowed: a number ≥ 1")


def _check_context(model: "str | PreTrainedModel", max_length: int) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)  # some models have no limit
    if longest is not None and max_length > longest:
        raise Refused(f"max_length: got {max_length}, allowed: at most {longest}, max_position_embeddings of the model")


def _check_dtype(dtype: str) -> str:
    import torch

    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise Refused(f"dtype: got {dtype!r}, allowed: auto, float32, bfloat16, float16")
    return dtype


def results_table(result: dict[str, Any]) -> Table:
    """lm-eval's result as a table: one row per task and metric (↑ higher is better, ↓ lower), with its standard error
    where there is one."""
    table = Table()
    for name in ("task", "metric"):
        table.add_column(name, overflow="fold")
    for name in ("value", "± stderr", "docs"):
        table.add_column(name, justify="right", no_wrap=True)
    for task, values in result["results"].items():
        better = result.get("higher_is_better", {}).get(task, {})
        documents = result.get("n-samples", {}).get(task, {}).get("effective", "")
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            arrow = {True: " ↑", False: " ↓"}.get(better.get(metric), "")
            label = metric if filtered == "none" else f"{metric} ({filtered})"
            stderr = values.get(f"{metric}_stderr,{filtered}")
            table.add_row(
                task,
                label + arrow,
                _number(value),
                _number(stderr) if isinstance(stderr, float) else "–",
                str(documents),
            )
    return table


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"
