"""Where the time of a request went: a real hand-over, and one whose decoder is killed with `kill -9`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.gateway.api.events import LoggedRequest, Requests, Trace
from tests.e2e.killing import engines
from tests.e2e.server import Server
from tests.e2e.test_disaggregation import CLUSTER
from tests.observe.timings import check_timings
from tests.observe.traces import check_trace

PROMPT = [5 + number % 50 for number in range(200)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    with Server("--prefill", "1", "--decode", "2", *CLUSTER) as running:
        yield running


SLICES = ("prefill", "decode")
"""Categories of what is on slots."""


def logged(server: Server, id: str) -> LoggedRequest:
    answer = server.http.get("/debug/requests", params={"id": id}).raise_for_status()
    (found,) = msgspec.json.decode(answer.content, type=Requests).requests
    return found


def trace(server: Server, **which: str) -> list[dict[str, Any]]:
    answer = server.http.get("/debug/timeline", params=which).raise_for_status()
    events = msgspec.json.decode(answer.content, type=Trace).traceEvents
    check_trace(events)
    return events


def complete(server: Server, id: str, max_tokens: int, prompt: list[int] = PROMPT) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "request_id": id, "seed": 1}
    return server.http.post("/v1/completions", json=body).raise_for_status().json()


def test_a_handed_over_request_is_seen_from_its_arrival_to_its_end(cluster: Server) -> None:
    complete(cluster, "whole", 20)
    found = logged(cluster, "whole")
    assert (found.state, found.reasons, found.error) == ("done", ["length"], None)
    assert (found.prompt_tokens, found.generated_tokens, found.continuations) == (200, 20, 0)
    prefiller, decoder = found.instances
    assert (prefiller, decoder[:6]) == ("prefill-0", "decode")
    (trail,) = found.trails or []
    assert [(span.name, span.where) for span in trail.spans] == [
        ("read", "gateway"),
        ("queue", prefiller),
        ("prefill", prefiller),
        ("handover", prefiller),
        ("decode", decoder),
        ("finish", decoder),
    ]
    assert trail.spans[0].begin_ms == 0
    for span, after in pairwise(trail.spans):
        assert span.begin_ms <= span.end_ms == after.begin_ms
    assert trail.spans[-1].end_ms == pytest.approx(found.seconds * 1000, abs=0.002)
    check_timings(found.timings, "prefill", "handover", "finish")
    fetched = [event for event in trail.events if event.what == "fetched"]
    assert sum(event.detail["bytes"] for event in fetched) > 0
    assert {(event.where, event.detail["transport"]) for event in fetched} == {(decoder, "shared_memory")}


def test_an_answer_tells_what_the_log_tells(cluster: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "timings": True, "request_id": "asked"}
    begun = time.monotonic()
    answer = cluster.http.post("/v1/completions", json=body).raise_for_status()
    took_ms = (time.monotonic() - begun) * 1000
    timings = answer.json()["timings"]
    assert timings == logged(cluster, "asked").timings
    check_timings(timings, "prefill", "handover")
    assert timings["clock_error_ms"] == 0  # (one host)
    assert timings["total_ms"] <= took_ms
    header = answer.headers["server-timing"]
    assert f"handover;dur={timings['handover_ms']}" in header
    assert f"total;dur={timings['total_ms']}" in header
    # Without being asked the header is there as well, and a stream has none.
    body = {**body, "timings": False, "request_id": "not-asked"}
    assert "decode;dur=" in cluster.http.post("/v1/completions", json=body).headers["server-timing"]
    streamed = cluster.http.post("/v1/completions", json={**body, "stream": True, "timings": True})
    assert "server-timing" not in streamed.headers
    assert '"handover_ms":' in streamed.text.split("\n\n")[-3]


def test_the_trace_has_tracks_of_slots_and_wires_and_an_arrow(cluster: Server) -> None:
    complete(cluster, "traced", 20)
    decoder = logged(cluster, "traced").instances[1]
    events = trace(cluster, id="traced")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"gateway", "prefill-0", decoder, f"wire prefill-0 → {decoder}"} <= set(names.values())
    slots = {names[event["pid"]]: event["cat"] for event in events if event.get("cat") in SLICES}
    assert slots == {"prefill-0": "prefill", decoder: "decode"}
    arrows = [(event["ph"], names[event["pid"]]) for event in events if event["ph"] in "sf"]
    assert arrows == [("s", "prefill-0"), ("f", decoder)]
    (wire,) = [event for event in events if names[event["pid"]].startswith("wire") and event["ph"] == "b"]
    assert wire["args"]["bytes"] > 0
    assert wire["args"]["transport"] == "shared_memory"
    counters = [event for event in trace(cluster, last_s="3600") if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"requests", "KV blocks"}


def steps_of(events: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """By process and track."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "step":
            place = names[event["pid"]], tracks[event["pid"], event["tid"]]
            found.setdefault(place, []).append(event)
    return found


