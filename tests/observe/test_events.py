"""The event log without any process: clocks, trails, spans, rings, and the trace that is made of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.observe.events.clocks import Alignment
from baton.observe.events.log import SLOW_FOR_S, EventLog
from baton.observe.events.perfetto import Load, chrome_trace
from baton.observe.events.spans import spans, sums
from baton.observe.events.story import MAX_TRAILS, Story
from baton.observe.events.views import summary, whole
from baton.protocol.notes import MAX_NOTES, MEANING, Note, Notes
from tests.observe.traces import check_trace

DELAYS = st.floats(0, 0.5)


@given(
    st.floats(-1e5, 1e5), st.floats(-1e-4, 1e-4), st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=20)
)
def test_the_true_offset_is_never_further_away_than_the_error(offset, drift, messages):
    clock, now = Alignment(), 100.0

    def theirs(at: float) -> float:
        return at * (1 + drift) + offset

    for there, back in messages:
        clock.sent(now, theirs(now + there))
        clock.heard(theirs(now + there), now + there + back)
        now += 1.0
    found, error = clock.offset(now)
    assert error is not None
    assert abs(found - (theirs(now) - now)) <= error + 1e-6
    assert error <= min((there + back) / 2 for there, back in messages[-1:]) + 1e-3


def test_one_side_alone_says_no_error_and_a_shared_clock_has_none():
    clock = Alignment()
    assert clock.offset(1.0) == (0.0, None)
    clock.heard(50.0, 10.0)
    assert clock.offset(10.0) == (40.0, None)
    clock.shared = True
    assert clock.offset(10.0) == (0.0, 0.0)


def test_notes_are_bounded_whatever_happens_and_add_up():
    notes = Notes()
    notes.add(0.0, "arrived", 5000)
    for number in range(500):
        notes.add(number, "chunk", 10, 10 * (number + 1), number % 2)
        notes.add(number, "fetched", 7, 3, 1)
    assert len(notes.entries) <= MAX_NOTES
    assert sum(note.a for note in notes.entries if note.what == "chunk") == 5000
    assert sum(note.a for note in notes.entries if note.what == "fetched") == 3500
    assert sum(note.b for note in notes.entries if note.what == "fetched") == 1500
    for number in range(500):
        notes.add(1000 + number, "preempted", number)
    assert len(notes.entries) == MAX_NOTES
    assert notes.entries[0].what == "arrived"
    assert notes.entries[-1].a == 499


def handed_over() -> Story:
    """A request that was handed over to an engine on a clock 1,000 s ahead, and continued elsewhere."""
    story = Story("chat-1", arrived=10.0, started=10.1, wall=1.7e9, prompt_tokens=100, first_at=10.5)
    trail = story.trail()
    assert trail is not None
    p, d, last = Alignment(), Alignment(), Alignment()
    p.shared = last.shared = True
    trail.add(10.1, "sent", 1, 100, text="p0>d0>d1")
    notes = [
        Note(10.11, "arrived", 100),
        Note(10.2, "admitted", 3, 0, 100),
        Note(10.4, "prefilled", 100, 100, 3),
        Note(10.41, "handed", 4, 1, text="d"),
        Note(10.5, "ended", 1, text="handed_over"),
    ]
    trail.tell(1, "p0", notes, p, 10.51)
    trail.add(10.5, "heard", 1, text="d0")
    trail.add(11.0, "lost", 1, 20, text="killed")
    trail.add(11.2, "sent", 2, 100, text="d1")
    notes = [
        Note(11.21, "arrived", 100, 20),
        Note(11.3, "admitted", 0, 0, 120),
        Note(11.5, "prefilled", 120, 120),
        Note(12.0, "ended", 40, text="length"),
    ]
    trail.tell(2, "d1", notes, last, 12.01)
    trail.add(11.51, "heard", 2, text="d1")
    story.ended, story.reasons, story.generated_tokens = 12.1, ("length",), 40
    d.heard(1012.0, 12.0)
    return story


def test_the_spans_of_a_handed_over_and_continued_request():
    story = handed_over()
    found = spans(story, story.trails[0], 20.0)
    assert [(span.name, span.where, span.id, span.slot) for span in found] == [
        ("read", "gateway", 0, -1),
        ("queue", "p0", 1, -1),
        ("prefill", "p0", 1, 3),
        ("handover", "p0", 1, -1),
        ("decode", "d0", 1, -1),
        ("lost", "gateway", 1, -1),
        ("queue", "d1", 2, -1),
        ("prefill", "d1", 2, 0),
        ("decode", "d1", 2, 0),
        ("finish", "d1", 2, -1),
    ]
    assert (found[0].begin, found[-1].end) == (10.0, 12.1)
    assert all(span.end == after.begin for span, after in pairwise(found))
    assert sums(found)["decode"] == pytest.approx(0.5 + 0.5)
    assert sum(sums(found).values()) == pytest.approx(2.1)
    row = whole(story, 20.0)
    assert row["instances"] == ["p0", "d0", "d1"]
    assert (row["continuations"], row["preemptions"]) == (1, 0)
    assert row["timings"]["total_ms"] == 2100
    assert set(row["clocks"]) == {"p0", "d1"}


def test_notes_of_another_clock_are_put_on_the_gateways():
    story = Story("one", arrived=10.0, started=10.0)
    trail = story.trail()
    assert trail is not None
    trail.add(10.0, "sent", 1, text="far")
    notes = [
        Note(5000.2, "arrived", 9),
        Note(5000.3, "admitted", 0, 0, 9),
        Note(5000.6, "ended", 1, text="stop"),
    ]
    trail.tell(1, "far", notes, Alignment(), 10.8)
    story.ended = 11.0
    found = {span.name: span for span in spans(story, trail, 11.0)}
    assert found["prefill"].begin == pytest.approx(10.3, abs=0.01)  # 0.2 s there and back at most
    assert summary(story, 11.0)["timings"]["clock_error_ms"] == pytest.approx(200, abs=2)


def test_what_never_was_sent_and_what_still_runs_have_spans_too():
    story = Story("new", arrived=10.0, started=10.0)
    assert [span[:4] for span in spans(story, None, 12.0)] == [("read", "gateway", 10.0, 12.0)]
    trail = story.trail()
    assert trail is not None
    trail.add(10.5, "parked", -1)
    trail.add(11.0, "sent", 1, text="i0")
    assert [span.name for span in spans(story, trail, 12.0)] == ["read", "wait", "queue"]
    assert summary(story, 12.0)["state"] == "running"
    while story.trail() is not None:
        pass
    assert len(story.trails) == MAX_TRAILS


def test_slow_and_failed_requests_stay_when_others_go():
    log = EventLog(8)
    for number in range(100):
        story = Story(str(number), arrived=number, started=number)
        story.first_at = number + (5.0 if number == 7 else 0.01)
        story.ended = story.first_at + 1
        story.error = "internal" if number == 9 else None
        log.add(story, story.ended)
    assert [story.id for story in log.recent()] == [str(number) for number in range(99, 91, -1)]
    assert [story.id for story in log.failed()] == ["9"]
    assert log.slow()[0].id == "7"
    assert len(log.slow()) == 2
    assert log.find("7") is not None
    assert log.find("50") is None
    late = Story("late", arrived=7 + SLOW_FOR_S, started=0, first_at=7 + SLOW_FOR_S, ended=7 + SLOW_FOR_S)
    log.add(late, 7 + SLOW_FOR_S + 1)
    assert "7" not in [story.id for story in log.slow()]


def test_a_log_that_keeps_nothing():
    log = EventLog(0)
    log.add(handed_over(), 20.0)
    assert (log.recent(), log.failed(), log.slow(), log.find("chat-1")) == ([], [], [], None)


def test_the_trace_is_one_that_a_viewer_takes():
    loads = {"p0": [Load(10.2, 1, 0, 4), Load(10.6, 0, 0, 0)]}
    events = chrome_trace([handed_over()], 20.0, loads)["traceEvents"]
    check_trace(events)
    slices = [(event["name"], event["tid"]) for event in events if event["ph"] == "X"]
    assert slices == [("prefill chat-1", 103), ("prefill chat-1", 100), ("decode chat-1", 100)]
    assert [event["args"] for event in events if event["ph"] == "C" and event["name"] == "KV blocks"] == [
        {"used": 4},
        {"used": 0},
    ]
    overlapping = [event | {"tid": 100, "pid": 2} for event in events if event["ph"] == "X"]
    overlapping[1]["ts"] = overlapping[2]["ts"]
    with pytest.raises(AssertionError):
        check_trace([event for event in events if event["ph"] == "M"] + overlapping)


def test_every_kind_of_note_that_the_engine_and_the_gateway_write_has_a_meaning():
    kinds = {"sent", "parked", "heard", "lost", "ended", "handed", "received", "fetched", "admitted", "chunk"}
    assert kinds <= set(MEANING)
    assert all(len(names) == 4 for names in MEANING.values())
