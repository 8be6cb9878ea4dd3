"""The event log without any process: clocks, trails, spans, rings, and the trace that is made of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.observe.events.clocks import Alignment, Moment
from baton.observe.events.log import SLOW_FOR_S, EventLog
from baton.observe.events.perfetto import Load, chrome_trace
from baton.observe.events.spans import events as events_of
from baton.observe.events.spans import spans, sums
from baton.observe.events.steps import MAX_BYTES, StepLog
from baton.observe.events.story import MAX_TRAILS, Story
from baton.observe.events.views import summary, whole
from baton.protocol.notes import MAX_NOTES, MEANING, Note, Notes
from baton.protocol.step_notes import STEP_NOTES, StepNote
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


def planted(p_wrong: float, d_wrong: float, reach: float, *, known: bool = True) -> Story:
    """A hand-over between two hosts, 30 us after the prefill; the gateway's view of P's clock is wrong by
    `p_wrong` and of D's by `d_wrong` seconds, within the `reach` that the messages leave."""
    p_ahead, d_ahead = 700.0, -3000.0
    story = Story("moved", arrived=10.0, started=10.0, wall=1.7e9, prompt_tokens=100, first_at=10.2002)
    trail = story.trail()
    assert trail is not None
    trail.add(10.0001, "sent", 1, 100, text="p0>d0")
    clocks = []
    for ahead, wrong in ((p_ahead, p_wrong), (d_ahead, d_wrong)):
        clock = Alignment()
        if known:
            clock.sent(10.2999, 10.2999 + ahead + wrong + reach)
        clock.heard(10.2999 + ahead + wrong - reach, 10.2999)
        clocks.append(clock)
    at_p = [
        (10.0002, "arrived", 100, 0, 0, ""),
        (10.0003, "asks", 4, 0, 0, "d"),
        (10.0004, "room", 4, 0, 0, "d"),
        (10.0005, "admitted", 3, 0, 100, ""),
        (10.1, "prefilled", 100, 0, 3, ""),
        (10.10001, "handed", 4, 1, 0, "d"),
        (10.10008, "taken", 0, 0, 0, "d"),
        (10.10009, "ended", 1, 0, 0, "handed_over"),
    ]
    at_d = [
        (10.00035, "reserved", 4, 100, 0, "p"),
        (10.10003, "received", 4, 1, 0, "p"),
        (10.10004, "fetched", 4096, 20, 0, "tcp"),
        (10.10005, "admitted", 0, 99, 100, ""),
        (10.25, "ended", 20, 0, 0, "length"),
    ]
    trail.add(10.15, "heard", 1, text="d0")
    trail.tell(1, "d0", [Note(at + d_ahead, *note) for at, *note in at_d], clocks[1], 10.29)
    trail.tell(1, "p0", [Note(at + p_ahead, *note) for at, *note in at_p], clocks[0], 10.3)
    story.ended, story.reasons = 10.3, ("length",)
    return story


WRONG = st.floats(-0.04, 0.04)


def test_an_old_message_does_not_take_the_place_of_a_newer_one_that_says_more():
    clock = Alignment()
    clock.heard(705.0, 5.0)
    clock.sent(5.0, 705.0001)
    before = clock.offset(5.0)
    clock.sent(0.0, 700.0002)
    clock.heard(699.9999, 0.0)
    assert clock.offset(5.0) == before
    clock.sent(0.0, 699.999)  # (better by as much as the clocks may have drifted apart since)
    assert clock.offset(5.0)[0] < before[0]


@given(WRONG, WRONG, st.floats(0.0, 0.02), st.booleans())
@example(0.0, 0.0, 6.1e-5, True)
def test_what_clocks_are_wrong_by_never_turns_a_hand_over_around(p_wrong, d_wrong, more, known):
    reach = max(abs(p_wrong), abs(d_wrong)) + more + 1e-5
    story = planted(p_wrong, d_wrong, reach, known=known)
    found = spans(story, story.trails[0], 20.0)
    assert [(span.name, span.where) for span in found] == [
        ("read", "gateway"),
        ("queue", "p0"),
        ("prefill", "p0"),
        ("handover", "p0"),
        ("decode", "d0"),
        ("finish", "d0"),
    ]
    assert all(span.begin <= span.end == after.begin for span, after in pairwise(found))
    placed = {(event.where, event.note.what): event.at for event in events_of(story.trails[0])}
    for before, after in (("asks", "reserved"), ("handed", "received")):
        assert placed["p0", before] < placed["d0", after]
    for before, after in (("reserved", "room"), ("received", "taken")):
        assert placed["d0", before] < placed["p0", after]
    # The parts of one engine keep their lengths, but for those that the end of the request cuts.
    assert placed["p0", "prefilled"] - placed["p0", "admitted"] == pytest.approx(0.0995)
    assert placed["d0", "ended"] - placed["d0", "admitted"] == pytest.approx(0.14995)
    if known:  # Neither is moved by more than what is known of it.
        assert abs(placed["p0", "prefilled"] - 10.1) <= 2 * reach
        assert abs(placed["d0", "admitted"] - 10.10005) <= 2 * reach
        errors = [clock["error_ms"] for clock in whole(story, 20.0)["clocks"].values()]
        assert all(0 < error <= reach * 1000 + 0.01 for error in errors)
    else:
        assert summary(story, 20.0)["timings"]["clock_error_ms"] is None


def test_the_planted_errors_would_be_seen():
    """Without the order of what follows from one another, D runs the request before P has prefilled it."""
    story = planted(-0.02, 0.02, 0.021)
    p, d = (told.moment.offset()[0] for told in reversed(story.trails[0].told))
    notes = {told.instance: {n.what: n.at for n in told.notes} for told in story.trails[0].told}
    assert notes["d0"]["admitted"] - d < notes["p0"]["prefilled"] - p


