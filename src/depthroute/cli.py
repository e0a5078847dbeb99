# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The command line: convert · verify · train · eval · inspect · bench · demo · presets.

Each command parses its options and calls one function of the package; heavy imports wait until a command runs. Exit codes:
0 done, 1 a check failed, 2 refused.
"""

import sys

import typer
from rich.console import Console
from rich.table import Table

from .errors import CheckFailed, Refused, one_line


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
    """Exit codes: 0 done, 1 a check failed, 2 refused."""
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
            name, "\n".join(f"{k} = {v}" for k, v in preset.fields.items()), preset.blocks, preset.equation, preset.paper
        )
    Console().print(table)


def main() -> None:
    """Entry point of the `depthroute` command: errors that a user can mend are one line, not a traceback."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        app()
    except CheckFailed as error:
        print(f"depthroute: check failed: {one_line(error)}", file=sys.stderr)
        sys.exit(1)
    except (Refused, ValueError, OSError, StrictDataclassError) as error:
        print(f"depthroute: refused: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
