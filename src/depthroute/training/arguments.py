# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a training run can be told: transformers' TrainingArguments, ours, and a parser for the command line and YAML."""

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser, TrainingArguments

from ..errors import Refused
from ..modeling.configuration_depthroute import nearest_names
from .recipes import INSTEAD_OF, read_recipe


@dataclass
class DepthRouteTrainingArguments(TrainingArguments):
    """TrainingArguments with what the routing needs.

    Args:
        routing_learning_rate: of the routing parameters, which have no weight decay. Default by the model's residual: 10
            times `learning_rate` where the mix is added to the stream, 2 times where it replaces it or mixes two streams,
            once for the baselines.
        freeze_base: train the routing alone.
        routing_health_steps: measure the routing every so many steps, log it by depth, and warn of what is wrong with it
            (`RoutingHealthCallback`). Default: never.
    """

    routing_learning_rate: float | None = field(
        default=None,
        metadata={
            "help": "learning rate of the routing (default: 10x the base where reads add, 2x where they replace, 1x for baselines)"
        },
    )
    freeze_base: bool = field(
        default=False, metadata={"help": "train the routing alone; it is also saved as routing.safetensors"}
    )
    routing_health_steps: int | None = field(
        default=None,
        metadata={
            "help": "log routing weights and gradients by depth every so many steps, and warn of what is wrong with them"
        },
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "not needed: every parameter of every preset has a gradient in every step"}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "checkpoint folder to go on from; alone or 'last': the newest whole one in output_dir", "nargs": "?",
                  "const": "last"},
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.routing_learning_rate is not None and not 0 <= self.routing_learning_rate < float("inf"):
            raise ValueError(f"routing_learning_rate: got {self.routing_learning_rate}, allowed: a finite number >= 0")
        if self.routing_health_steps is not None and self.routing_health_steps < 1:
            raise ValueError(f"routing_health_steps: got {self.routing_health_steps}, allowed: at least 1")
        super().__post_init__()


