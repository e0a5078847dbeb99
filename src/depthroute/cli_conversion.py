# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The commands about checkpoints: `convert`, `verify` and `revert`."""

from pathlib import Path

import typer


IGNORE_CODE = "Take SRC, which has code of its own, for the stock model that its config.json names; no code is run."

LAYERWISE = typer.Option(
    None,
    "--layerwise/--whole",
    help="Compute outputs with one layer in memory, or with all; default: one, where the model is more than one file or half of "
    "the free memory.",
    show_default=False,
)


def print_rows(rows: list[tuple[str, str]]) -> None:
    """Label and value, one line each however narrow the terminal, so that a phrase can be searched for."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print(f"{label:<{width}}  {value}")


def convert(
    source: str = typer.Argument(
        metavar="SRC",
        help="Model folder, .gguf file or hub id: Qwen3, Qwen3-MoE, Llama, Mistral or Qwen2, with a language head, a classifier "
        "or none, plain or in FP8; of our family; or AttnRes.",
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
    max_shard_size: str = typer.Option("5GB", help="Bytes of a weight file at most, such as 500MB."),
    layerwise: bool | None = LAYERWISE,
    ignore_code: bool = typer.Option(False, "--ignore-code", help=IGNORE_CODE),
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
        max_shard_size=max_shard_size,
        layerwise=layerwise,
        ignore_code=ignore_code,
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
    layerwise: bool | None = LAYERWISE,
    ignore_code: bool = typer.Option(False, "--ignore-code", help=IGNORE_CODE),
) -> None:
    """Compare a converted folder with its source: exit code 0 if bitwise equal, 1 if not."""
    from depthroute_conversion import verify as run

    from .files import check_json_file, write_json

    check_json_file(json_file)
    report = run(source, out, progress=True, layerwise=layerwise, ignore_code=ignore_code)
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


def card(
    folder: Path = typer.Argument(metavar="DIR", help="A DepthRoute model folder, converted or trained."),
    results: list[Path] = typer.Option(
        [], "--results", metavar="FILE", help="Of `depthroute eval --json`; repeatable."
    ),
    verification: Path | None = typer.Option(
        None, metavar="FILE", help="Of `depthroute verify --json`, of this folder."
    ),
    base_model: str | None = typer.Option(
        None, metavar="ORG/NAME", help="What was converted; none, where that is not on the hub."
    ),
    license_id: str | None = typer.Option(
        None, "--license", metavar="ID", help="As the hub spells it: apache-2.0, other."
    ),
    license_name: str | None = typer.Option(None, help="With --license other."),
    license_link: str | None = typer.Option(None, help="With --license other."),
    language: list[str] = typer.Option([], help="ISO 639 code; repeatable."),
) -> None:
    """Renew a folder's README.md from what its commands wrote; exit code 1 where the hub still lacks something."""
    from depthroute_conversion import refresh_card as run

    from .errors import CheckFailed

    lacking = run(folder, results, verification, base_model, license_id, license_name, license_link, language)
    print(f"written to {folder / 'README.md'}")
    if lacking:
        raise CheckFailed(f"{folder / 'README.md'}: {'; '.join(lacking)}")


def push(
    folder: Path = typer.Argument(metavar="DIR", help="A DepthRoute model folder, converted or trained."),
    repository: str = typer.Argument(metavar="ORG/NAME", help="The model on the hub; made where there is none."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Check, and list what would be sent; no network, no token, nothing written."
    ),
    private: bool | None = typer.Option(None, "--private/--public", help="Of a new repository.", show_default=False),
    revision: str | None = typer.Option(
        None, "--revision", "--branch", help="Branch to write to; made where there is none."
    ),
    message: str | None = typer.Option(None, help="Of the commit."),
    create_pr: bool = typer.Option(False, "--create-pr", help="As a pull request."),
    overwrite: bool = typer.Option(
        False,
        "--overwrite",
        help="Write to a repository that has files: replaces those of the same name, and all weights.",
    ),
    allow_unverified: bool = typer.Option(False, "--allow-unverified", help="Publish without a known verification."),
    exclude: list[str] = typer.Option([], metavar="PATTERN", help="Files or folders that stay here; repeatable."),
    results: list[Path] = typer.Option([], "--results", metavar="FILE", help="As for `depthroute card`."),
) -> None:
    """Publish a folder as a model of the hub, with its card renewed."""
    from depthroute_conversion import PushOptions
    from depthroute_conversion import push as run

    options = PushOptions(private, revision, message, create_pr, overwrite, allow_unverified, exclude)
    print_rows(run(folder, repository, options, results=results, dry_run=dry_run).rows())
    print("a dry run: nothing was sent" if dry_run else f"published as {repository}")
