# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Reports: every part that has a meaning, in one file that needs nothing else, for one model and for two."""

import json
from base64 import b64decode
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
from conftest import randomize_routing, tiny_config, tiny_qwen3_config
from text_model_helpers import run_command, save_folder

import depthroute
from depthroute import PRESETS, DepthRouteForCausalLM
from depthroute.diagnostics import compare, diagnose
from depthroute.diagnostics.record import token_batches, token_pairs
from depthroute.diagnostics.report import SECTIONS


PARTS = [
    "reads",
    "source_usage",
    "source_similarity",
    "route_divergence",
    "stream_cka",
    "rescue_gain",
    "norm_growth",
]
ROUTED = {"reads", "source_usage", "source_similarity", "norm_growth"}
STREAMS = {"stream_cka", "rescue_gain"}
PRESENT = {
    **dict.fromkeys(PRESETS, ROUTED),
    "rd-attnres": ROUTED | {"route_divergence"},
    "dar": ROUTED | STREAMS,
    "dar-full": ROUTED | STREAMS,
    "mhc": STREAMS | {"norm_growth"},
    "standard": {"norm_growth"},
    "rezero": {"norm_growth"},
    "layerscale": {"norm_growth"},
}
TEXT = "A model is as deep as what it remembers.\n" * 5


def small(preset, **values):
    model = DepthRouteForCausalLM(tiny_config(preset, base=tiny_qwen3_config(num_hidden_layers=4), **values)).eval()
    randomize_routing(model)
    return model


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A text and three saved models."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "text.txt").write_text(TEXT)
    for preset in ("dar", "rd-attnres", "standard"):
        save_folder(small(preset), folder / preset)
    return folder


@pytest.fixture(scope="module")
def two_streams(workplace):
    """The report of a model with two streams."""
    out = workplace / "dar-report"
    return out, depthroute.inspect(workplace / "dar", workplace / "text.txt", out, max_length=64)


@pytest.fixture(scope="module")
def compared(workplace):
    """A report of two models."""
    out = workplace / "compared"
    models = workplace / "rd-attnres", workplace / "standard"
    return out, compare(*models, workplace / "text.txt", out, max_length=64)


