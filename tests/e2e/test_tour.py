"""docs/tour.md says which functions a request passes, and in which order: is it so?"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest

import baton
from tests.conftest import GENEROUS_S
from tests.e2e.server import Server

ROOT = Path(__file__).parents[2]
SOURCES = Path(baton.__file__).parent
TRIES = 3
"""Requests.  A turn of the engine that began for another reason may take in a message: then a hop seems to be
before the one that caused it."""
NOT_ALWAYS = {
    "Backlog.place_for": "the queue is full",
    "FollowerRounds.enter": "there are several ranks",
    "Generation.collect": "the answer is not streamed",
    "PrefixDigest.match": "there are several instances",
    "short_keys": "there are several instances",
}
"""Functions that this request does not pass, and when others do."""

Place = tuple[str, str]


def _hops() -> list[list[Place]]:
    """Of each numbered line the functions that it names; classes, tables and C++ are left out."""
    lines = re.findall(r"^\d+\. (.*)$", (ROOT / "docs/tour.md").read_text(), re.M)
    found = [re.findall(r"`([\w/]+\.py):([\w.]+)`", line) for line in lines]
    return [[place for place in places if not place[1].rpartition(".")[2][0].isupper()] for places in found]


def _calls(directory: Path) -> dict[Place, list[int]]:
    calls: dict[Place, list[int]] = {}
    for file in directory.iterdir():
        for line in file.read_text().splitlines():
            at, path, name = line.split()
            calls.setdefault((path, name), []).append(int(at))
    return {place: sorted(times) for place, times in calls.items()}


def _out_of_order(hops: list[list[Place]], calls: dict[Place, list[int]], start: int) -> list[str]:
    """Hops whose first function was not called after that of the hop before."""
    wrong = []
    last = start
    for number, (first, *_) in enumerate(hops, 1):
        later = [at for at in calls.get(first, ()) if at >= last]
        if later:
            last = later[0]
        else:
            wrong.append(f"{number}. {first[0]}:{first[1]}")
    return wrong


@pytest.fixture
def server(tmp_path, monkeypatch):
    places = sorted({place for places in _hops() for place in places})
    trace = {"directory": str(tmp_path), "root": f"{SOURCES}/", "functions": places}
    monkeypatch.setenv("TRACED_CALLS", json.dumps(trace))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "tracing"))
    with Server() as running:
        yield running


def _ask(server: Server) -> None:
    with httpx.stream(  # (a connection of its own: the first hop accepts it)
        "POST",
        f"{server.url}/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "Hello! " * 50}],
            "stream": True,
            "max_tokens": 40,
            "ignore_eos": True,
            "stop": ["a string that does not come"],
        },
        timeout=GENEROUS_S,
    ) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_request_takes_the_way_that_the_tour_describes(server, tmp_path):
    server.wait_ready()
    hops = _hops()
    assert len(hops) > 70
    assert all(hops)
    for _ in range(TRIES):
        start = time.monotonic_ns()
        _ask(server)
        wrong = _out_of_order(hops, _calls(tmp_path), start)
        if not wrong:
            break
    calls = _calls(tmp_path)
    missing = [place for places in hops for place in places if place not in calls]
    assert [place for place in missing if place[1] not in NOT_ALWAYS] == []
    assert {name for _, name in missing} == set(NOT_ALWAYS)
    assert not wrong