def test_the_steps_of_the_model_lie_under_the_request_that_they_computed(cluster: Server) -> None:
    prompt = [60 + number % 70 for number in range(150)]  # (nobody has it cached)
    complete(cluster, "stepped", 20, prompt)
    decoder = logged(cluster, "stepped").instances[1]
    events = trace(cluster, id="stepped")
    steps = steps_of(events)
    assert set(steps) == {("prefill-0", "rank 0"), (decoder, "rank 0")}
    slots = {e["name"].split()[0]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in SLICES}
    assert set(slots) == {"prefill", "decode"}
    for (process, _), ran in steps.items():
        begin, end = slots["prefill" if process == "prefill-0" else "decode"]
        numbers = [step["args"]["step"] for step in ran]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert begin <= ran[0]["ts"] <= ran[-1]["ts"] + ran[-1]["dur"] <= end
        assert all("clock_error_ms" not in step["args"] for step in ran)  # (one host)
    at_p, at_d = steps["prefill-0", "rank 0"], steps[decoder, "rank 0"]
    assert {step["name"] for step in at_p} == {"prefill"}
    assert sum(step["args"]["prefill_tokens"] for step in at_p) == 150
    assert sum(step["args"]["tokens"] for step in at_p) == 1
    first, *others = at_d  # (the first computes the token that came with the hand-over)
    assert (first["name"], first["args"]["prefill_tokens"]) == ("prefill", 1)
    assert {step["name"] for step in others} == {"decode"}
    assert {step["args"]["decode_rows"] for step in others} == {1}
    # (Drafts that were right make steps fewer.)
    assert all(1 <= step["args"]["tokens"] <= 1 + step["args"].get("accepted", 0) for step in at_d)
    assert sum(step["args"]["tokens"] for step in at_d) == 19
    # The arrow of the hand-over is there as without them.
    assert [event["ph"] for event in events if event["ph"] in "sf"] == ["s", "f"]


def test_every_rank_has_its_steps() -> None:
    with Server("--tensor-parallel-size", "2", "--dtype", "float32") as server:
        complete(server, "first", 12)
        # (Rank 1 tells its steps when nothing runs any more, and takes part in no step of this one before.)
        complete(server, "second", 2)
        steps = steps_of(trace(server, id="first"))
        assert set(steps) == {("mixed-0", "rank 0"), ("mixed-0", "rank 1")}
        leader, other = steps["mixed-0", "rank 0"], steps["mixed-0", "rank 1"]
        assert sum(step["args"]["tokens"] for step in leader) == 12
        for step, same in zip(leader, other, strict=True):
            assert step["args"] == same["args"]
            assert step["name"] == same["name"]
            # Both meet in each layer, so neither ends before the other has begun.
            assert max(step["ts"], same["ts"]) <= min(step["ts"] + step["dur"], same["ts"] + same["dur"])


def test_nothing_is_noted_if_nothing_is_kept() -> None:
    with Server("--executor", "simulated", "--events-keep", "0") as server:
        complete(server, "nothing", 5)
        events = trace(server, last_s="60")
        assert {event["ph"] for event in events} <= {"M", "C"}


