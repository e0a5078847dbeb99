# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""A study's figures: what is drawn is what the results say, texts do not lie on each other, files are small and repeatable."""

from itertools import combinations

import numpy as np
import pytest
from synthetic_results import CASES

from depthroute.studies.paired import comparisons, noise_of
from depthroute.studies.plots import differences, figures_of, png, write_figures
from depthroute.studies.run_plots import by_depth, curves


LARGEST_FILE = 150_000


def overlapping(figure):
    """Pairs of texts outside of axes' insides that lie on each other."""
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        if axes.axison:
            texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())  # ticks beyond it exist and are not drawn
                texts += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    shown = [text for text in texts if text.get_visible() and text.get_text()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    # half a pixel: what touches does not overlap
    boxes = [(name, box.padded(-0.5)) for name, box in boxes if box.width > 1]
    return [(a, b) for (a, first), (b, second) in combinations(boxes, 2) if first.overlaps(second)]


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_results_is_drawn_readable_and_small(case):
    results = CASES[case]()
    for name, make in figures_of(results).items():
        figure = make(results)
        assert overlapping(figure) == [], name
        width, height = figure.get_size_inches() * figure.dpi
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, name
        assert len(png(figure)) <= LARGEST_FILE, name


def test_the_same_results_give_the_same_bytes_without_date_or_version():
    results = CASES["one group"]()
    first, second = (png(differences(CASES["one group"]())) for _ in range(2))
    assert first == second and first.startswith(b"\x89PNG")
    assert b"Software" not in first and b"matplotlib" not in first
    results["groups"]["all"]["arms"]["states"]["runs"][0]["loss"] += 0.01
    assert png(differences(results)) != first


def test_figures_are_written_to_a_folder(tmp_path):
    results = CASES["no claims, no routing"]()
    files = write_figures(results, tmp_path)
    assert files == sorted(tmp_path.iterdir(), reverse=True) and [file.name for file in files] == list(
        figures_of(results)
    )
    assert files[0].read_bytes() == png(differences(results))


def test_figures_are_named_after_study_and_size():
    results = CASES["one group"]()
    assert list(figures_of(results)) == ["made-up.png", "made-up-depth.png", "made-up-curves.png"]
    results["size"] = "gpu"
    assert next(iter(figures_of(results))) == "made-up-gpu.png"
    assert list(figures_of(CASES["no claims, no routing"]())) == ["made-up.png", "made-up-curves.png"]


def test_differences_draw_means_intervals_pairs_and_noise():
    results = CASES["one group"]()
    (axes,) = differences(results).axes
    rows = comparisons(results)
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.arm for row in rows]
    drawn = {round(bars.lines[0].get_ydata()[0]): bars for bars in axes.containers}
    dots = [line for line in axes.lines if line.get_label() == "one pair of runs, same seed"]
    for at, row in enumerate(rows):
        (segment,) = drawn[at].lines[2][0].get_segments()
        assert drawn[at].lines[0].get_xdata()[0] == row.difference.mean
        np.testing.assert_allclose(segment[:, 0], [row.difference.low, row.difference.high])
        assert list(dots[at].get_xdata()) == list(row.difference.differences)
        assert ("clear of 0" in drawn[at].get_label()) == row.clear
    band = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    level = noise_of(results, "all").level
    assert (band.x0, band.x1) == (pytest.approx(-2 * level), pytest.approx(2 * level))
    assert any(text.get_text().startswith("+0.0490 ± ") for text in axes.texts)


def test_groups_stand_side_by_side_on_one_scale():
    figure = differences(CASES["groups by depth"]())
    assert [axes.get_title() for axes in figure.axes] == ["12 layers", "24 layers", "48 layers"]
    assert len({axes.get_xlim() for axes in figure.axes}) == 1
    assert [bool(axes.patches) for axes in figure.axes] == [True, False, False]  # noise was measured in the first


def test_far_arms_make_the_scale_logarithmic_and_the_axis_says_so():
    (near,), (far,) = differences(CASES["one group"]()).axes, differences(CASES["two streams"]()).axes
    assert near.get_xscale() == "linear" and "logarithmic" not in near.get_xlabel()
    assert far.get_xscale() == "symlog" and "logarithmic beyond ±" in far.get_xlabel()


def test_one_seed_is_said_to_be_over_windows():
    figure = differences(CASES["one seed"]())
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert "mean, 95% over windows of one seed" in labels and "one pair of runs, same seed" not in labels


def test_what_cannot_be_compared_is_written_not_drawn():
    results = CASES["one group"]()
    arms = results["groups"]["all"]["arms"]
    arms["standard"]["runs"][0]["loss"] = None
    arms["rd-attnres"]["runs"] = [{**run, "seed": run["seed"] + 10} for run in arms["rd-attnres"]["runs"]]
    arms["states"]["runs"] = arms["attnres-block"]["runs"]
    texts = [text.get_text() for text in differences(results).axes[0].texts]
    assert [texts[at] for at in (0, 2, 3)] == ["not finite", "no common seed", "identical"]


def test_by_depth_has_the_means_over_seeds_of_arms_with_reads():
    results = CASES["two streams"]()
    panels = {axes.get_title(): axes for axes in by_depth(results).axes if axes.axison}
    assert list(panels) == ["attnres-block", "rd-attnres", "states", "dar"]
    runs = results["groups"]["all"]["arms"]["states"]["runs"]
    lines = {line.get_label(): line for line in panels["states"].lines}
    for label, key in (("largest weight", "max_weight"), ("cosine of sources", "cosine")):
        expected = np.mean([[row[key] for row in run["by_depth"]] for run in runs], axis=0)
        np.testing.assert_allclose(lines[label].get_ydata(), expected)
    uniform = lines["largest weight if routing were uniform"]
    np.testing.assert_allclose(uniform.get_ydata(), [1 / row["sources"] for row in runs[0]["by_depth"]])
    assert list(uniform.get_xdata()) == [row["sublayer"] / 2 for row in runs[0]["by_depth"]]
    assert "largest weight, stream 1" in {line.get_label() for line in panels["dar"].lines}
    assert "largest weight, V route" in {line.get_label() for line in panels["rd-attnres"].lines}


def test_curves_are_paired_by_seed():
    results = CASES["fewer seeds in an arm"]()
    arms = results["groups"]["all"]["arms"]
    del arms["attnres-block"]["runs"][0]  # seed 1, which the arm has
    losses, apart = curves(results).axes
    baseline = {run["seed"]: np.array(run["curve"]) for run in arms["attnres-block"]["runs"]}
    own = {run["seed"]: np.array(run["curve"]) for run in arms["rd-attnres"]["runs"]}
    at = list(arms).index("rd-attnres")
    np.testing.assert_allclose(losses.lines[at].get_ydata(), np.mean([one[:, 1] for one in own.values()], axis=0))
    pairs = [own[seed][:, 1] - baseline[seed][:, 1] for seed in (2, 4)]
    np.testing.assert_allclose(apart.lines[at].get_ydata(), np.mean(pairs, axis=0))


def test_training_loss_is_drawn_where_a_claim_is_about_the_start():
    assert len(curves(CASES["one group"]()).axes) == 2
    results = CASES["two streams"]()
    training = curves(results).axes[2]
    assert training.get_title() == "training loss"
    runs = results["groups"]["all"]["arms"]["standard"]["runs"]
    expected = np.mean([[loss for _, loss in run["training"]] for run in runs], axis=0)
    np.testing.assert_allclose(training.lines[0].get_ydata(), expected)
