"""What others say does not fill the log, nor look like another line of it."""

from __future__ import annotations

import io
import json
import logging
import os
from datetime import datetime

import pytest

from baton.observe.logs import BURST, MAX_CHARS, PERIOD_S, Bounded, JsonLines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def site():
    clock, stream = Clock(), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(Bounded(clock))
    log = logging.Logger("test")
    log.addHandler(handler)
    return log, clock, stream


def test_a_message_has_a_length(site):
    log, _, stream = site
    log.error("the instance is failing: %s", "x" * 5_000_000)
    log.error("y" * 5_000_000)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(len(line) < MAX_CHARS + 100 for line in lines)
    assert "5,000,000 characters" in lines[0]


def test_a_message_is_one_line(site):
    log, _, stream = site
    log.warning("peer %s", "p\n12:00:00 CRITICAL gateway  all is lost\x1b[2J")
    assert stream.getvalue() == "peer p\\n12:00:00 CRITICAL gateway  all is lost\\x1b[2J\n"


def test_what_is_said_again_and_again_is_counted(site):
    log, clock, stream = site

    def say(number):
        log.warning("bad message %d", number)

    for number in range(1000):
        say(number)
    log.warning("another place in the code")
    lines = stream.getvalue().splitlines()
    assert lines == [f"bad message {number}" for number in range(BURST)] + ["another place in the code"]
    clock.now = PERIOD_S
    say(1000)
    assert (
        stream.getvalue().splitlines()[-1]
        == f"bad message 1000 ({1000 - BURST} more of these were not written)"
    )
    for _ in range(2 * BURST):
        log.critical("%s", "always")
    assert stream.getvalue().count("always") == 2 * BURST


def test_a_traceback_stays_readable(site):
    log, _, stream = site
    try:
        raise ValueError("the reason")
    except ValueError:
        log.exception("a defect")
    assert stream.getvalue().startswith("a defect\nTraceback")
    assert "ValueError: the reason" in stream.getvalue()


@pytest.fixture
def json_site():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines("decode-0/1"))
    handler.addFilter(Bounded(Clock()))
    log = logging.Logger("baton.test")
    log.addHandler(handler)
    return log, stream


def test_json_is_one_object_a_line(json_site):
    log, stream = json_site
    log.warning("%s", 'a "quote",\na line break\x1b[2J and an ä')
    try:
        raise ValueError("the reason")
    except ValueError:
        log.exception("request %s failed", "r-1", extra={"request_id": "r-1"})
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first | {"time": "", "pid": 0} == {
        "time": "",
        "level": "warning",
        "logger": "baton.test",
        "process": "decode-0/1",
        "pid": 0,
        "message": 'a "quote",\\na line break\\x1b[2J and an ä',
    }
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert first["pid"] == os.getpid()
    assert second["request_id"] == "r-1"
    assert second["message"] == "request r-1 failed"
    assert "ValueError: the reason" in second["exception"]
