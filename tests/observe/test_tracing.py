"""Traces without a server: whose they are, what is told of a request, and that nothing waits for a collector.

That a real collector gets them is in `tests/e2e/test_traces.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from baton.observe.events.clocks import Alignment
from baton.observe.events.context import Caller, Trace, caller_of
from baton.observe.events.story import Story
from baton.observe.tracing.collector import GRPC, HTTP, check_endpoint, protocol_of
from baton.observe.tracing.traced import Traced, traced
from baton.observe.tracing.tracer import Tracer
from baton.protocol.notes import Note
from baton.protocol.params.sampling_params import SamplingParams
from tests.observe.test_events import planted

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROOT = Trace(1, 2, None, "chat", "chatcmpl-", True)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_what_the_standard_does_not_say_is_no_caller(header: str | None) -> None:
    assert caller_of(header, "a=b") is None


def test_a_caller_of_this_version_and_of_a_later_one() -> None:
    found = Caller(int(TRACE, 16), int(SPAN, 16), True, "a=b")
    assert caller_of(f"00-{TRACE}-{SPAN}-03", "a=b") == found
    assert caller_of(f"01-{TRACE}-{SPAN}-01-more", "a=b") == found
    assert caller_of(f"00-{TRACE}-{SPAN}-00", "a=b") == found._replace(sampled=False)
    assert caller_of(f"00-{TRACE}-{SPAN}-01", "a" * 600) == found._replace(state="")


def test_the_endpoint_says_the_protocol_unless_the_environment_does() -> None:
    assert protocol_of("http://c:4317", {}) == protocol_of("grpc://c:9999/x", {}) == GRPC
    assert protocol_of("http://c:4318", {}) == protocol_of("https://c/v1/traces", {}) == HTTP
    assert protocol_of("http://c:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}) == GRPC
    for wrong in ("c:4317", "ftp://c:1", "http://"):
        with pytest.raises(ValueError, match="give a URL such as"):
            check_endpoint(wrong)


def story(number: int = 0, **fields: Any) -> Story:
    return Story(f"r{number}", 10.0, 10.5, wall=1000.0, ended=20.0, trace=ROOT, **fields)


def test_the_parts_of_a_hand_over_between_hosts_say_how_wrong_their_times_can_be() -> None:
    one = planted(-0.02, 0.02, 0.021)
    one.trace = ROOT
    root, children = traced(one, "tiny", 20.0)
    assert [child.name for child in children] == ["read", "queue", "prefill", "handover", "decode", "finish"]
    assert (root.begin, root.end) == (children[0].begin, children[-1].end)
    for child, after in pairwise(children):
        assert child.begin <= child.end == after.begin
    errors = {str(child.attributes["baton.instance"]): child.attributes for child in children}
    assert "baton.clock_error_seconds" not in errors["gateway"]
    for name in ("p0", "d0"):
        error = errors[name]["baton.clock_error_seconds"]
        assert isinstance(error, float)
        assert 0 < error <= 0.0211
    _, children = traced(planted(0.0, 0.0, 0.01, known=False), "tiny", 20.0)
    assert children[-1].attributes["baton.clock_error_known"] is False


def test_a_preemption_is_an_event_and_a_wish_is_told() -> None:
    one = story(params=SamplingParams(temperature=0.5, top_k=-1, n=1, seed=7), reasons=("stop",))
    trail = one.trail()
    assert trail is not None
    trail.add(11.0, "sent", 5, 0, 0, "a")
    clock = Alignment()
    clock.shared = True
    notes = [
        Note(11.0, "arrived", 3),
        Note(12.0, "admitted", 1, 0, 3),
        Note(13.0, "prefilled", 3, 0, 1),
        Note(14.0, "preempted", 9, 0, 1),
        Note(16.0, "admitted", 0, 8, 9),
        Note(19.0, "ended", 12, 1, 0, "stop"),
    ]
    trail.tell(5, "a", notes, clock, 19.5)
    root, children = traced(one, "m", 20.0)
    assert (root.name, root.begin, root.end) == ("chat m", 1000.0, 1010.0)
    ((at, name, about),) = root.events
    assert (at, name, about) == (1004.0, "baton.preempted", {"baton.instance": "a", "baton.attempt": 5})
    assert root.attributes["gen_ai.request.temperature"] == 0.5
    assert root.attributes["gen_ai.request.seed"] == 7
    assert "gen_ai.request.top_k" not in root.attributes
    assert [(child.name, child.begin) for child in children] == [
        ("read", 1000.0),
        ("queue", 1001.0),
        ("prefill", 1002.0),
        ("decode", 1003.0),
        ("queue", 1004.0),
        ("decode", 1006.0),
        ("finish", 1009.0),
    ]
    assert children[2].attributes["baton.prompt.tokens"] == 3


def test_a_request_that_failed_before_it_was_sent_is_told() -> None:
    root, (only,) = traced(story(error="queue_full"), "m", 20.0)
    assert (root.error, root.attributes["error.type"]) == ("queue_full", "queue_full")
    assert (only.name, only.end) == ("read", 1010.0)


class Held:
    """A collector that takes nothing until it may; then everything, or fails."""

    why = "it is away"

    def __init__(self, *, takes: bool = True) -> None:
        self.may, self.asked = threading.Event(), threading.Event()
        self.takes = takes
        self.told: list[Any] = []

    def samples(self, caller: Caller | None, trace_id: int, name: str, about: dict[str, Any]) -> str | None:
        return ""

    def spans(self, root: Traced, children: Sequence[Traced], trace: Trace, ids: Sequence[int]) -> list[Any]:
        if root.attributes["baton.request.id"] == "r13":
            raise ValueError("a defect")
        return [root, *children]

    def send(self, spans: Sequence[Any]) -> bool:
        self.asked.set()
        assert self.may.wait(60)
        self.told += spans
        return self.takes

    def close(self) -> None:
        self.may.set()


def test_a_full_queue_drops_and_counts_and_the_rest_is_sent_at_the_end() -> None:
    collector = Held()
    tracer = Tracer(collector, "m", delay_s=0.001, most=10, batch=1, clock=lambda: 100.0)
    tracer.start()
    tracer.add(story(0))
    assert collector.asked.wait(60)  # the thread hangs with the first one
    for number in range(1, 31):
        tracer.add(story(number))
    assert tracer.dropped == {"queue_full": 20, "not_sent": 0}
    collector.may.set()
    tracer.close(60)
    told = {one.attributes["baton.request.id"] for one in collector.told if one.name == "chat m"}
    assert told == {f"r{number}" for number in range(11)}
    assert tracer.sent == 11


def test_the_end_does_not_wait_for_a_collector_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    collector = Held()
    tracer = Tracer(collector, "m", delay_s=0.001, batch=1, clock=lambda: 100.0)
    tracer.start()
    tracer.add(story(0))
    assert collector.asked.wait(60)
    tracer.add(story(1))
    tracer.close(0.01)
    assert "1 requests are not told of" in caplog.text


def test_what_cannot_be_told_or_sent_is_counted_and_the_thread_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    collector = Held(takes=False)
    collector.may.set()
    tracer = Tracer(collector, "m", delay_s=0.001, batch=1, clock=lambda: 100.0)
    for number in (12, 13, 14):
        tracer.add(story(number))
    tracer.start()
    tracer.close(60)
    assert tracer.dropped == {"queue_full": 0, "not_sent": 3}
    assert "request r13 cannot be told" in caplog.text
    assert caplog.text.count("does not take spans (it is away)") == 1