def test_what_an_instance_says_after_the_request_was_taken_from_it_is_no_part_of_its_way():
    story = Story("moved", arrived=10.0, started=10.0)
    trail = story.trail()
    assert trail is not None
    clock = Alignment()
    clock.shared = True
    trail.add(10.0, "sent", 1, text="a")
    trail.add(11.0, "moved", 1, 5, text="a")
    trail.add(11.0, "sent", 2, text="b")
    trail.tell(1, "a", [Note(10.1, "admitted", 0, 0, 9), Note(11.1, "ended", 5, text="aborted")], clock, 11.2)
    trail.tell(2, "b", [Note(11.3, "admitted", 0, 0, 14), Note(12.0, "ended", 9, text="stop")], clock, 12.0)
    story.ended = 12.5
    names = [(span.name, span.where) for span in spans(story, trail, 12.5)]
    assert names == [
        ("read", "gateway"),
        ("queue", "a"),
        ("prefill", "a"),
        ("lost", "gateway"),
        ("queue", "b"),
        ("prefill", "b"),
        ("finish", "b"),
    ]


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


NOTES = [
    StepNote(0, 1, 5000.0, 0.1, prompts=2, prefill_tokens=300, tokens=1),
    StepNote(1, 1, 5000.01, 0.09),
    StepNote(0, 2, 5000.1, 0.05, decode_rows=3, tokens=5, drafted=6, accepted=2),
    StepNote(1, 2, 5000.11, 0.04, 0.002),
    StepNote(2, 1, 5000.02, 0.04, -1.0),
]


def heard(*notes: StepNote, log: StepLog | None = None, clock: Alignment | None = None) -> StepLog:
    """Told at 10.2 on our clock, 5000.2 on theirs, and 5 ms before or after."""
    if clock is None:
        clock = Alignment()
        clock.sent(10.2, 5000.205)
        clock.heard(5000.195, 10.2)
    log = StepLog() if log is None else log
    log.add("i.1", STEP_NOTES.encode(list(notes)), clock, 10.2)
    return log


def test_steps_are_put_on_the_gateways_clock_with_what_the_first_rank_says_of_them():
    steps = heard(*NOTES).between(0.0, 20.0)
    assert [(step.rank, step.number) for step in steps] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2)]
    assert [step.begin for step in steps] == pytest.approx([10.0, 10.01, 10.02, 10.1, 10.11], abs=0.005)
    errors = [step.error and round(step.error, 3) for step in steps]
    assert errors == [0.005, 0.005, None, 0.005, 0.007]
    assert [step.computed for step in steps] == [NOTES[0], NOTES[0], NOTES[0], NOTES[2], NOTES[2]]
    assert [step.number for step in heard(*NOTES).between(10.12, 20.0)] == [2, 2]
    assert heard(*NOTES).between(10.3, 20.0) == heard(*NOTES).between(0.0, 9.9) == []


def test_a_log_of_steps_is_bounded_and_reads_what_it_can():
    log = heard(NOTES[0])
    log.add("i.2", b"\xc1", Alignment(), 10.3)
    size = len(STEP_NOTES.encode([NOTES[2]]))
    assert [step.number for step in heard(NOTES[2], log=log).between(0.0, 20.0)] == [1, 2]
    for _ in range(MAX_BYTES // size + 10):
        heard(NOTES[2], log=log)
    assert log.copy()._bytes == log._bytes <= MAX_BYTES
    assert {step.number for step in log.between(0.0, 20.0)} == {2}
    assert len(log.between(0.0, 20.0)) == MAX_BYTES // size


def test_what_was_known_of_a_clock_stays_known_of_that_moment():
    clock = Alignment()
    clock.sent(10.0, 5010.001)
    clock.heard(5009.999, 10.0)
    then = Moment(clock, 10.0)
    assert then.offset() == (pytest.approx(5000), pytest.approx(0.001))
    clock.sent(10.1, 5010.1002)  # what is learnt soon after says more
    clock.heard(5010.0998, 10.1)
    assert then.offset() == (pytest.approx(5000), pytest.approx(0.0002, rel=0.2))
    clock.sent(3610.1, 8610.6)  # an hour later the clocks have drifted apart by half a second
    clock.heard(8610.5, 3610.1)
    assert then.offset() == (pytest.approx(5000), pytest.approx(0.0002, rel=0.2))


def test_steps_are_on_the_tracks_of_their_ranks():
    events = chrome_trace([handed_over()], 20.0, steps={"p0": heard(*NOTES).between(0.0, 20.0), "d0": []})
    events = events["traceEvents"]
    check_trace(events)
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps = [event for event in events if event.get("cat") == "step"]
    assert [(tracks[e["pid"], e["tid"]], e["name"], e["args"]["step"]) for e in steps] == [
        ("rank 0", "prefill", 1),
        ("rank 1", "prefill", 1),
        ("rank 2", "prefill", 1),
        ("rank 0", "decode", 2),
        ("rank 1", "decode", 2),
    ]
    computed = {"decode_rows": 0, "prompts": 2, "prefill_tokens": 300, "tokens": 1}
    assert steps[0]["args"] == {"step": 1, **computed, "clock_error_ms": 5}
    assert steps[2]["args"] == {"step": 1, **computed, "clock_error_ms": None}
    assert (steps[3]["args"]["drafted"], steps[3]["args"]["accepted"]) == (6, 2)
    assert steps[0]["dur"] == pytest.approx(1e5)
    shared = Alignment()
    shared.shared = True
    (step,) = heard(NOTES[0], clock=shared).between(0.0, 6000.0)
    assert (step.begin, step.error) == (5000.0, 0.0)


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
