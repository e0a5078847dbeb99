# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a demo run found: numbers as data, a table, sentences, a figure, and the tuned model's card."""

import math
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from depthroute_conversion import ConversionReport

from .base import DEFAULT_BASE
from .measure import METRICS, Measurement
from .noise import NOISE_BAND, ONE_SEED, paired_difference, statement
from .settings import STEPS_PER_MINUTE, DemoSettings


COLUMNS = ("base", "converted before", "converted after", "control after")
COMPARISONS = (
    ("converted before", "base"),
    ("converted after", "converted before"),
    ("control after", "base"),
    ("converted after", "control after"),
)
"""(what, against what)."""
FIGURES = {
    "routing_heatmap": "routing",
    "routing_depth": "routing by depth",
    "stream_cka": "streams",
    "norm_growth": "norms",
}
"""Those of `depthroute inspect` that the summary shows, with their titles."""


def build_report(
    settings: DemoSettings,
    base: str,
    conversion: ConversionReport,
    results: dict[str, Measurement],
    training: dict[str, Any],
    routing: dict[str, Any],
    text: dict[str, Any],
    folders: dict[str, str],
) -> dict[str, Any]:
    """Everything that is known after a run, ready for JSON. No paths: the folders by name."""
    converted = conversion.to_dict()
    converted["out"] = folders["converted before"]
    return {
        "command": command(settings, base),
        "settings": asdict(settings),
        "base": base,
        "folders": folders,
        "text": text,
        "conversion": converted,
        "training": training,
        "models": {
            name: {
                "validation_perplexity": results[name].perplexity,
                **{metric.key: results[name].value(metric.key) for metric in METRICS},
                "items": results[name].items,
                "weights": results[name].weights,
                "sample": results[name].sample,
            }
            for name in COLUMNS
        },
        "comparisons": compare(results),
        "noise": f"Within noise: smaller than {NOISE_BAND:g} standard errors of the paired difference. {ONE_SEED}",
        "routing": routing,
    }


def command(settings: DemoSettings, base: str) -> str:
    """The command line of this run, with names in place of paths."""
    if settings.tiny:
        parts = ["--tiny"]
    else:
        parts = [
            *([] if base == DEFAULT_BASE else [f"--base {base}"]),
            f"--minutes {settings.steps / STEPS_PER_MINUTE:g}",
        ]
    return " ".join(["depthroute demo", *parts, f"--preset {settings.preset}", f"--seed {settings.seed}"])


def compare(results: dict[str, Measurement]) -> list[dict[str, Any]]:
    """Every comparison on every metric, in numbers and as a sentence."""
    found = []
    for what, against in COMPARISONS:
        for metric in METRICS:
            first, second = results[against], results[what]
            weights = first.weights.get(metric.key)
            difference = paired_difference(first.items[metric.key], second.items[metric.key], weights)
            found.append(
                {
                    "what": what,
                    "against": against,
                    "metric": metric.key,
                    "difference": difference.mean,
                    "stderr": difference.stderr,
                    "items": difference.items,
                    "identical": difference.identical,
                    "within_noise": difference.within_noise,
                    "sentence": statement(
                        f"{what} against {against}", metric.label, difference, metric.higher_is_better
                    ),
                }
            )
    return found


def table_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per metric: its label, and the value of every model, with the standard error over items where it is a mean."""
    models = report["models"]
    rows = [("validation perplexity", *(f"{models[name]['validation_perplexity']:.3f}" for name in COLUMNS))]
    for metric in METRICS:
        cells = []
        for name in COLUMNS:
            items, value = models[name]["items"][metric.key], models[name][metric.key]
            cell = f"{value:.4f}"
            if metric.key not in models[name]["weights"] and len(items) > 1:
                variance = math.fsum((item - value) ** 2 for item in items) / (len(items) - 1)
                cell += f" ± {math.sqrt(variance / len(items)):.4f}"
            cells.append(cell)
        rows.append((metric.label, *cells))
    return rows


def result_table(report: dict[str, Any]) -> Table:
    """The table for a terminal."""
    table = Table(title=f"{report['base']}, {report['settings']['preset']}", caption="± standard error over items")
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for row in table_rows(report):
        table.add_row(*row)
    return table


def draw_losses(logs: dict[str, list[dict[str, float]]], file: Path) -> None:
    """Training loss by step of both fine-tunes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (name, log), (colour, marker) in zip(logs.items(), (("#0072B2", "o"), ("#D55E00", "s"))):
        steps, losses = [entry["step"] for entry in log], [entry["loss"] for entry in log]
        axes.plot(steps, losses, marker=marker, color=colour, markersize=4, label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats/token, mean since the last point)")
    axes.set_title("Fine-tuning on the same batches", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file)