def test_the_command_line_writes_the_trace(cluster: Server, tmp_path: Path) -> None:
    complete(cluster, "written", 5)
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "baton", "timeline", cluster.url, "--id", "written"]
    done = subprocess.run([*command, "-o", str(file)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    check_trace(json.loads(file.read_text())["traceEvents"])
    unknown = [*command[:-1], "unknown", "-o", str(tmp_path / "none.json")]
    done = subprocess.run(unknown, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "no request 'unknown' is known" in done.stderr
    assert not (tmp_path / "none.json").exists()


def test_a_recording_tells_it_as_well(tmp_path: Path) -> None:
    """Of a cluster that is gone: a request that was handed over, and one whose decoder was killed."""
    recording = tmp_path / "recording"
    with Server("--prefill", "1", "--decode", "2", *CLUSTER, "--record", str(recording)) as server:
        (model,) = server.http.get("/v1/models").json()["data"]
        most = model["max_model_len"] - len(PROMPT)
        body = {"prompt": PROMPT, "max_tokens": most, "ignore_eos": True, "request_id": "killed"}
        with server.http.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, timeout=300
        ) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            next(lines)
            killed = logged(server, "killed").instances[-1]
            os.kill(engines(server)[killed], signal.SIGKILL)
            assert '"finish_reason":"length"' in list(lines)[-1]
        server.wait_ready()
        complete(server, "whole", 20)
        whole = logged(server, "whole").trails or []

    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "baton", "timeline", "--recording"]
    done = subprocess.run(
        [*command, str(recording), "-o", str(file)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    events = json.loads(file.read_text())["traceEvents"]
    check_trace(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    other = next(name for name in ("decode-0", "decode-1") if name != killed)
    assert {"prefill-0", other, "gateway"} <= set(processes.values())
    steps = [event for event in events if event.get("cat") == "step"]
    assert {"prefill-0", other} <= {processes[event["pid"]] for event in steps}
    begun = [event["name"] for event in events if event["ph"] == "b" and event["pid"] == 1]
    spans = begun[begun.index("whole") + 1 :]
    # (What the gateway itself did is not in it: the arrival is that at the first engine, the end the last's,
    # which may be that of the prefiller.)
    told = [span for span in spans if span != "finish"]
    assert told == ["read", *(span.name for span in whole[0].spans[1:-1])]
    # (The last half second of what was killed is not on disk, so perhaps not its decoding either.)
    spans = begun[begun.index("killed") + 1 : begun.index("whole")]
    assert spans.count("lost") == 1
    assert spans[-4:] == ["queue", "prefill", "handover", "decode"]
    wires = {name.partition(" →")[0] for name in processes.values() if name.startswith("wire")}
    assert wires == {"wire prefill-0"}

    only = subprocess.run(
        [*command, str(recording), "-o", str(file), "--id", "whole"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert only.returncode == 0, only.stderr
    events = json.loads(file.read_text())["traceEvents"]
    check_trace(events)
    assert {event["ph"] for event in events} >= {"s", "f", "X"}
    assert "killed" not in file.read_text()
    none = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, timeout=200)
    assert none.returncode == 1
    assert "there is no recording here" in none.stderr


@pytest.mark.slow
def test_both_attempts_are_seen_if_the_decoder_is_killed(cluster: Server) -> None:
    (model,) = cluster.http.get("/v1/models").json()["data"]
    most = model["max_model_len"] - len(PROMPT)
    body = {"prompt": PROMPT, "max_tokens": most, "ignore_eos": True, "request_id": "killed", "stream": True}
    with cluster.http.stream("POST", "/v1/completions", json=body, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        running = logged(cluster, "killed")
        assert running.state == "running"
        first = running.instances[-1]
        os.kill(engines(cluster)[first], signal.SIGKILL)
        rest = list(lines)
    assert '"finish_reason":"length"' in rest[-1]
    found = logged(cluster, "killed")
    assert (found.state, found.generated_tokens, found.continuations) == ("done", most, 1)
    (trail,) = found.trails or []
    sent = [event for event in trail.events if event.what == "sent"]
    assert len({event.attempt for event in sent}) == 2
    (lost,) = [event for event in trail.events if event.what == "lost"]
    assert 0 < lost.detail["tokens"] < most
    spans = [(span.name, span.where) for span in trail.spans]
    at = spans.index(("decode", first))
    assert spans[at + 1] == ("lost", "gateway")
    assert [name for name, _ in spans[at + 2 :]].count("decode") == 1
    assert trail.spans[at].attempt != trail.spans[-1].attempt
    trace(cluster, id="killed")
