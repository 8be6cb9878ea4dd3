"""Which pieces of prompts a step takes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.messages.commands import Pace, Reprioritize
from baton.worker.slots.composition import LEAST, Composition, Prompt

PACE = Pace(
    base=0.0025, token=0.0006, pair=1e-7, row=0.001, read=1e-6, alone=0.010, alone_row=0.0006, shortest=0.0106
)
ROOM = 2048


def prompt(slot, left, *, start=0, priority=0, resumed=False, patient=False, waited=0.0):
    return Prompt(slot, start, left, priority, resumed, patient, waited)


def make(*prompts, pace=PACE, itl=None, ttft=None):
    composition = Composition(itl, ttft)
    composition.pace = pace
    for one in prompts:
        composition.admit(one)
    return composition


def step(composition, rows=0, streaming=None, room=ROOM, context=None):
    """One step, to its end."""
    context = 200 * rows if context is None else context
    pieces = composition.choose(rows, context, rows > 0 if streaming is None else streaming, room)
    composition.computed(pieces, rows, context)
    for slot, _ in pieces:
        if composition.prompts[slot].left == 0:
            composition.leave(slot)
    return pieces


def test_whole_prompts_first():
    composition = make(*(prompt(slot, 128) for slot in range(16)))
    taken = []
    while composition.prompts:
        pieces = step(composition)
        assert all(count == 128 for _, count in pieces)
        taken += [slot for slot, _ in pieces]
    assert taken == list(range(16))


def test_the_shortest_first():
    composition = make(prompt(0, 1900), prompt(1, 600), prompt(2, 128))
    assert step(composition)[0] == (2, 128)
    assert step(composition)[0][0] == 1


def test_many_short_ones_share_a_step():
    composition = make(*(prompt(slot, 10) for slot in range(30)))
    pieces = step(composition, rows=4)
    assert len(pieces) > 5


def test_priorities_go_before_lengths():
    composition = make(prompt(0, 20), prompt(1, 1000, priority=-1), prompt(2, 30, priority=-1))
    assert [step(composition)[0][0] for _ in range(2)] == [2, 1]


def test_a_prompt_that_another_request_waits_for_goes_by_that_ones_priority():
    composition = make(prompt(0, 600, priority=5), prompt(1, 500), prompt(2, 30, priority=1))
    assert step(composition, rows=8)[0][0] == 1
    composition.reprioritize(Reprioritize(0, 1, -1, patient=False))
    assert step(composition, rows=8)[0][0] == 0
    composition.reprioritize(Reprioritize(0, 1, 5, patient=False))
    assert step(composition, rows=8)[0][0] == 1
    composition.reprioritize(Reprioritize(7, 1, 5, patient=False))  # (of a prompt that is computed)


def test_what_was_running_goes_on_first():
    composition = make(prompt(0, 20), prompt(1, 1000, resumed=True))
    assert step(composition, rows=1)[0][0] == 1


def test_a_long_prompt_is_not_passed_for_ever():
    """Short ones keep coming; the long one has half of what is computed, after the first half of it."""
    composition = make(prompt(0, 2000))
    own = others = 0
    number = 0
    while 0 in composition.prompts:
        for _ in range(4):
            number += 1
            composition.admit(prompt(number, 100))
        for slot, count in step(composition, rows=2):
            if slot:
                others += count
            else:
                own += count
        assert others <= 1000 + own + 300
    assert own == 2000


def test_streams_wait_for_as_long_as_the_target_says():
    for target in (0.05, 0.1, 0.4):
        composition = make(prompt(0, 1900), itl=target)
        start = 0
        while composition.prompts:
            [(_, count)] = step(composition, rows=8)
            assert PACE.with_prompts(count, start, 8, 1600) <= target * 1.01
            start += count


def test_without_a_target_streams_wait_for_some_steps():
    composition = make(prompt(0, 1900))
    [(_, count)] = step(composition, rows=8)
    assert PACE.with_prompts(count, 0, 8, 1600) <= 8 * PACE.shortest
    composition = make(prompt(0, 1900))
    [(_, many)] = step(composition, rows=64)
    assert PACE.with_prompts(many, 0, 64, 12800) <= 3 * PACE.decoding(64, 12800)


def test_steps_that_nobody_notices_cut_nothing():
    """A small model, whose steps take a millisecond: 8 of them would cut these prompts in two."""
    fast = Pace(
        base=5e-4, token=1.5e-5, pair=0.0, row=1e-5, read=0.0, alone=5e-4, alone_row=1e-5, shortest=6e-4
    )
    assert fast.with_prompts(500, 0, 8, 1600) > 8 * fast.shortest
    composition = make(*(prompt(slot, 125) for slot in range(4)), pace=fast)
    assert step(composition, rows=8) == [(slot, 125) for slot in range(4)]


def test_a_target_that_no_step_meets_leaves_some_tokens():
    composition = make(prompt(0, 1900), itl=0.001)
    assert LEAST <= step(composition, rows=8)[0][1] <= 2 * LEAST


def test_a_little_more_than_a_step_should_take_is_not_cut():
    free = make(prompt(0, 1900))
    [(_, usual)] = step(free, rows=8)
    composition = make(prompt(0, usual * 5 // 4 - 5))
    step(composition, rows=8)
    assert not composition.prompts


def test_pieces_are_equal():
    composition = make(prompt(0, 300), pace=None)
    assert [step(composition, rows=1)[0][1] for _ in range(3)] == [100, 100, 100]


def test_nobody_streams_and_nobody_else_waits():
    """Pieces of a lone prompt are larger than those of one for whose end others wait."""
    alone, beside = make(prompt(0, 1900)), make(prompt(0, 1900), prompt(1, 1901))
    assert step(alone)[0][1] > step(beside)[0][1]


def test_whole_answers_alone_take_what_fits():
    composition = make(*(prompt(slot, 500, patient=True) for slot in range(8)))
    pieces = composition.choose(10, 1000, False, ROOM)
    assert sum(count for _, count in pieces) == ROOM


def test_one_that_waits_for_a_patient_prompt_ends_that():
    composition = make(*(prompt(slot, 500, patient=True) for slot in range(8)))
    composition.reprioritize(Reprioritize(2, 1, 0, patient=False))
    assert sum(count for _, count in composition.choose(10, 1000, False, ROOM)) < ROOM


def test_one_that_waits_for_its_first_token_ends_that():
    composition = make(*(prompt(slot, 500, patient=slot > 0) for slot in range(8)))
    assert sum(count for _, count in composition.choose(10, 1000, False, ROOM)) < ROOM


def test_a_prompt_that_would_be_late_is_cut_less():
    late = step(make(prompt(0, 1900), itl=0.1), rows=8)[0][1]
    soon = step(make(prompt(0, 1900), itl=0.1, ttft=1.45), rows=8)[0][1]
    hopeless = step(make(prompt(0, 1900), itl=0.1, ttft=0.5), rows=8)[0][1]
    waited = step(make(prompt(0, 1900, waited=0.05), itl=0.1, ttft=1.45), rows=8)[0][1]
    assert late == hopeless < soon < waited


def test_what_the_steps_should_have_taken_counts():
    composition = make(prompt(0, 1900), itl=0.1, ttft=1.45)
    seconds = 0.0
    start = 0
    while composition.prompts:
        [(_, count)] = step(composition, rows=8)
        seconds += PACE.with_prompts(count, start, 8, 1600)
        start += count
    assert seconds <= 1.45


PACES = st.builds(
    Pace,
    base=st.floats(0, 0.1),
    token=st.floats(0, 0.1),
    pair=st.floats(0, 1e-3),
    row=st.floats(0, 0.1),
    read=st.floats(0, 1e-3),
    alone=st.floats(0, 1),
    alone_row=st.floats(0, 0.1),
    shortest=st.floats(0, 1),
)


@settings(max_examples=200, deadline=None)
@given(
    pace=st.none() | PACES,
    lengths=st.lists(
        st.tuples(st.integers(1, 5000), st.integers(-1, 1), st.booleans()), min_size=1, max_size=9
    ),
    rows=st.integers(0, 60),
    streaming=st.booleans(),
    room=st.integers(1, 2048),
    itl=st.none() | st.floats(1e-4, 10),
    ttft=st.none() | st.floats(1e-4, 10),
)
def test_whatever_is_measured_prompts_are_computed(pace, lengths, rows, streaming, room, itl, ttft):
    """Every step takes something, no more than fits, of each prompt once; and all are through in the end."""
    prompts = [
        prompt(slot, left, priority=priority, patient=patient)
        for slot, (left, priority, patient) in enumerate(lengths)
    ]
    composition = make(*prompts, pace=pace, itl=itl, ttft=ttft)
    if pace is not None:
        composition.pace = msgspec.structs.replace(pace)
    steps = 0
    while composition.prompts:
        lefts = {slot: one.left for slot, one in composition.prompts.items()}
        pieces = step(composition, rows, streaming and rows > 0, room)
        assert pieces
        assert 1 <= sum(count for _, count in pieces) <= room
        assert len({slot for slot, _ in pieces}) == len(pieces)
        assert all(1 <= count <= lefts[slot] for slot, count in pieces)
        steps += 1
    assert steps <= sum(-(-left // min(room, LEAST // 2)) for left, _, _ in lengths)


def test_ranks_choose_the_same():
    """What decides is in the arguments: two machines with the same past choose the same."""
    one, two = (make(prompt(0, 1900), prompt(1, 50), prompt(2, 700), ttft=1.0) for _ in range(2))
    for rows in (0, 3, 9, 0, 2):
        assert step(one, rows) == step(two, rows)


@pytest.mark.parametrize("tokens", [1, 3, 15])
def test_little_room(tokens):
    composition = make(prompt(0, 100), prompt(1, 20))
    assert 1 <= sum(count for _, count in step(composition, rows=4, room=tokens)) <= tokens
