# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`model_cards/README.md`: which variant for what, and what it costs. By need, one plot, then all presets."""

from collections.abc import Mapping, Sequence

from ..modeling.configuration_depthroute import PRESETS
from .advice import Need, own_advice
from .costs import Bench, cheapest, main_bench, not_measured
from .evidence import CONTROL, Results, Row, all_rows, best_rows, directions, scale_sentence
from .overview_plot import panels
from .paired import WINDOWS
from .preset_facts import paper_link
from .wording import listed, plural


OVERVIEW, PLOT = "README.md", "overview.png"
ABSENT = "–"


def overview(studies: Sequence[Results], benches: Sequence[Bench]) -> str:
    """The overview as Markdown.

    Args:
        studies: what `depthroute reproduce` wrote.
        benches: what `depthroute bench` wrote.
    """
    rows = all_rows(studies)
    return f"""# Which variant, for what, and at what cost

{_findings(rows)}

{_needs_table(rows, benches)}{_plot(studies, benches)}
## All presets

{_presets_table(rows, benches)}
{_notes(rows, benches)}"""


def _named(preset: str) -> str:
    return f"[`{preset}`]({preset}.md)"


def _findings(rows: Sequence[Row]) -> str:
    """What all comparisons with `standard` come to."""
    if not rows:
        return (
            "**No evidence yet**: no study's results are committed here. The advice is by the papers and by cost; what the papers "
            "report was not measured."
        )
    told = [part for converts in (False, True) if (part := _found(rows, converts))]
    lines = [*told, scale_sentence(rows), "The advice below is by the papers, by cost and by how a variant starts."]
    return "\n".join(f"- {line}" for line in lines)


def _found(rows: Sequence[Row], converts: bool) -> str:
    best = best_rows(rows, converts)
    compared = {
        name: where
        for name, where in directions(best).items()
        if best[name].against_preset == CONTROL and not best[name].variation
    }
    if not compared:
        return ""
    parts = []
    for verb, wanted in (("lower with", -1), ("higher with", 1), ("too little apart to tell with", 0)):
        if names := [f"`{name}`" for name, where in compared.items() if where == wanted]:
            parts.append(f"{verb} {listed(names)}")
    where = "After a conversion and fine-tuning" if converts else "Trained from scratch"
    return f"{where}: of {plural(len(compared), 'preset')} compared with `{CONTROL}` the validation loss is {'; '.join(parts)}."