@dataclass
class RunArguments:
    """Model and data of `depthroute train`.

    Args:
        model: folder or hub id of a DepthRoute model; an ordinary causal language model trains too, as a control.
        preset: how to route. With `model`, an ordinary checkpoint: it is converted as it is loaded, anchored. With
            `from_scratch`: over the preset there.
        from_scratch: fields of `DepthRouteConfig`, `preset` among them, of a model to make by the seed; instead of `model`.
            As JSON on the command line, where they are merged with those of the file.
        fields: of `DepthRouteConfig`, over those of the preset, with `from_scratch` and with an ordinary checkpoint alike:
            `depth_anchored`, `depth_num_heads`, ... As JSON on the command line, merged with those of the file.
        tokenizer: folder or hub id, or "characters": one token for each character that occurs in the training documents.
            Default: that of `model`.
        dtype: of the parameters. float32 masters by default, also where the checkpoint is bfloat16; with `bf16` the
            products run in bfloat16 all the same.
        routing: routing.safetensors of an earlier run, loaded onto the model.
        attn_implementation: eager, sdpa, flash_attention_2, ...
        train_files, validation_files: .txt, .md, .rst, .py, .json, .jsonl, .parquet, .csv; a text file is one document.
        dataset, dataset_config: name (or folder) for the `datasets` library, and its configuration.
        train_split, validation_split: splits of `dataset`.
        validation_fraction: of the training documents, set aside at random by the seed.
        text_column: default: "text", or the only column of strings. Columns `input_ids` and `labels` are used as they are.
        block_size: tokens of a training example; default: the model's context, at most 1024.
        stream: read documents as training goes on, instead of all before it: for data sets that are larger than a disk, or
            of which a run needs a part. Blocks come in an order that is set by the seed, whatever number of processes and
            of data loader workers there is.
        shuffle_buffer: documents of the stream's shuffle buffer.
        validation_documents: this many documents at the beginning of the data are set aside to measure on.
        train_tokens: tokens to train on, instead of `max_steps`; rounded up to whole steps.
        eval_tokens: also measure when so many tokens have been trained on.
        global_batch_size: examples per optimizer step, over all processes; gradient accumulation follows from it.
        forecast_only: print memory, tokens and work, and stop; no weights are made.
        description: what this run is, for the results.
        cache_dir: where `datasets` keeps what it has prepared.
        overwrite: write to an output folder that holds files already.
    """

    model: str | None = field(default=None, metadata={"help": "folder or hub id of the model to train"})
    preset: str | None = field(
        default=None, metadata={"help": "how to route: converts an ordinary model, or overrides from_scratch's preset"}
    )
    from_scratch: dict | str | None = field(
        default=None,
        metadata={"help": "JSON: fields of a model to make, instead of model; merged with those of the file"},
    )
    fields: dict | str | None = field(
        default=None, metadata={"help": "JSON: configuration fields over the preset's; merged with those of the file"}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "folder, hub id, or characters (default: the model's)"}
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", metadata={"help": "dtype of the parameters; float32 masters unless you know better"}
    )
    routing: str | None = field(default=None, metadata={"help": "routing.safetensors to load onto the model first"})
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, ..."})
    train_files: list[str] | None = field(
        default=None, metadata={"help": "text, json, jsonl, parquet or csv files; a text file is one document"}
    )
    validation_files: list[str] | None = field(
        default=None, metadata={"help": "files to measure loss and perplexity on"}
    )
    dataset: str | None = field(default=None, metadata={"help": "a name or folder for the datasets library"})
    dataset_config: str | None = field(default=None, metadata={"help": "configuration of the dataset"})
    train_split: str = field(default="train", metadata={"help": "split of the dataset to train on"})
    validation_split: str | None = field(
        default=None, metadata={"help": "split to measure on (default: validation, where the dataset has it)"}
    )
    validation_fraction: float | None = field(
        default=None, metadata={"help": "fraction of the training documents to set aside for validation"}
    )
    text_column: str | None = field(
        default=None, metadata={"help": "column with the text (default: text, or the only column of strings)"}
    )
    block_size: int | None = field(
        default=None, metadata={"help": "tokens of an example (default: the model's context, at most 1024)"}
    )
    stream: bool = field(default=False, metadata={"help": "read documents as training goes on (needs a step limit)"})
    shuffle_buffer: int = field(default=10_000, metadata={"help": "documents of the stream's shuffle buffer; 1: none"})
    validation_documents: int | None = field(
        default=None, metadata={"help": "documents at the beginning of the data to set aside for validation"}
    )
    train_tokens: int | None = field(default=None, metadata={"help": "tokens to train on, instead of max_steps"})
    eval_tokens: list[int] | None = field(
        default=None, metadata={"help": "also measure when so many tokens have been trained on"}
    )
    global_batch_size: int | None = field(
        default=None, metadata={"help": "examples per optimizer step, over all processes; sets the accumulation"}
    )
    forecast_only: bool = field(
        default=False, metadata={"help": "print expected memory, tokens and work, and stop; no weights are made"}
    )
    description: str | None = field(default=None, metadata={"help": "what this run is, for the results"})
    cache_dir: str | None = field(default=None, metadata={"help": "where the datasets library keeps what it prepared"})
    overwrite: bool = field(default=False, metadata={"help": "write to an output folder that holds files already"})

    def __post_init__(self) -> None:
        for name in MAPPINGS:
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, _json_mapping(name, value))


MAPPINGS = ("from_scratch", "fields")
"""Options that are JSON objects on the command line, and are merged with those of a file."""

ARGUMENT_CLASSES = (RunArguments, DepthRouteTrainingArguments)