def _markdown_table(report: dict[str, Any]) -> str:
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in table_rows(report)])


def _findings(report: dict[str, Any]) -> str:
    return "\n".join(f"- {entry['sentence']}" for entry in report["comparisons"])


def _fenced(text: str) -> str:
    # longer than any run of backticks inside
    fence = "`" * max(3, 1 + max((len(run) for run in _backtick_runs(text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def _backtick_runs(text: str) -> list[str]:
    return [run for run in "".join(c if c == "`" else " " for c in text).split() if run]


def _done(report: dict[str, Any]) -> str:
    settings, text, training = report["settings"], report["text"], report["training"]
    conversion, verification = report["conversion"], report["conversion"]["verification"]
    converted, control = training["converted after"], training["control after"]
    routing_rate = converted["routing_learning_rate"]
    facts = {
        "Text": (
            f"source files of the standard library of Python {text['python']}, divided by file; "
            f"{text['training_tokens']:,} tokens for training, {len(text['validation_files'])} windows of "
            f"{settings['tokens']} tokens for validation, each from another file. The texts are in `data/`."
        ),
        "Conversion": (
            f"{conversion['added_parameters']:,} parameters added to {conversion['copied_parameters']:,}; "
            f"{verification['verdict']}; max |Δlogits| {verification['max_abs_difference']:.3g}, and "
            f"{verification['control_difference']:.3g} with one parameter perturbed (the control, which must differ)."
        ),
        "Fine-tuning": (
            f"{settings['steps']} steps of {settings['batch']} x {settings['tokens']} tokens, AdamW, peak learning rate "
            f"{settings['learning_rate']:g} (routing: {'none' if routing_rate is None else f'{routing_rate:g}'}), float32, "
            f"seed {settings['seed']}; the unconverted model on the same batches as the control. "
            f"{converted['seconds']:.0f} s for the conversion, "
            f"{control['seconds']:.0f} s for the control."
        ),
        "Time and memory": (
            f"{report['seconds']['all']:.0f} s in all on {report['machine']['cores']} cores, peak "
            f"{report['peak_memory_gib']} GiB."
        ),
    }
    return "\n".join(f"- **{name}**: {fact}" for name, fact in facts.items())


def write_summary(file: Path, report: dict[str, Any]) -> None:
    """The whole run on one page."""
    settings, folders = report["settings"], report["folders"]
    samples = "\n\n".join(f"**{name}**\n\n{_fenced(report['models'][name]['sample'])}" for name in COLUMNS)
    figures = ["![training loss](training_loss.png)"]
    for name, title in FIGURES.items():
        drawn = {when: f"routing/{when}/{name}.png" for when in report["routing"]}
        # what has no meaning for a model is not drawn
        figures += [f"![{title} {when}]({path})" for when, path in drawn.items() if (file.parent / path).is_file()]
    text = f"""# {report["base"]}, converted to `{settings["preset"]}` and fine-tuned

Made by `{report["command"]}`; every number is in `report.json`.

{_markdown_table(report)}

± is the standard error over items. Perplexity is the exponential of the validation loss.

## What is noise and what is not

{report["noise"]}

{_findings(report)}

## What was done

{_done(report)}

| folder | |
|---|---|
{chr(10).join(f"| `{folder}` | {name} |" for name, folder in folders.items())}

`depthroute verify {folders["base"]} {folders["converted before"]}` repeats the verification,
`depthroute inspect {folders["converted after"]} --text data/validation.txt --out routing-again` the figures.

## Samples

The greedy continuation of one prompt.

{samples}

## Figures

{chr(10).join(figures)}
"""
    file.write_text(text, encoding="utf-8")


def write_tuned_card(converted: Path, tuned: Path, report: dict[str, Any]) -> None:
    """The conversion's card, with what training did to it."""
    card = (converted / "README.md").read_text(encoding="utf-8").replace(converted.name, tuned.name)
    # the command of the conversion made the folder that training started from
    card = card.replace(f" {shlex.quote(tuned.name)} --preset", f" {shlex.quote(converted.name)} --preset")
    settings = report["settings"]
    before = f"This folder is `{converted.name}` after fine-tuning; the verification above is of the start.\n\n"
    facts = (
        f"{settings['steps']} steps of {settings['batch']} x {settings['tokens']} tokens of Python's standard library, peak "
        f"learning rate {settings['learning_rate']:g}. The control is the source, fine-tuned on the same batches.\n\n"
    )
    section = (
        f"## Fine-tuning\n\n{before}{facts}{_markdown_table(report)}\n\n{report['noise']}\n\n{_findings(report)}\n\n"
    )
    section += f"Command: `{report['command']}`\n"
    (tuned / "README.md").write_text(f"{card.rstrip()}\n\n{section}", encoding="utf-8")
