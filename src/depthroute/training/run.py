# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One training run from its arguments to a folder: model, data, Trainer, evaluation, results."""

import json
import platform
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, default_data_collator, set_seed
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import get_last_checkpoint

from ..errors import Refused
from ..files import check_model, check_parents, write_json
from .arguments import DepthRouteTrainingArguments, RunArguments, parse_arguments
from .data import PackedBlocks, divide, pack, read_files, read_split, split_names
from .handing_on import folder_of, hand_on, set_aside_generation
from .optimizer import ROUTING_GROUP
from .routing_state import load_routing, routed_model, routing_parameters, save_routing
from .trainer import DepthRouteTrainer


RESULTS_FILE = "depthroute_run.json"
ROUTING_FILE = "routing.safetensors"
DEFAULT_BLOCK_SIZE = 1024


def train(arguments: Sequence[str]) -> dict[str, Any]:
    """Do what `depthroute train` does: `[CONFIG.yaml] [--option value ...]`.

    Returns:
        The results, as they are in `depthroute_run.json` of the output folder.

    Raises:
        Refused: arguments, files or data that are not accepted; nothing is written then.
    """
    run, training = parse_arguments(arguments)
    return run_training(run, training, shlex.join(["depthroute", "train", *arguments]))


def summary(results: dict[str, Any]) -> dict[str, str]:
    """The few results that a user looks for first, as text."""
    validation = results["validation"] or {}
    rates = [results["learning_rate"], results["routing_learning_rate"]]
    return {
        "preset": results["preset"] or "no DepthRoute model",
        "parameters trained": f"{results['parameters']['trainable']:,} of {results['parameters']['total']:,}",
        "learning rate, routing's": ", ".join("none" if rate is None else f"{rate:g}" for rate in rates),
        "training loss": f"{results['train']['train_loss']:.4f}",
        "validation loss": f"{validation['eval_loss']:.4f}" if validation else "no validation data",
        "validation perplexity": f"{validation['eval_perplexity']:.3f}" if validation else "no validation data",
        "saved to": results["output_dir"],
    }


def run_training(
    run: RunArguments, training: DepthRouteTrainingArguments, command: str | None = None
) -> dict[str, Any]:
    """Train a model, measure it on the validation data, and save it so that its folder loads by itself.

    Args:
        run: model and data.
        training: everything else.
        command: to note in the results.

    Returns:
        Results: command, seed, versions, data, rates, training and validation metrics, and the log by steps.
    """
    _check(run, training)
    checkpoint = _checkpoint(training)
    set_seed(training.seed)
    model = load_model(run)
    if training.freeze_base and not routing_parameters(model):
        raise Refused(f"freeze_base: {run.model} has no routing parameters, allowed: a model with depth reads")
    if run.routing:
        load_routing(model, run.routing)
    start = folder_of(str(run.model))  # now: at the end there may be no network
    keep_generation = set_aside_generation(model)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    train_blocks, validation_blocks = load_blocks(run, training, tokenizer, model.config)

    trainer = DepthRouteTrainer(
        model=model,
        args=training,
        train_dataset=train_blocks,
        eval_dataset=validation_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,  # blocks have one length: nothing to pad
    )
    if run.overwrite and checkpoint is None and training.should_save:
        # a later resume must not pick up the checkpoints of the run that this one replaces
        for old in Path(training.output_dir).glob("checkpoint-*"):
            shutil.rmtree(old)
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    validation = _last_evaluation(trainer) if validation_blocks is not None else None
    trainer.save_model()
    trainer.save_state()

    results = {
        "command": command,
        "model": run.model,
        "output_dir": training.output_dir,
        "preset": getattr(model.config, "preset_name", None),
        "seed": training.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "data": {
            **data_sources(run),
            "block_size": train_blocks.input_ids.shape[1],
            "train_blocks": len(train_blocks),
            "validation_blocks": 0 if validation_blocks is None else len(validation_blocks),
        },
        "parameters": {
            "total": sum(parameter.numel() for parameter in model.parameters()),
            "trainable": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
            "routing": sum(parameter.numel() for parameter in routing_parameters(model).values()),
        },
        "learning_rate": training.learning_rate,
        "routing_learning_rate": _routing_rate(trainer),
        "train": trained.metrics,
        "validation": validation,
        "log": trainer.state.log_history,
    }
    if (start / RESULTS_FILE).is_file():
        earlier = json.loads((start / RESULTS_FILE).read_text(encoding="utf-8"))
        results["earlier_runs"] = [*earlier.pop("earlier_runs", []), earlier]
    if training.should_save:
        hand_on(start, Path(training.output_dir), keep_generation)
        if training.freeze_base:
            save_routing(model, Path(training.output_dir) / ROUTING_FILE)
        write_json(Path(training.output_dir) / RESULTS_FILE, results)
    return results


