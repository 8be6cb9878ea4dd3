"""What an engine tells of its steps: each once, with what it computed, and nothing that nobody wants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.workers.step_notes import StepNotes
from baton.protocol.codec import pack_int32
from baton.protocol.messages.reports import Closed, CloseReason, StepReport, StepsRan
from baton.protocol.messages.requests import Load, Query, QueryReply
from baton.protocol.step_notes import MAX_STEPS, STEP_NOTES, StepNote
from tests.engine.test_loads import INTERVAL_S, Loaded


def told(loads: list[Load]) -> list[StepNote]:
    found = []
    for load in loads:
        notes = STEP_NOTES.decode(load.steps) if load.steps else []
        assert all(note.began + note.seconds <= load.written + 1e-9 for note in notes)
        found += notes
    return found


def ran(engine: Loaded, **changes) -> None:
    """A step of what is on slot 0, which ends now."""
    engine.step += 1
    engine.report(StepReport(engine.step, 0, seconds=0.01, began=engine.now - 0.01, **changes))


def run(engine: Loaded) -> None:
    """A prompt of ten tokens in two pieces, one token, and a run of three, of which two were drafts."""
    engine.submit(1)
    (admit,) = engine.commands
    rows = (pack_int32([admit.slot]), pack_int32([admit.epoch]))
    chunks = {"prefill_slots": rows[0], "prefill_epochs": rows[1]}
    ran(engine, **chunks, prefill_computed=pack_int32([6]))
    engine.wait(0.01)
    ran(
        engine,
        **chunks,
        prefill_computed=pack_int32([10]),
        **dict(zip(("slots", "epochs", "tokens"), (*rows, pack_int32([5])), strict=True)),
    )
    engine.wait(0.01)
    ran(
        engine,
        slots=rows[0] * 3,
        epochs=rows[1] * 3,
        tokens=pack_int32([6, 7, 8]),
        speculation=[1, 4, 1, 1],
        closings=[Closed(admit.slot, admit.epoch, CloseReason.LENGTH)],
    )


def test_each_step_is_told_once_with_what_it_computed() -> None:
    engine = Loaded(note_steps=True)
    begun = engine.now
    run(engine)
    engine.wait(INTERVAL_S)
    engine.wait(INTERVAL_S)
    first, second, third = told(engine.loads)
    assert first == StepNote(0, 1, pytest.approx(begun - 0.01), 0.01, prompts=1, prefill_tokens=6)
    assert second == StepNote(0, 2, pytest.approx(begun), 0.01, prompts=1, prefill_tokens=4, tokens=1)
    more = {"decode_rows": 1, "tokens": 3, "drafted": 4, "accepted": 2}
    assert third == StepNote(0, 3, pytest.approx(begun + 0.01), 0.01, **more)


def test_nothing_is_told_if_nobody_wants_it_and_other_ranks_are_ignored() -> None:
    engine = Loaded(ranks=2)
    run(engine)
    engine.report(StepsRan(engine.now, 1, [engine.now - 0.01], [0.01]), 1)
    engine.wait(INTERVAL_S)
    assert engine.loads
    assert told(engine.loads) == []
    assert engine.core.counters.violations == 0


def test_other_ranks_are_told_too_and_rank_0_says_nothing_of_this_kind() -> None:
    engine = Loaded(note_steps=True, ranks=2, tensor_parallel_size=2)
    run(engine)
    engine.report(StepsRan(engine.now, 1, [9.9, 9.91], [0.01, 0.02]), 1)
    engine.wait(INTERVAL_S)
    assert [note for note in told(engine.loads) if note.rank] == [
        StepNote(1, 1, 9.9, 0.01),
        StepNote(1, 2, 9.91, 0.02),
    ]
    engine.report(StepsRan(engine.now, 3, [9.9], [0.01]), 0)
    assert engine.core.counters.violations == 1


def test_who_asks_is_told_at_once_and_before_the_answer() -> None:
    engine = Loaded(note_steps=True)
    engine.wait(1.0)
    engine.submit(1)
    engine.wait(INTERVAL_S)
    known = len(engine.loads)
    (admit,) = engine.commands
    rows = {"prefill_slots": pack_int32([admit.slot]), "prefill_epochs": pack_int32([admit.epoch])}
    ran(engine, **rows, prefill_computed=pack_int32([6]))
    ran(engine, **rows, prefill_computed=pack_int32([8]))
    before = len(told(engine.loads))
    answered = []
    take = engine.core._outboxes.take

    def watched():
        messages = take()
        answered.extend(type(message) for _, message in messages)
        return messages

    engine.core._outboxes.take = watched
    engine.core.on_message(b"g", Query(7, "stats", "steps"), engine.now)
    answered.clear()
    engine.flush()
    assert answered[:2] == [Load, QueryReply]
    assert len(engine.loads) > known
    assert [note.step for note in told(engine.loads)][before:] == list(range(before + 1, 3))


def test_steps_that_nobody_takes_are_forgotten_from_the_oldest_on() -> None:
    notes = StepNotes(wanted=True, ranks_per_host=1)
    for step in range(1, MAX_STEPS + 10):
        notes.leader(StepReport(step, 0, seconds=0.1, began=float(step)), step + 0.1, 0, 0)
    found = STEP_NOTES.decode(notes.take())
    assert [found[0].step, found[-1].step, len(found)] == [10, MAX_STEPS + 9, MAX_STEPS]
    assert notes.take() == b""


@given(
    st.floats(-1e5, 1e5),
    st.lists(st.tuples(*[st.floats(1e-5, 0.02)] * 4), min_size=2, max_size=40),
    st.floats(1e-5, 0.1),
)
def test_a_rank_on_another_host_is_never_wrong_by_more_than_it_says(ahead, steps, delay) -> None:
    """A ticket and its way, composing, the step, the leader's pause: planted."""
    notes, now = StepNotes(wanted=True, ranks_per_host=1), 100.0
    began, seconds, true = [], [], []
    for number, (ticket, compose, step, pause) in enumerate(steps, 1):
        report = StepReport(number, 0, seconds=compose + step, began=now + pause)
        notes.leader(report, now + pause + compose + step, 0, 0)
        true.append(now + ticket)
        began.append(now + ticket + ahead)
        seconds.append(step)
        now += pause + compose + step
    now = max(now, true[-1] + steps[-1][2])
    notes.ran(1, StepsRan(now + ahead, 1, began, seconds), now + delay)
    others = [note for note in STEP_NOTES.decode(notes.take()) if note.rank]
    assert len(others) == len(steps)
    for note, at in zip(others, true, strict=True):
        assert note.error >= 0
        assert abs(note.began - at) <= note.error + 1e-6
