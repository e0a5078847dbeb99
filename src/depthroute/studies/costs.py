# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""What a preset costs: the committed results of `depthroute bench`, read as data of `depthroute_kernels`."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import depthroute_kernels.benchmarks
from depthroute_kernels.benchmarks.report import CHECKPOINTED, MEASURES

from ..errors import Refused, one_line
from ..modeling.configuration_depthroute import PRESETS


RESULTS = Path(depthroute_kernels.benchmarks.__file__).parent / "results"
RESULTS_URL = "../kernels/depthroute_kernels/benchmarks/results"
"""Where the files lie, seen from a card."""


@dataclass(frozen=True)
class Ratio:
    """A measure of a preset over the same of stock Qwen3; quartiles over rounds where it is a time, else None."""

    median: float
    quartiles: tuple[float, float] | None

    @property
    def low(self) -> float:
        return self.median if self.quartiles is None else self.quartiles[0]

    @property
    def high(self) -> float:
        return self.median if self.quartiles is None else self.quartiles[1]

    def __str__(self) -> str:
        spread = "" if self.quartiles is None else f" ({self.quartiles[0]:.2f}–{self.quartiles[1]:.2f})"
        return f"{self.median:.2f}{spread}"


@dataclass(frozen=True)
class Bench:
    """One result of `depthroute bench`: its file's name, and what the file holds."""

    file: str
    result: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return self.result["settings"]

    @property
    def plain(self) -> bool:
        """Whether it measured presets as they are: not anchored, one depth head, their own block size, no checkpointing."""
        own_form = self.settings["depth_heads"] == 1 and self.settings["block_size"] is None
        return own_form and not self.settings["anchored"] and not self.settings["checkpointing"]

    @property
    def anchored(self) -> bool:
        """The same as they start in a conversion."""
        own_form = self.settings["depth_heads"] == 1 and self.settings["block_size"] is None
        return own_form and self.settings["anchored"] and not self.settings["checkpointing"]

    @property
    def on_gpu(self) -> bool:
        return self.settings["device"] != "cpu"

    @property
    def measures(self) -> dict[str, str]:
        """What it is there to show, with a label: with checkpointing that is only what checkpointing changes."""
        return CHECKPOINTED if self.settings["checkpointing"] else MEASURES

    @property
    def link(self) -> str:
        return f"[{self.file}]({RESULTS_URL}/{self.file})"

    @property
    def configuration(self) -> str:
        """Model, work and number format in one line."""
        own = self.settings
        threads = "" if self.on_gpu else f", {own['threads']} thread{'s' if own['threads'] != 1 else ''}"
        heads = "" if own["depth_heads"] == 1 else f", {own['depth_heads']} depth heads"
        return (
            f"{own['layers']} layers, width {own['width']}, {own['batch']} × {own['tokens']} tokens, {own['dtype']}, "
            f"{'anchored' if own['anchored'] else 'plain'}{heads}, {own['device']}{threads}, {own['repeats']} rounds"
        )

    @property
    def machine(self) -> str:
        """Processor (or GPU), cores and versions in one line."""
        own = self.result["machine"]
        where = own.get("gpu") or f"{own['cpu']}, {own['cores']} cores"
        return f"{where}, torch {own['torch']}, transformers {own['transformers']}"

    def systems(self, preset: str) -> dict[str, dict[str, Any]]:
        """What was measured of a preset: the preset itself, and as other backends compute it."""
        return {name: one for name, one in self.result["systems"].items() if one["preset"] == preset}

    def ratio(self, preset: str, measure: str) -> Ratio | None:
        """Of the preset as `depth_backend="auto"` computes it; None where that was not measured."""
        system = self.result["systems"].get(preset)
        return None if system is None else ratio_of(system, measure)


def ratio_of(system: dict[str, Any], measure: str) -> Ratio:
    """One measure of one system."""
    ratio = system[measure]["ratio"]
    if isinstance(ratio, dict):
        return Ratio(float(ratio["median"]), (float(ratio["q1"]), float(ratio["q3"])))
    return Ratio(float(ratio), None)


def read_benches(folder: Path = RESULTS) -> list[Bench]:
    """The results of whole models in a folder (by default those that come with the package), by name of the file. Those of
    single reads (`depthroute bench operator`) have `cases` and are passed over.

    Raises:
        Refused: a file that `depthroute bench --json` did not write.
    """
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            if "cases" in result:
                continue
            bench = Bench(file.name, result)
            _check(bench)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise Refused(
                f"{file.name}: {type(error).__name__}: {one_line(error)}; allowed: a file that `depthroute bench --json` wrote"
            ) from error
        found.append(bench)
    return found


def _check(bench: Bench) -> None:
    for text in (bench.configuration, bench.machine, bench.result["command"]):
        if not isinstance(text, str):
            raise TypeError(f"command: got {text!r}")
    for system in bench.result["systems"].values():
        if system["preset"] not in ("", *PRESETS):  # stock has none
            raise ValueError(f"preset: got {system['preset']!r}")
        for measure in bench.measures:
            ratio_of(system, measure)


def main_bench(benches: Iterable[Bench], anchored: bool = False) -> Bench | None:
    """The result that one number per preset is taken from: the one of most presets, of those the smallest model, on a CPU
    before a GPU; None where no result has presets in that form."""
    of_form = [bench for bench in benches if (bench.anchored if anchored else bench.plain)]
    order = sorted(of_form, key=lambda bench: (bench.on_gpu, -_presets(bench), bench.settings["layers"], bench.file))
    return order[0] if order else None


def _presets(bench: Bench) -> int:
    return sum(name in PRESETS for name in bench.result["systems"])


def not_measured(bench: Bench | None) -> list[str]:
    """The presets that a result has no number for."""
    return [name for name in PRESETS if bench is None or name not in bench.result["systems"]]


def cheapest(bench: Bench | None) -> str | None:
    """The preset that routes and has the shortest train step; of those whose quartiles overlap its own, the one that keeps the
    fewest bytes, which are counted. None where none was measured."""
    routed = {
        name: ratio
        for name, preset in PRESETS.items()
        if preset.fields["residual_type"] in ("depth_attention", "dual_stream")
        and bench is not None
        and (ratio := bench.ratio(name, "train_step")) is not None
    }
    if bench is None or not routed:
        return None
    shortest = min(routed.values(), key=lambda ratio: ratio.median)
    alike = [name for name, ratio in routed.items() if ratio.low <= shortest.high]
    return min(alike, key=lambda name: ratio_of(bench.result["systems"][name], "saved_bytes").median)


def cost_chapter(preset: str, benches: Sequence[Bench]) -> str:
    """All that was measured of a preset, as Markdown: a table per result."""
    parts = []
    for bench in benches:
        systems = bench.systems(preset)
        if not systems:
            continue
        labels = bench.measures
        lines = [f"| | {' | '.join(labels.values())} |", "|---" * (len(labels) + 1) + "|"]
        for name, system in systems.items():
            lines.append(f"| `{name}` | {' | '.join(str(ratio_of(system, key)) for key in labels)} |")
        parts.append(f"{bench.link}: {bench.configuration}; {bench.machine}.\n\n" + "\n".join(lines) + "\n")
    if not parts:
        return "Not measured: no committed result of `depthroute bench` has this preset.\n"
    explained = (
        "Ratio to stock Qwen3 in the same run (checkpointed: to stock with checkpointing): median, and quartiles over rounds where it is a time. Decode: one cached token; decode ops: torch's operations for it. "
        "Saved bytes: what the forward pass keeps for backward.\n"
    )
    return explained + "\n" + "\n".join(parts)
