# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The commands about checkpoints: `convert`, `verify` and `revert`."""

from pathlib import Path

import typer


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Label and value, one line each however narrow the terminal, so that a phrase can be searched for."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


def convert(
    source: str = typer.Argument(
        metavar="SRC", help="Model folder, .gguf file or hub id: stock, of our family, or AttnRes."
    ),
    out: Path = typer.Argument(metavar="OUT", help="Folder to write."),
    preset: str | None = typer.Option(
        None, help="See `depthroute presets`; default: delta-block, or that of a source with routing."
    ),
    block_size: int | None = typer.Option(None, help="Layers per block; default ceil(L/8). For presets with blocks."),
    plain: bool | None = typer.Option(
        None,
        "--plain/--anchored",
        help="The papers' form: not equal to a stock source at the start; default: anchored, or that of a source with routing.",
        show_default=False,
    ),
    heads: int | None = typer.Option(None, help="Depth heads; they divide the width.", show_default="1"),
    settings: list[str] = typer.Option([], "--set", metavar="FIELD=VALUE", help="Any configuration field; repeatable."),
    dtype: str | None = typer.Option(None, help="float32, bfloat16 or float16; default: the source's."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT once the new folder is complete."),
) -> None:
    """Convert a checkpoint to depth routing and prove that nothing changed."""
    from depthroute_conversion import convert as run
    from depthroute_conversion.options import parse_settings

    report = run(
        source,
        out,
        preset=preset,
        block_size=block_size,
        anchored=None if plain is None else not plain,
        num_heads=heads,
        dtype=dtype,
        overwrite=overwrite,
        fields=parse_settings(settings),
        progress=True,
    )
    assert report.verification is not None
    print_rows(report.rows() + report.verification.rows())
    print(f"written to {out}")


def verify(
    source: str = typer.Argument(metavar="SRC", help="What the folder was converted from."),
    out: Path = typer.Argument(metavar="OUT", help="The converted folder."),
    allow_gap: bool = typer.Option(
        False, "--allow-gap", help="Accept a gap at step 0 where equality is not promised (plain, mhc)."
    ),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write the figures here too."),
) -> None:
    """Compare a converted folder with its source: exit code 0 if bitwise equal, 1 if not."""
    from depthroute_conversion import verify as run

    from .files import check_json_file, write_json

    check_json_file(json_file)
    report = run(source, out, progress=True)
    print_rows(report.rows())
    if json_file is not None:
        failure = report.failure(allow_gap)
        write_json(json_file, {**report.to_dict(), "allow_gap": allow_gap, "failure": failure})
    report.check(allow_gap)


def revert(
    folder: Path = typer.Argument(metavar="DIR", help="A folder that `depthroute convert` wrote."),
    out: Path = typer.Argument(metavar="OUT", help="Folder to write."),
    drop_routing: bool = typer.Option(False, "--drop-routing", help="Give up trained routing; prints what that loses."),
    as_is: bool = typer.Option(
        False, "--as-is", help="Accept weights that are not the source's bytes: trained, cast or dequantized."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace OUT once the new folder is complete."),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write the figures here too."),
) -> None:
    """Give back the stock model that a folder was converted from, byte for byte."""
    from depthroute_conversion import revert as run

    from .files import check_json_file, write_json

    check_json_file(json_file)
    report = run(folder, out, drop_routing=drop_routing, as_is=as_is, overwrite=overwrite, progress=True)
    print_rows(report.rows())
    if json_file is not None:
        write_json(json_file, report.to_dict())
    print(f"written to {out}")
