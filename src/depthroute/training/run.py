# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One training run from its arguments to a folder: model, data, Trainer, evaluation, results."""

import json
import platform
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, default_data_collator, set_seed
from transformers.integrations import get_available_reporting_integrations

from ..errors import Refused
from ..files import check_parents, write_json
from .arguments import DepthRouteTrainingArguments, RunArguments, parse_arguments
from .checkpoints import check_within, checkpoint_to_resume
from .data import PackedBlocks
from .forecast import Forecast, evaluation_steps, forecast, set_accumulation, set_steps, tokens_per_step
from .handing_on import folder_of, hand_on, set_aside_generation
from .optimizer import ROUTING_GROUP
from .routing_state import freeze_base, load_routing, routing_parameters, save_routing
from .sources import block_size_of, check_sources, data_sources, make_blocks, open_documents
from .starting import (
    CHARACTERS,
    check_start,
    load_model,
    load_tokenizer,
    model_config,
    new_config,
    routed_config,
    told_without_tokenizer,
)
from .streaming import StreamedBlocks, StreamTrainer
from .trainer import DepthRouteTrainer


RESULTS_FILE = "depthroute_run.json"
ROUTING_FILE = "routing.safetensors"

Announce = Callable[[Forecast], None]


class EvaluateAt(TrainerCallback):
    """Measures behind the given optimizer steps, whatever else the strategy asks for."""

    def __init__(self, steps: Sequence[int]):
        self.steps = set(steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            control.should_evaluate = True


def train(arguments: Sequence[str], announce: Announce | None = None) -> dict[str, Any]:
    """Do what `depthroute train` does: `[RECIPE | CONFIG.yaml] [--option value ...]`.

    Args:
        arguments: of the command line.
        announce: is given what the run will take, before it is started.

    Returns:
        The results, as they are in `depthroute_run.json` of the output folder.

    Raises:
        Refused: arguments, files or data that are not accepted; nothing is written then.
    """
    run, training = parse_arguments(arguments)
    return run_training(run, training, shlex.join(["depthroute", "train", *arguments]), announce)


def summary(results: dict[str, Any]) -> dict[str, str]:
    """The few results that a user looks for first, as text."""
    validation = results["validation"] or {}
    train_loss = results["train"].get("train_loss")
    rates = [results["learning_rate"], results["routing_learning_rate"]]
    return {
        "preset": results["preset"] or "no DepthRoute model",
        "parameters trained": f"{results['parameters']['trainable']:,} of {results['parameters']['total']:,}",
        "learning rate, routing's": ", ".join("none" if rate is None else f"{rate:g}" for rate in rates),
        "training loss": "no step was left to train" if train_loss is None else f"{train_loss:.4f}",
        "validation loss": f"{validation['eval_loss']:.4f}" if validation else "no validation data",
        "validation perplexity": f"{validation['eval_perplexity']:.3f}" if validation else "no validation data",
        "tokens": f"{results['forecast']['tokens']:,}",
        "saved to": results["output_dir"],
    }


def run_training(
    run: RunArguments,
    training: DepthRouteTrainingArguments,
    command: str | None = None,
    announce: Announce | None = None,
    at_end: Callable[[DepthRouteTrainer], dict[str, float]] | None = None,
) -> dict[str, Any]:
    """Train a model, measure it on the validation data, and save it so that its folder loads by itself. From a checkpoint of the
    last step, as a run leaves that was stopped behind it, no step is trained and the rest is done.

    Args:
        run: model and data.
        training: everything else.
        command: to note in the results.
        announce: is given what the run will take, before it is started; in the first process only.
        at_end: is given the trainer with the trained model, and measures it: `eval_loss` and whatever else, instead of the
            evaluation at the end.

    Returns:
        Results: command, seed, versions, data, forecast, rates, training and validation metrics, and the log by steps. With
        `forecast_only` the forecast alone.
    """
    _check(run, training)
    checkpoint = checkpoint_to_resume(training.resume_from_checkpoint, training.output_dir)
    set_seed(training.seed)
    if run.forecast_only:
        expected = forecast_run(run, training)
        if announce is not None and training.process_index == 0:
            announce(expected)
        return {"forecast": expected.as_dict()}
    documents = tokenizer = None
    if run.from_scratch:  # its tokenizer may be made of the documents
        documents = open_documents(run, training)
        tokenizer = load_tokenizer(run, documents.texts())
    model = load_model(run, tokenizer, training.seed)
    if training.freeze_base and not routing_parameters(model):
        raise Refused(f"freeze_base: {run.model} has no routing parameters, allowed: a model with depth reads")
    if run.routing:
        load_routing(model, run.routing)
    start = folder_of(run.model) if run.model else None  # now: at the end there may be no network
    keep_generation = set_aside_generation(model)
    documents = documents or open_documents(run, training)
    tokenizer = tokenizer or load_tokenizer(run, documents.texts())
    train_blocks, validation_blocks = make_blocks(documents, run, training, tokenizer, model.config)
    block_size = block_size_of(run, model.config)
    set_steps(training, run.train_tokens, block_size)
    measure_at = evaluation_steps(training, run.eval_tokens, block_size)

    blocks = None if isinstance(train_blocks, StreamedBlocks) else len(train_blocks)
    trainer = (StreamTrainer if blocks is None else DepthRouteTrainer)(
        model=model,
        args=training,
        train_dataset=train_blocks,
        eval_dataset=validation_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,  # blocks have one length: nothing to pad
        callbacks=[EvaluateAt(measure_at)] if measure_at else None,
    )
    expected = forecast(model, training, blocks, block_size)
    if checkpoint is not None:
        check_within(checkpoint, expected.steps)
    if announce is not None and training.process_index == 0:
        announce(expected)
    if run.overwrite and checkpoint is None and training.should_save:
        # a later resume must not pick up the checkpoints of the run that this one replaces
        for old in Path(training.output_dir).glob("checkpoint-*"):
            shutil.rmtree(old)
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    if at_end is not None:
        validation: dict[str, float] | None = at_end(trainer)
    else:
        validation = _last_evaluation(trainer) if validation_blocks is not None else None
    trainer.save_model()
    trainer.save_state()

    results = {
        "command": command,
        "description": run.description,
        "model": run.model,
        "from_scratch": run.from_scratch,
        "output_dir": training.output_dir,
        "preset": getattr(model.config, "preset_name", None),
        "seed": training.seed,
        "processes": training.world_size,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "data": {
            **data_sources(run),
            "block_size": block_size,
            "tokens_per_step": tokens_per_step(training, block_size),
            "train_blocks": blocks,
            "validation_blocks": 0 if validation_blocks is None else len(validation_blocks),
        },
        "parameters": {
            "total": sum(parameter.numel() for parameter in model.parameters()),
            "trainable": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            "routing": sum(parameter.numel() for parameter in routing_parameters(model).values()),
        },
        "forecast": expected.as_dict(),
        "learning_rate": training.learning_rate,
        "routing_learning_rate": _routing_rate(trainer),
        "train": trained.metrics,
        "validation": validation,
        "log": trainer.state.log_history,
    }
    if start is not None and (start / RESULTS_FILE).is_file():
        earlier = json.loads((start / RESULTS_FILE).read_text(encoding="utf-8"))
        results["earlier_runs"] = [*earlier.pop("earlier_runs", []), earlier]
    if training.should_save:
        if start is not None:
            hand_on(start, Path(training.output_dir), keep_generation)
        if training.freeze_base:
            save_routing(model, Path(training.output_dir) / ROUTING_FILE)
        write_json(Path(training.output_dir) / RESULTS_FILE, results)
    return results


def forecast_run(run: RunArguments, training: DepthRouteTrainingArguments) -> Forecast:
    """What a run would take. Weights stay on the meta device, so that no machine is too small to ask; documents are read
    only where their number is needed, or their characters, and no tokenizer is needed where `told_without_tokenizer`.

    Raises:
        Refused: as `run_training`.
    """
    needs_tokenizer = not told_without_tokenizer(run)
    needs_data = not run.stream or (needs_tokenizer and run.tokenizer == CHARACTERS)
    documents = open_documents(run, training) if needs_data else None
    tokenizer = load_tokenizer(run, documents.texts() if documents else []) if needs_tokenizer else None
    if run.from_scratch:
        config = new_config(run, tokenizer) if tokenizer is not None else model_config(run, vocab_size=None)
    else:
        config = AutoConfig.from_pretrained(run.model) if run.preset is None else routed_config(run)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, run.dtype))
    if training.freeze_base:
        freeze_base(model)
    block_size = block_size_of(run, config)
    set_steps(training, run.train_tokens, block_size)
    blocks = None
    if documents is not None and not run.stream:
        train_blocks, _ = make_blocks(documents, run, training, tokenizer, config)
        blocks = len(train_blocks) if isinstance(train_blocks, PackedBlocks) else None
    return forecast(model, training, blocks, block_size)