def data_sources(run: RunArguments) -> dict[str, Any]:
    """Where the data came from, as far as it was said: a data set by its id, files by their names."""
    sources = {
        "train_files": [Path(file).name for file in run.train_files or []],
        "validation_files": [Path(file).name for file in run.validation_files or []],
        "dataset": run.dataset if run.dataset is None or not Path(run.dataset).exists() else Path(run.dataset).name,
        "dataset_config": run.dataset_config,
        "train_split": run.train_split if run.dataset else None,
        "validation_split": _validation_split(run),
        "validation_fraction": run.validation_fraction,
    }
    return {name: value for name, value in sources.items() if value}


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
    if not run.model:
        raise Refused("model: got none, allowed: --model with a folder or hub id")
    check_model(run.model)
    if bool(run.train_files) == bool(run.dataset):
        raise Refused("train_files, dataset: got both or neither, allowed: exactly one of the two")
    sources = {
        "validation_files": run.validation_files,
        "validation_split": run.validation_split,
        "validation_fraction": run.validation_fraction,
    }
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        raise Refused(f"{', '.join(given)}: got {len(given)} sources of validation data, allowed: one")
    if run.validation_split and not run.dataset:
        raise Refused(f"validation_split: got {run.validation_split!r} without dataset, allowed: with dataset")
    may_have_split = run.dataset is not None
    if training.eval_strategy != "no" and not given and not may_have_split:
        raise Refused(
            f"eval_strategy: got {str(training.eval_strategy.value)!r} without validation data, "
            f"allowed: with one of {', '.join(sources)}"
        )
    if run.block_size is not None and run.block_size < 2:
        raise Refused(f"block_size: got {run.block_size}, allowed: at least 2 tokens")
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


def _checkpoint(training: DepthRouteTrainingArguments) -> str | None:
    wanted = training.resume_from_checkpoint
    if wanted is None:
        return None
    if wanted in ("last", "true", "True"):
        found = get_last_checkpoint(training.output_dir) if Path(training.output_dir).is_dir() else None
        if found is None:
            raise Refused(
                f"resume_from_checkpoint: no checkpoint in {training.output_dir}, allowed: a checkpoint folder"
            )
        return found
    if not Path(wanted).is_dir():
        raise Refused(f"resume_from_checkpoint: {wanted}: no such folder, allowed: a checkpoint folder, or last")
    return wanted


def load_model(run: RunArguments) -> Any:
    """The model to train, in `run.dtype`: float32 masters by default.

    Raises:
        Refused: the checkpoint lacks weights other than the routing's, which then starts at its initial values.
    """
    options = {"attn_implementation": run.attn_implementation} if run.attn_implementation else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        run.model, dtype=getattr(torch, run.dtype), output_loading_info=True, **options
    )
    owner = routed_model(model)
    routing = owner.routing_parameters() if owner is not None else {}
    if missing := sorted(set(info["missing_keys"]) - set(routing)):
        raise Refused(f"{run.model}: missing weights: {', '.join(missing)}")
    return model


def _validation_split(run: RunArguments) -> str | None:
    """The split of the data set to measure on: the one asked for; where nothing was, `validation` if it exists."""
    if run.validation_split or run.validation_files or run.validation_fraction is not None or run.dataset is None:
        return run.validation_split
    return "validation" if "validation" in split_names(run.dataset, run.dataset_config, run.cache_dir) else None


def load_blocks(
    run: RunArguments, training: DepthRouteTrainingArguments, tokenizer: Any, config: Any
) -> tuple[PackedBlocks, PackedBlocks | None]:
    """Training and validation examples; None where there is no validation data."""
    context = config.max_position_embeddings
    block_size = min(context, DEFAULT_BLOCK_SIZE) if run.block_size is None else run.block_size
    if block_size > context:
        raise Refused(f"block_size: got {block_size}, allowed: at most {context}, max_position_embeddings of the model")
    read_options: dict[str, Any] = {"text_column": run.text_column, "cache_dir": run.cache_dir}
    held_out = None
    if run.dataset is None:
        documents = read_files(run.train_files or [], **read_options)
    else:
        documents = read_split(run.dataset, run.dataset_config, run.train_split, **read_options)
        if split := _validation_split(run):
            held_out = read_split(run.dataset, run.dataset_config, split, **read_options)
    if run.validation_files:
        held_out = read_files(run.validation_files, **read_options)
    if run.validation_fraction is not None:
        documents, held_out = divide(documents, run.validation_fraction, training.data_seed or training.seed)
    if held_out is None and training.eval_strategy != "no":
        raise Refused(
            f"eval_strategy: got {training.eval_strategy.value!r}, but {run.dataset} has no split 'validation'"
        )

    def blocks(rows: Any, where: str) -> PackedBlocks:
        packed = pack(rows, tokenizer, block_size, where)
        if (largest := int(packed.input_ids.max())) >= config.vocab_size:
            raise Refused(f"{where}: token id {largest}, allowed: below {config.vocab_size}, vocab_size of the model")
        return packed

    return blocks(documents, "training data"), None if held_out is None else blocks(held_out, "validation data")