def _json_mapping(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise Refused(f"{name}: got {text!r}, allowed: a JSON object of configuration fields") from error
    if not isinstance(value, dict):
        raise Refused(f"{name}: got {text!r}, allowed: a JSON object of configuration fields")
    return value


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def option_names() -> list[str]:
    """Every option, ours and transformers', with underscores."""
    return sorted(item.name for cls in ARGUMENT_CLASSES for item in dataclasses.fields(cls) if item.init)


def own_options() -> dict[str, str]:
    """Our options with their help."""
    inherited = {item.name: item.metadata for item in dataclasses.fields(TrainingArguments)}
    own = [item for cls in ARGUMENT_CLASSES for item in dataclasses.fields(cls) if item.name not in inherited]
    return {item.name: item.metadata["help"] for item in own}


def help_text() -> str:
    """What `depthroute train --help` prints."""
    own = own_options()
    width = max(map(len, own)) + 2
    theirs = ", ".join(name for name in option_names() if name not in own)
    return "\n".join(
        [
            "Usage: depthroute train [RECIPE | CONFIG.yaml] [--option value ...]",
            "",
            "Train a model on text. Options on the command line override those of the recipe or YAML file; dashes and",
            "underscores in names are the same. --list-recipes lists the recipes. Examples:",
            "",
            "  depthroute train --model DIR --train_files a.txt b.jsonl --validation_files c.txt --output_dir OUT",
            "  depthroute train rd-s --preset attnres-block --seed 1 --output_dir OUT",
            "",
            "Options of DepthRoute:",
            *(f"  --{name:<{width}}{text}" for name, text in own.items()),
            "",
            "All names of transformers' TrainingArguments are accepted too (learning_rate, max_steps, eval_strategy, bf16, ...;",
            "its documentation says what they mean), with --resume_from_checkpoint alone for the newest checkpoint:",
            textwrap.fill(theirs, 118, initial_indent="  ", subsequent_indent="  "),
        ]
    )


def _check_name(name: str, written: str, where: str) -> None:
    names = option_names()
    if name not in names and name.removeprefix("no_") not in names:
        raise Refused(f"{where}{written}: unknown option, nearest: {nearest_names(name, names)}")


def as_arguments(entries: dict[str, Any], where: str) -> list[str]:
    """Entries of a recipe as command-line arguments, so that both are read by the same rules (in YAML itself, 1e-4 is a
    string).

    Raises:
        Refused: an unknown name, with the nearest ones, or an empty list.
    """
    arguments: list[str] = []
    for name, value in entries.items():
        _check_name(name, name, f"{where}: ")
        if isinstance(value, list):
            if not value:
                raise Refused(f"{where}: {name}: got an empty list, allowed: at least one value")
            arguments += [f"--{name}", *map(str, value)]
        elif value is not None:
            arguments.append(f"--{name}={json.dumps(value) if isinstance(value, (dict, bool)) else value}")
    return arguments


def parse_arguments(arguments: Sequence[str]) -> tuple[RunArguments, DepthRouteTrainingArguments]:
    """Read `[RECIPE | CONFIG.yaml] [--option value ...]`: options override the file's entries, and end those that they take
    the place of; dashes and underscores are the same.

    Raises:
        Refused: an unknown recipe or option (with the nearest ones), or a value that is not accepted.
    """
    rest = list(arguments)
    recipe = None if not rest or rest[0].startswith("-") else rest.pop(0)
    entries = read_recipe(recipe) if recipe is not None else {}
    given = set()
    for argument in rest:
        if argument.startswith("--"):
            written = argument.split("=")[0]
            given.add(written[2:].replace("-", "_"))
            _check_name(written[2:].replace("-", "_"), written, "")
    ended = {name for option in given for name in INSTEAD_OF.get(option, ())} - given
    from_file = as_arguments({name: value for name, value in entries.items() if name not in ended}, str(recipe))
    parser = _Parser(ARGUMENT_CLASSES, allow_abbrev=False)
    run, training, left = parser.parse_args_into_dataclasses(
        [*from_file, *rest], return_remaining_strings=True, look_for_args_file=False
    )
    if left:
        raise Refused(f"{left[0]}: got a value that belongs to no option, allowed: --option value")
    for name in MAPPINGS:
        if isinstance(below := entries.get(name), dict) and isinstance(above := getattr(run, name), dict):
            setattr(run, name, {**below, **above})
    return run, training
