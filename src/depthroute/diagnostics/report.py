# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""One page that holds everything: figures inside the file, no network, no script."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from typing import NamedTuple

from .diagnose import Diagnosis


class Section(NamedTuple):
    """A heading of the page.

    Attributes:
        part: the part of a `Diagnosis` that it shows.
        figures: names of figures, as `plots.draw` has them.
        title, text: what it is and how to read it.
    """

    part: str
    figures: tuple[str, ...]
    title: str
    text: str


SECTIONS = (
    Section(
        "reads",
        ("routing_heatmap", "routing_depth"),
        "What each read attends to",
        "The map has one row per depth read and one column per source; a bright cell is a source that the read takes much "
        "of, grey means that the read does not have it. Rows that are one colour throughout route nothing in particular. The "
        "lines show how decided each read is: a largest weight above the dashed line and an entropy below it mean routing "
        "that is sharper than uniform. Reads on the dashed line are collapsed, or not trained yet.",
    ),
    Section(
        "source_usage",
        ("source_usage",),
        "Which sources are used",
        "On the left the mean weight of each source in the reads that have it; the black mark is what uniform routing would "
        "give, so a bar above its mark is a source that is sought. On the right the same mass by distance between the place "
        "where a source was complete and the read: mass far to the right means that old representations are retrieved.",
    ),
    Section(
        "source_similarity",
        ("source_similarity",),
        "How alike the sources are",
        "Cosine of pairs of sources of one read, over depth. Sources near 1 cannot be told apart by a softmax, and routing "
        "over them becomes uniform: with states as sources it rises with depth, which the Delta paper names as the cause of "
        "collapse. Near 0 the sources are different directions, and choosing among them has an effect.",
    ),
    Section(
        "route_divergence",
        ("route_divergence",),
        "Whether attention's two routes differ",
        "Jensen–Shannon divergence between the routes of queries and keys, and of values. At 0 both routes are the same and "
        "the second one is not used; at ln 2 ≈ 0.69 they take disjoint sources.",
    ),
    Section(
        "stream_cka",
        ("stream_cka",),
        "How alike the streams are",
        "Linear CKA between one stream at one depth (row) and the other stream at another (column), by an unbiased estimator: "
        "1 is the same representation up to rotation, 0 unrelated (chance may bring it slightly below). A bright "
        "diagonal in a dark map means streams that agree only at the same depth; a map that is bright all over means redundant "
        "streams.",
    ),
    Section(
        "rescue_gain",
        ("rescue_gain",),
        "What each stream carries",
        "All streams that reads see are replaced by those of another text, then one of them is given its own back. The gain is "
        "the part of the output that this restores: 0 nothing, 1 all. Similar bars mean that the work is shared; one tall and "
        "one short bar mean that one stream does it alone. Below 0 the mixture is worse than the other text's output.",
    ),
    Section(
        "norm_growth",
        ("norm_growth",),
        "How norms grow",
        "Length of the residual stream, of what each sublayer reads and of what it writes. The stream of a standard residual "
        "grows with depth, which dilutes what late layers add; a replacing read breaks that growth for what is read. Where "
        "mean and median lie apart, a few tokens have massive activations.",
    ),
)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 76rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem } h2 { font-size: 1.2rem; margin-top: 2.4rem; border-top: 1px solid #ddd; padding-top: 1rem }
p { max-width: 50rem } .note { color: #555 }
figure { margin: 1rem 0 } img { max-width: 100%; height: auto }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem } .pair h3 { font-size: 1rem; margin: 0 }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; border-bottom: 1px solid #e3e3e3; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums }
"""


def _image(name: str, png: bytes, title: str) -> str:
    data = b64encode(png).decode()
    return f'<figure><img id="{escape(name)}" alt="{escape(title)}" src="data:image/png;base64,{data}"></figure>'


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if isfinite(value) else "not defined"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>"
        + f"<td>{escape(row[0])}</td>"
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{cells}</tr>{body}</table>"


def _page(title: str, description: str, body: Sequence[str]) -> str:
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="note">{escape(description)}</p>',
            *body,
            "</body></html>\n",
        ]
    )


def _fields(fields: Mapping[str, object]) -> str:
    rows = [(name, str(value)) for name, value in fields.items()]
    return (
        f"<details><summary>Routing fields of the configuration</summary>{_table(('field', 'value'), rows)}</details>"
    )


def report_page(
    title: str, description: str, diagnosis: Diagnosis, figures: Mapping[str, bytes], fields: Mapping[str, object]
) -> str:
    """The report of one model as HTML.

    Args:
        title, description: heading, and the line below it: model, text, tokens.
        figures: PNG files by name.
        fields: the routing fields of the configuration.
    """
    rows = [(name, _number(value)) for name, value in diagnosis.summary().items()]
    body = [
        "<h2>In short</h2>",
        "<p>Means over tokens, heads and reads; padding is left out of everything.</p>",
        _table(("quantity", "value"), rows),
        _fields(fields),
    ]
    for section in SECTIONS:
        body.append(f'<h2 id="{section.part}">{escape(section.title)}</h2>')
        if section.part in diagnosis.absent:
            body.append(f'<p class="note">Not here: {escape(diagnosis.absent[section.part])}.</p>')
            continue
        body.append(f"<p>{escape(section.text)}</p>")
        body.extend(_image(name, figures[name], section.title) for name in section.figures)
    return _page(title, description, body)


def comparison_page(
    names: tuple[str, str],
    description: str,
    diagnoses: tuple[Diagnosis, Diagnosis],
    figures: tuple[Mapping[str, bytes], Mapping[str, bytes]],
    overlay: bytes,
    fields: tuple[Mapping[str, object], Mapping[str, object]],
) -> str:
    """Two models side by side as HTML: their numbers in one table, their curves in one figure, then each section twice."""
    first, second = (diagnosis.summary() for diagnosis in diagnoses)
    rows = [
        (name, _number(first.get(name)), _number(second.get(name)))
        for name in sorted({**first, **second}, key=[*first, *(name for name in second if name not in first)].index)
    ]
    different = {
        name: (str(fields[0].get(name)), str(fields[1].get(name)))
        for name in fields[0]
        if fields[0].get(name) != fields[1].get(name)
    }
    body = [
        "<h2>In short</h2>",
        "<p>Means over tokens, heads and reads; padding is left out of everything. “–”: has no meaning for that model.</p>",
        _table(("quantity", *names), rows),
        "<h2>Configurations</h2>",
        _table(("field that differs", *names), [(name, *values) for name, values in different.items()])
        if different
        else "<p>All routing fields are the same.</p>",
        "<h2>On the same axes</h2>",
        "<p>Each model over its relative depth. Colour, marker and line style all tell the models apart.</p>",
        _image("comparison", overlay, "Both models by depth"),
    ]
    for section in SECTIONS:
        body.append(f'<h2 id="{section.part}">{escape(section.title)}</h2><p>{escape(section.text)}</p>')
        if all(section.part in diagnosis.absent for diagnosis in diagnoses):
            reasons = dict.fromkeys(diagnosis.absent[section.part] for diagnosis in diagnoses)
            body.append(f'<p class="note">Not here: {escape("; ".join(reasons))}.</p>')
            continue
        body.append('<div class="pair">')
        for letter, name, diagnosis, pictures in zip("ab", names, diagnoses, figures):
            body.append(f"<div><h3>{escape(name)}</h3>")
            if section.part in diagnosis.absent:
                body.append(f'<p class="note">Not here: {escape(diagnosis.absent[section.part])}.</p>')
            else:
                body.extend(_image(f"{letter}_{one}", pictures[one], section.title) for one in section.figures)
            body.append("</div>")
        body.append("</div>")
    return _page(f"{names[0]} beside {names[1]}", description, body)
