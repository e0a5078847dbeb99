# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The commands about kernels: `bench`, `bench operator` and `check`."""

from pathlib import Path

import typer
from rich.console import Console

from .errors import Refused


bench = typer.Typer(invoke_without_command=True)


def names(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def numbers(field: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas.

    Raises:
        Refused: something else.
    """
    wrong = [name for name in names(text) if not name.isdecimal()]
    if wrong:
        raise Refused(f"{field}: got {wrong[0]!r}, allowed: whole numbers by commas")
    return tuple(int(name) for name in names(text))


@bench.callback()
def models(
    context: typer.Context,
    presets: str | None = typer.Option(None, help="Names by commas; default: all."),
    backend: str = typer.Option("auto", help="Values of depth_backend by commas: auto, reference, cpu, triton."),
    layers: int = typer.Option(12, help="Layers of the model."),
    width: int = typer.Option(256, help="Hidden size."),
    heads: int = typer.Option(8, help="Attention heads."),
    kv_heads: int = typer.Option(4, help="Key and value heads."),
    head_dim: int = typer.Option(32, help="Width of an attention head."),
    intermediate: int = typer.Option(768, help="Width of the MLP."),
    vocab: int = typer.Option(1024, help="Size of the vocabulary."),
    block_size: int | None = typer.Option(None, help="Layers per block; default ceil(L/8). For presets with blocks."),
    depth_heads: int = typer.Option(1, help="Depth heads, for presets with depth reads; they divide the width."),
    anchored: bool = typer.Option(False, "--anchored", help="Measure anchored reads."),
    checkpointing: bool = typer.Option(
        False, "--checkpointing", help="Measure train steps with gradient checkpointing too."
    ),
    batch: int = typer.Option(2, help="Sequences of a step."),
    tokens: int = typer.Option(256, help="Tokens of a sequence, and in the cache before decoding."),
    dtype: str = typer.Option("float32", help="float32, bfloat16, float16 or float64."),
    device: str = typer.Option("cpu", help="cpu, cuda or cuda:N."),
    threads: int = typer.Option(1, help="Threads of torch."),
    repeats: int = typer.Option(15, help="Rounds that count."),
    warmup: int = typer.Option(2, help="Rounds before them."),
    seed: int = typer.Option(0, help="Of weights and token ids."),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write the result here too."),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Draw the ratios into a .png, .svg or .pdf file."),
) -> None:
    """Measure what presets cost beside stock Qwen3, in one interleaved run; `bench operator`: single reads."""
    if context.invoked_subcommand is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
        if given:
            option = "--" + given[0].replace("_file", "").replace("_", "-")
            raise Refused(f"{option}: stands before {context.invoked_subcommand!r}, allowed: options behind it")
        return
    from depthroute_kernels.benchmarks import BenchmarkSettings, run_benchmark
    from depthroute_kernels.benchmarks.report import check_plot_file, draw, result_tables

    from .files import check_json_file, write_json
    from .modeling.configuration_depthroute import PRESETS

    check_json_file(json_file)
    check_plot_file(plot)
    settings = BenchmarkSettings(
        presets=tuple(PRESETS) if presets is None else names(presets),
        backend=names(backend),
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        block_size=block_size,
        depth_heads=depth_heads,
        anchored=anchored,
        checkpointing=checkpointing,
        batch=batch,
        tokens=tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        repeats=repeats,
        warmup=warmup,
        seed=seed,
    )
    result = run_benchmark(settings, progress=True)
    if json_file is not None:
        write_json(json_file, result)
    if plot is not None:
        draw(result, plot)
    for table in result_tables(result):
        Console().print(table)


@bench.command()
def operator(
    sources: str = typer.Option("4,8,16,32,57", help="Numbers of sources by commas."),
    schedules: str = typer.Option("full,block", help="full: one read; block: the reads of one block."),
    forms: str = typer.Option("plain,anchored", help="plain, added (a base, as delta has it), anchored."),
    queries: int = typer.Option(8, help="Reads of a block."),
    width: int = typer.Option(256, help="Width of a source."),
    batch: int = typer.Option(2, help="Sequences."),
    tokens: int = typer.Option(256, help="Tokens of a sequence."),
    dtype: str = typer.Option("float32", help="float32, bfloat16, float16 or float64."),
    device: str = typer.Option("cpu", help="cpu, cuda or cuda:N."),
    implementations: str | None = typer.Option(None, help="Ours, by commas; default: all."),
    peers: bool = typer.Option(True, help="Measure other libraries that are installed."),
    threads: int = typer.Option(1, help="Threads of torch."),
    repeats: int = typer.Option(15, help="Rounds that count."),
    warmup: int = typer.Option(3, help="Rounds before them."),
    copy_mib: int = typer.Option(64, help="MiB of the copy that measures what memory can do."),
    seed: int = typer.Option(0, help="Of the tensors."),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write the result here too."),
    plot: Path | None = typer.Option(None, metavar="FILE", help="Draw the shares into a .png, .svg or .pdf file."),
) -> None:
    """Measure single reads, forward and backward, ours beside other libraries', against what memory can do."""
    from depthroute_kernels.benchmarks import OperatorSettings, run_operator_benchmark
    from depthroute_kernels.benchmarks.operator_report import draw, result_tables
    from depthroute_kernels.benchmarks.report import check_plot_file

    from .files import check_json_file, write_json

    check_json_file(json_file)
    check_plot_file(plot)
    settings = OperatorSettings(
        sources=numbers("sources", sources),
        schedules=names(schedules),
        forms=names(forms),
        queries=queries,
        width=width,
        batch=batch,
        tokens=tokens,
        dtype=dtype,
        device=device,
        peers=peers,
        threads=threads,
        repeats=repeats,
        warmup=warmup,
        copy_mib=copy_mib,
        seed=seed,
        **({} if implementations is None else {"implementations": names(implementations)}),
    )
    result = run_operator_benchmark(settings, progress=True)
    if json_file is not None:
        write_json(json_file, result)
    if plot is not None:
        draw(result, plot)
    for table in result_tables(result):
        Console().print(table)


def check(
    full: bool = typer.Option(False, "--full", help="Every combination of the cases: hours, not seconds."),
    implementation: str | None = typer.Option(None, help="reference, cpu or triton; default: all that can run."),
    device: str | None = typer.Option(None, help="cpu, cuda or cuda:N; default: the first GPU, otherwise the CPU."),
    threads: int = typer.Option(1, help="Threads of torch."),
    json_file: Path | None = typer.Option(None, "--json", metavar="FILE", help="Write the result here too."),
) -> None:
    """Test the depth reads on this machine: values, weights, gradients, reruns, the anchored start."""
    from depthroute_kernels.check import CheckSettings, result_table, run_checks

    from .errors import CheckFailed
    from .files import check_json_file, write_json

    check_json_file(json_file)
    settings = CheckSettings(full=full, implementation=implementation, device=device, threads=threads)
    result = run_checks(settings, progress=True)
    if json_file is not None:
        write_json(json_file, result)
    Console().print(result_table(result))
    if result["failures"]:
        more = f" (and {len(result['failures']) - 1} more)" if len(result["failures"]) > 1 else ""
        raise CheckFailed(result["failures"][0] + more)
