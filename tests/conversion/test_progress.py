# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""The progress bar: bytes, rate and time left while bytes are counted, on a terminal and nowhere else."""

import io

import pytest
from rich.console import Console

import depthroute_conversion.progress as progress
from depthroute import convert
from depthroute_conversion.progress import steps


@pytest.fixture
def terminal(monkeypatch):
    """What would be drawn: `terminal()` is a terminal, `terminal(False)` a file."""

    def install(is_terminal: bool = True) -> io.StringIO:
        stream = io.StringIO()
        monkeypatch.setattr(
            progress, "Console", lambda **_: Console(file=stream, force_terminal=is_terminal, width=160)
        )
        return stream

    return install


def test_bytes_rate_and_time_left_are_drawn(terminal):
    stream = terminal()
    with steps(2, True) as step:
        step("writing the weights", 4_000_000)
        step.advance(1_000_000)
        step("keeping the tokenizer")
    drawn = stream.getvalue()
    assert "1/2 writing the weights" in drawn and "2/2 keeping the tokenizer" in drawn
    assert "1.0/4.0 MB" in drawn and "--:--" in drawn


@pytest.mark.parametrize("show, is_terminal", [(False, True), (True, False)])
def test_nothing_is_drawn_elsewhere(show, is_terminal, terminal):
    stream = terminal(is_terminal)
    with steps(1, show) as step:
        step("writing", 10)
        step.advance(5)
    assert stream.getvalue() == ""


def test_a_conversion_counts_the_bytes_that_it_announces(originals, tmp_path, monkeypatch):
    sizes, counted = {}, {}

    class Counting(progress.Progress):
        def __call__(self, text, size=None):
            self.text = text
            sizes[text] = size

        def advance(self, size):
            counted[self.text] = counted.get(self.text, 0) + size

    monkeypatch.setattr(progress._Drawn, "__call__", Counting.__call__)
    monkeypatch.setattr(progress._Drawn, "advance", Counting.advance)
    convert(originals["sharded"], tmp_path / "out", max_shard_size="50kB", layerwise=True)
    named = [text for text, size in sizes.items() if size]
    assert len(named) == 4 and "writing the weights" in named and "comparing the weights" in named
    for text in named:  # headers and the routing's few tensors are not announced everywhere
        assert 0.9 * sizes[text] < counted[text] < 1.2 * sizes[text], text
