"""Progress of loading: lines where nobody looks at a terminal, a bar where somebody does."""

from __future__ import annotations

import io
import logging
import os
import pty
from pathlib import Path

import pytest

from baton.executor.weights import images
from baton.executor.weights.progress import LoadProgress
from baton.observe.logs import SHOWN
from tests.executor.weights.test_images import make
from tests.model.checkpoints import make_checkpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_come_some_seconds_apart(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = LoadProgress(16 * 10**9, stream=io.StringIO(), clock=clock)
    for second in range(1, 26):
        clock.now += 1
        progress(f"layer {second}", second / 40)
    progress.close()
    assert [record.message for record in caplog.records] == [
        "loading: 25 %, 4.0 of 16.0 GB, 400 MB/s: layer 10",
        "loading: 50 %, 8.0 of 16.0 GB, 400 MB/s: layer 20",
    ]


def test_a_bar_on_a_terminal_which_goes_at_the_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    progress = LoadProgress(2 * 10**9, stream=terminal, clock=clock)
    clock.now += 2
    progress("model.layers.3.mlp.gate_proj.weight", 0.5)
    shown = terminal.getvalue()
    assert "50%" in shown
    assert "1.00G/2.00G" in shown
    progress("model.layers.4.mlp.gate_proj.weight", 0.6)
    progress.close()
    assert terminal.getvalue().endswith("\r")
    assert "\x1b[?25l" not in terminal.getvalue()  # the cursor stays, whoever is killed
    assert not caplog.records


def test_a_terminal_of_no_size_gets_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """tqdm shows nothing there."""
    caplog.set_level(logging.INFO)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        progress = LoadProgress(10**9, stream=terminal, clock=clock)
        clock.now += 10
        progress("layer 1", 0.5)
        progress.close()
    os.close(ours)
    assert [record.message for record in caplog.records] == ["loading: 50 %, 0.5 of 1.0 GB, 50 MB/s: layer 1"]


def test_who_waits_is_told_once_a_second(clock: Clock) -> None:
    told: list[str] = []
    progress = LoadProgress(10**9, stream=io.StringIO(), clock=clock, tell=told.append)
    for layer in range(8):
        progress(f"layer {layer}", layer / 8)
        clock.now += 0.5
    assert told == ["0 % (layer 0)", "25 % (layer 2)", "50 % (layer 4)", "75 % (layer 6)"]


def test_where_a_status_line_shows_it_there_is_nothing_else(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nobody can be told."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(SHOWN, "1")
    told: list[str] = []
    for tell in (told.append, None):
        terminal = Terminal()
        progress = LoadProgress(10**9, stream=terminal, clock=clock, tell=tell)
        clock.now += 20
        progress("layer 1", 0.5)
        progress.close()
        assert terminal.getvalue() == ""
        assert len(caplog.records) == (tell is None)
    assert told == ["50 % (layer 1)"]


def test_what_is_quick_shows_nothing(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for stream in (io.StringIO(), Terminal()):
        progress = LoadProgress(10**9, stream=stream, clock=clock)
        clock.now += 0.5
        progress("layer", 1.0)
        progress.close()
        assert stream.getvalue() == ""
    assert not caplog.records


def test_loading_tells_each_layer_and_reaches_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "qwen3")
    told: list[tuple[str, float]] = []

    class Listener(LoadProgress):
        def __call__(self, what: str, fraction: float) -> None:
            told.append((what, fraction))

    monkeypatch.setattr(images, "LoadProgress", Listener)
    make(tmp_path).close()
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert told[0][0] == "model.embed_tokens.weight"
    assert len(told) > 10