def _last_evaluation(trainer: DepthRouteTrainer) -> dict[str, float]:
    """Metrics of the model as it is now, measured again only where the run has not just done so."""
    done = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if done and done[-1]["step"] == trainer.state.global_step and not trainer.args.load_best_model_at_end:
        return {name: value for name, value in done[-1].items() if name != "step"}
    return trainer.evaluate()


def _routing_rate(trainer: DepthRouteTrainer) -> float | None:
    groups = trainer.optimizer.param_groups
    # the schedule changes `lr`; a scheduler keeps the peak beside it
    return next((g.get("initial_lr", g["lr"]) for g in groups if g.get("name") == ROUTING_GROUP), None)


def _check(run: RunArguments, training: DepthRouteTrainingArguments) -> None:
    check_sources(run, training)
    set_accumulation(training, run.global_batch_size)
    check_start(run)
    if run.stream and training.max_steps <= 0 and run.train_tokens is None:
        raise Refused("stream: got no limit, a stream has no end; allowed: with train_tokens or max_steps")
    available = get_available_reporting_integrations()
    if absent := sorted(set(training.report_to) - {"none", *available}):
        raise Refused(f"report_to: got {absent[0]!r}, allowed: none, or what is installed: {', '.join(available)}")
    output = Path(training.output_dir)
    check_parents(output)
    if output.is_file():
        raise Refused(f"output_dir: {output} is a file, allowed: a folder")
    used = output.is_dir() and any(output.iterdir())
    if used and not run.overwrite and not training.resume_from_checkpoint:
        raise Refused(
            f"output_dir: {output} holds files, allowed: an empty folder, --overwrite or --resume_from_checkpoint"
        )
