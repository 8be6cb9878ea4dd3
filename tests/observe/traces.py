"""What a viewer of Chrome's trace format relies on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

PHASES = {"M", "X", "b", "e", "n", "C", "s", "f", "i"}


def check_trace(events: list[dict[str, Any]]) -> None:
    """Fails for events that Perfetto would drop or draw wrongly: fields that are missing, slices of one track
    that overlap, spans or arrows with one end, tracks without a name."""
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    opened: dict[tuple[Any, ...], float] = {}
    flows: dict[int, list[tuple[str, float]]] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        phase, place = event["ph"], (event["pid"], event["tid"])
        assert phase in PHASES, event
        if phase == "M":
            assert event["args"]["name"], event
            continue
        assert event["ts"] >= 0, event
        assert ("process_name", event["pid"], 0) in named, event
        assert phase == "C" or ("thread_name", *place) in named, event
        if phase == "X":
            assert event["dur"] >= 0, event
            slices.setdefault(place, []).append((event["ts"], event["ts"] + event["dur"]))
        elif phase == "C":
            assert all(isinstance(value, int) for value in event["args"].values()), event
        elif phase in "be":
            key = (event["pid"], event["cat"], event["id"], event["name"])
            if phase == "b":
                assert key not in opened, event
                opened[key] = event["ts"]
            else:
                assert opened.pop(key) <= event["ts"], event
        elif phase in "sf":
            flows.setdefault(event["id"], []).append((phase, event["ts"]))
            assert phase == "s" or event["bp"] == "e", event
    assert not opened
    for ends in flows.values():
        assert [phase for phase, _ in ends] == ["s", "f"]
        assert ends[0][1] <= ends[1][1]
    for rows in slices.values():
        rows.sort()
        for (_, end), (begin, _) in pairwise(rows):
            assert end <= begin + 0.002