class Page(HTMLParser):
    """What a page shows, and what it would load."""

    def __init__(self, file):
        super().__init__()
        self.images, self.headings, self.loads, self.open, self.text = {}, [], [], [], []
        self.feed(file.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action", "poster")]
        assert tag not in ("script", "link", "iframe", "object", "embed", "base")
        if tag == "img":
            assert values["alt"]
            self.images[values["id"]] = b64decode(values["src"].removeprefix("data:image/png;base64,"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag  # everything is closed in order

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)
        self.text.append(data)


def check_page(folder):
    """A page that holds every figure of the folder and loads nothing."""
    page = Page(folder / "report.html")
    assert not page.open
    assert all(load.startswith("data:image/png;base64,") for load in page.loads)
    source = (folder / "report.html").read_text(encoding="utf-8")
    assert "url(" not in source and "@import" not in source and "://" not in source
    assert {f"{name}.png": picture for name, picture in page.images.items()} == {
        file.name: file.read_bytes() for file in folder.glob("*.png")
    }
    return page


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_the_parts_that_have_a_meaning(preset):
    model = small(preset)
    tokens = list(range(1, 40))
    diagnosis = diagnose(model, token_batches(tokens, 10, 2), token_pairs(tokens, 10, 2))
    report = json.loads(json.dumps(diagnosis.to_dict()))
    assert {part for part in PARTS if part in report} == PRESENT[preset]
    assert set(report["absent"]) == set(PARTS) - PRESENT[preset]
    assert all(reason for reason in report["absent"].values())
    assert diagnosis.tokens == 39
    for read in report.get("reads", []):
        assert len(read["mean_weights"]) == len(read["sources"])
        assert sum(read["mean_weights"]) == pytest.approx(1, abs=1e-5)
        assert 1 / len(read["sources"]) - 1e-6 <= read["max_weight"] <= 1
    assert all(np.isfinite(value) for value in report["summary"].values())
    if preset == "rd-attnres":
        divergence = [entry["jensen_shannon"] for entry in report["route_divergence"]]
        assert report["summary"]["JS of QK and V routes (nats)"] == pytest.approx(np.mean(divergence))


def test_uniform_routing_is_reported_as_such():
    config = tiny_config("dar", base=tiny_qwen3_config(num_hidden_layers=4))
    report = diagnose(DepthRouteForCausalLM(config), token_batches(range(1, 20), 10, 2)).to_dict()
    assert len(report["reads"]) == 2 * 8
    for read in report["reads"]:
        assert read["max_weight"] == pytest.approx(1 / len(read["sources"]), rel=1e-6)
        assert read["entropy_normalized"] == pytest.approx(1, rel=1e-6)
    assert "no second batch" in report["absent"]["rescue_gain"]


def test_report_of_two_streams_holds_everything(two_streams):
    folder, report = two_streams
    assert json.loads((folder / "routing.json").read_text()) == json.loads(json.dumps(report))
    figures = {figure for section in SECTIONS for figure in section.figures} - {"route_divergence"}
    page = check_page(folder)
    assert set(page.images) == figures
    assert {section.title for section in SECTIONS} <= set(page.headings) and "dar" in page.headings[0]
    text = " ".join(page.text)
    for section in SECTIONS:
        assert (section.text in text) == (section.part != "route_divergence")
    assert report["absent"]["route_divergence"] in text
    for name, value in report["summary"].items():
        assert name in text and f"{value:.4g}" in text
    assert {read["route"] for read in report["reads"]} == {"stream 0", "stream 1"}
    named = [(read["name"], read["sources"]) for read in report["reads"] if read["route"] == "stream 0"]
    similarity = [one for one in report["source_similarity"] if one["stream"] == "stream 0"]
    assert [(one["name"], one["sources"]) for one in similarity] == named
    assert len(report["rescue_gain"]["hidden"]) == 2 and report["stream_cka"]["sublayers"] == list(range(9))


def test_figures_hold_pictures(two_streams):
    from matplotlib.image import imread

    folder, _ = two_streams
    for file in folder.glob("*.png"):
        picture = imread(BytesIO(file.read_bytes()))
        assert min(picture.shape[:2]) > 300
        shades = np.unique((picture[..., :3] * 255).astype(int) @ [1, 256, 65536])
        assert len(shades) > 50, file.name


def test_comparison_puts_both_side_by_side(compared, workplace):
    folder, report = compared
    assert json.loads((folder / "comparison.json").read_text()) == json.loads(json.dumps(report))
    page = check_page(folder)
    routed = ["routing_heatmap", "routing_depth", "source_usage", "source_similarity", "route_divergence"]
    assert set(page.images) == {f"a_{name}" for name in [*routed, "norm_growth"]} | {"b_norm_growth", "comparison"}
    text = " ".join(page.text)
    for preset in ("rd-attnres", "standard"):
        assert f"{preset} ({preset})" in page.headings[0] and report["ab"[preset == "standard"]]["preset"] == preset
    assert "residual of type 'standard' has no depth reads" in text
    assert "depth_value_route" in text and "decoupled" in text  # a field in which they differ
    growth = report["summary"]["norm growth of the stream (last / first)"]
    assert growth["difference"] == pytest.approx(growth["b"] - growth["a"])
    assert growth["a"] == report["a"]["norm_growth"]["growth"]
    only_a = report["summary"]["max weight"]
    assert only_a["b"] is None and only_a["difference"] is None


def test_a_model_beside_itself_differs_in_nothing(workplace, monkeypatch):
    monkeypatch.setattr("depthroute.diagnostics.plots.draw", lambda *arguments: {})
    monkeypatch.setattr("depthroute.diagnostics.report.SECTIONS", ())
    model = workplace / "dar"
    report = compare(model, model, workplace / "text.txt", workplace / "same", max_tokens=64, max_length=32)
    assert {row["difference"] for row in report["summary"].values()} == {0}
    page = Page(workplace / "same" / "report.html")
    assert "a: dar" in page.headings[0] and "b: dar" in page.headings[0]
    assert "All routing fields are the same." in page.text


def test_command_compares(workplace, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("depthroute.diagnostics.plots.draw", lambda *arguments: {})
    monkeypatch.setattr("depthroute.diagnostics.report.SECTIONS", ())
    command = ["inspect", workplace / "dar", "--compare", workplace / "standard", "--text", workplace / "text.txt"]
    out, file = tmp_path / "out", tmp_path / "copy.json"
    code, printed, err = run_command(monkeypatch, capsys, *command, "--out", out, "--max-tokens", 60, "--json", file)
    assert code == 0, err
    assert sorted(path.name for path in out.iterdir()) == ["comparison.json", "comparison.png", "report.html"]
    assert json.loads(file.read_text()) == json.loads((out / "comparison.json").read_text())
    assert "norm growth of the stream" in printed and "report.html" in printed
    other = ["inspect", workplace / "dar", "--compare", workplace, "--text", workplace / "text.txt"]
    code, _, err = run_command(monkeypatch, capsys, *other, "--out", tmp_path / "none")
    assert code == 2 and "no config.json in this folder" in err and not (tmp_path / "none").exists()


def test_standard_is_inspected_for_its_norms(workplace, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    command = ["inspect", workplace / "standard", "--text", workplace / "text.txt", "--out", out]
    code, printed, err = run_command(monkeypatch, capsys, *command)
    assert code == 0, err
    assert sorted(path.name for path in out.iterdir()) == ["norm_growth.png", "report.html", "routing.json"]
    check_page(out)
    report = json.loads((out / "routing.json").read_text())
    assert "reads" not in report and "no depth reads" in report["absent"]["reads"]
    assert "norm growth" in printed and "route" not in printed


def test_names_are_escaped(tmp_path, workplace):
    folder = save_folder(small("standard"), tmp_path / "a <b> & c")
    depthroute.inspect(folder, workplace / "text.txt", tmp_path / "out", max_tokens=20)
    assert "a <b> & c (standard)" in "".join(check_page(tmp_path / "out").text)