def _needs_table(rows: Sequence[Row], benches: Sequence[Bench]) -> str:
    lines = [
        f"| what you want | preset | train step | decode | saved bytes | loss against `{CONTROL}` | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for need in own_advice()[1]:
        presets = _chosen(need, benches)
        if not presets:
            lines.append(f"| {need.need} | not measured | {ABSENT} | {ABSENT} | {ABSENT} | {ABSENT} | {need.because} |")
        for index, preset in enumerate(presets):
            converts = need.at == "conversion"
            bench = (main_bench(benches, anchored=True) if converts else None) or main_bench(benches)
            costs = [_ratio(bench, preset, measure) for measure in ("train_step", "decode_token", "saved_bytes")]
            found = "is itself the control" if preset == CONTROL else _difference(preset, best_rows(rows, converts))
            told = (need.need, need.because) if index == 0 else ("", "")
            lines.append(f"| {told[0]} | {_named(preset)} | {' | '.join(costs)} | {found} | {told[1]} |")
    return "\n".join(lines) + "\n"


def _chosen(need: Need, benches: Sequence[Bench]) -> list[str]:
    if not need.cheapest:
        return list(need.presets)
    found = cheapest(main_bench(benches))
    return [] if found is None else [found]


def _ratio(bench: Bench | None, preset: str, measure: str) -> str:
    ratio = None if bench is None else bench.ratio(preset, measure)
    return ABSENT if ratio is None else f"{ratio.median:.2f}"


def _difference(preset: str, best: Mapping[str, Row]) -> str:
    """`−0.0123 ± 0.0040 (study)`, bold where it is clear of zero; names what it is against, a variation, a single seed."""
    row = best.get(preset)
    if row is None or row.difference is None:
        return ABSENT
    found = row.difference
    half = "" if found.half_width is None else f" ± {found.half_width:.4f}"
    value = f"{found.mean:+.4f}{half}".replace("-", "−")
    told = [f"**{value}**" if directions(best)[preset] else value]
    if row.against_preset != CONTROL:
        told.append(f"against `{row.against}`")
    if row.variation:
        told.append(f"as `{row.arm}`")
    if found.over == WINDOWS:
        told.append("of one seed")
    return f"{' '.join(told)} ({row.link})"


def _plot(studies: Sequence[Results], benches: Sequence[Bench]) -> str:
    drawn = panels(studies, benches)
    if not drawn:
        return ""
    parts = []
    for panel in drawn:
        missing = [f"`{name}`" for name in PRESETS if name not in [CONTROL, *(point.preset for point in panel.points)]]
        absent = (
            f"; not shown, for want of a cost or of a difference against `{CONTROL}`: {listed(missing)}"
            if missing
            else ""
        )
        start = "Converted" if panel.converts else "From scratch"
        parts.append(f"{start}: costs of {panel.bench.link}{absent}.")
    rule = (
        f"A point per preset: of its comparisons with `{CONTROL}` the one of the larger size and the study that has most presets. "
        "Points of different studies are of different models and texts: compare inside one study."
    )
    return f"\n![train step against difference of loss, by preset]({PLOT})\n\n{rule} {' '.join(parts)}\n"


def _presets_table(rows: Sequence[Row], benches: Sequence[Bench]) -> str:
    main, anchored = main_bench(benches), main_bench(benches, anchored=True)
    steps = {
        f"train step, {bench.settings['layers']} layers{', GPU' if bench.on_gpu else ''}": (bench, "train_step")
        for bench in _plain(benches)
    }
    if anchored is not None:
        steps["anchored"] = (anchored, "train_step")
    if main is not None:
        steps |= {"decode": (main, "decode_token"), "saved bytes": (main, "saved_bytes")}
    head = ["preset", *steps, "loss, from scratch", "loss, converted", "from"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    best = [best_rows(rows, converts) for converts in (False, True)]
    for preset in PRESETS:
        costs = [_ratio(bench, preset, measure) for bench, measure in steps.values()]
        found = [ABSENT if preset == CONTROL else _difference(preset, of_start) for of_start in best]
        lines.append(f"| {' | '.join([_named(preset), *costs, *found, paper_link(preset)])} |")
    return "\n".join(lines) + "\n"


def _plain(benches: Sequence[Bench]) -> list[Bench]:
    """Those of presets as they are, by depth."""
    return sorted((bench for bench in benches if bench.plain), key=lambda bench: (bench.settings["layers"], bench.file))


def _notes(rows: Sequence[Row], benches: Sequence[Bench]) -> str:
    notes = []
    if rows:
        notes.append(
            f"Loss: validation loss minus that of `{CONTROL}` in nats per token, paired over seeds, ± half the 95% interval; lower is "
            f"better; bold: clear of zero with 95% over all presets that start so; one seed, whose interval is over validation windows, is "
            f"never bold. Where a study has no `{CONTROL}`, against its baseline, which is named.",
        )
    main = main_bench(benches)
    if main is not None:
        notes.append(
            f"Cost: median ratio to stock Qwen3. {main.link}: {main.configuration}; {main.machine}. Quartiles are on the cards."
        )
        if others := [
            bench for bench in (*_plain(benches), main_bench(benches, anchored=True)) if bench not in (None, main)
        ]:
            told = "; ".join(f"{bench.link}: {bench.configuration}" for bench in others if bench is not None)
            notes.append(f"Train steps in the other columns: {told}.")
        if main_bench(benches, anchored=True) is not None:
            notes.append("Costs of a retrofit are those of anchored reads.")
        if missing := not_measured(main):
            notes.append(f"No cost was measured of {listed([f'`{name}`' for name in missing])}.")
    else:
        notes.append("Cost: no result of `depthroute bench` is committed.")
    if not any(bench.on_gpu for bench in benches):
        notes.append("No cost was measured on a GPU.")
    without = [f"`{name}`" for name in PRESETS if not any(row.preset == name for row in rows)]
    if rows and without:
        notes.append(f"In no study: {listed(without)}.")
    if rows:
        pages = {row.page: row.study + ("" if row.size == "cpu" else f" ({row.size})") for row in rows}
        notes.append(
            f"Studies: {', '.join(f'[{name}]({page})' for page, name in pages.items())}; what papers report is there, as theirs."
        )
    notes.append("Written by `depthroute cards` from the result files; a test compares the two.")
    return "".join(f"- {note}\n" for note in notes)
