"""The drafter of an executor, with the real source and a model that is a function."""

from __future__ import annotations

import numpy as np
import pytest

from baton.drafting.cost import StepCost
from baton.drafting.drafter import ChoosingDrafter
from baton.drafting.forced import WithForced
from baton.drafting.guesses import Guesses, Judged
from baton.drafting.making import make_drafter
from baton.drafting.ngram import NgramGuesses
from baton.model.cpu.ngram import ngram_kernel
from baton.model.cpu.suffix import suffix_kernel
from baton.protocol.config import Speculation
from baton.protocol.params.sampling import Sampling, Stopping

SAMPLING, STOPPING = Sampling(seed=1), Stopping(max_tokens=100)


def int32s(values) -> np.ndarray:
    return np.array(values, np.int32)


class Told:
    """A source that has the same guess each time; counts what it was told."""

    eager = False

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], list[int]]] = []
        self.admitted: list[int] = []
        self.chance = 0.9

    def admit(self, slot, tokens, num_prompt, salt=b""):
        self.admitted.append(slot)

    def release(self, slot):
        self.admitted.remove(slot)

    def follow(self, slots, runs, tokens):
        assert set(slots.tolist()) <= set(self.admitted)
        self.calls.append((slots.tolist(), runs.tolist(), tokens.tolist()))
        drafts = np.repeat(slots[:, None] * 10, 3, 1) + np.arange(3)
        chances = np.cumprod(np.full((len(slots), 3), self.chance, np.float32), 1)
        return Guesses(drafts.astype(np.int32), chances, np.full(len(slots), 3, np.int32))


def step(drafter, slots, tokens=None, runs=None, seconds=None):
    slots = int32s(slots)
    runs = np.ones(len(slots), np.int32) if runs is None else int32s(runs)
    tokens = np.zeros(int(runs.sum()), np.int32) if tokens is None else int32s(tokens)
    drafter.after(slots, runs, tokens)
    if seconds is not None:
        drafter.took(len(tokens), seconds)
    return {slot: drafts.tolist() for slot, drafts in drafter.propose(slots).items()}


def told(num_slots=8, cost=None):
    source = Told()
    drafter = ChoosingDrafter(source, cost=cost)
    for slot in range(num_slots):
        drafter.admit(slot, int32s([1]), 1, SAMPLING, STOPPING)
    return source, drafter


def test_all_guesses_are_drafts_if_the_number_is_fixed():
    _, drafter = told()
    assert step(drafter, [4, 2]) == {4: [40, 41, 42], 2: [20, 21, 22]}


def test_a_slot_that_did_not_run_or_is_over_has_no_drafts():
    source, drafter = told()
    drafter.after(int32s([1, 2, 3]), int32s([1, 1, 1]), int32s([0, 0, 0]))
    assert sorted(drafter.propose(int32s([3, 5, 1]))) == [1, 3]
    drafter.release(3)
    assert drafter.propose(int32s([1])) == {}  # (of a step that is over)
    assert 3 not in source.admitted


def test_what_a_slot_had_before_is_never_proposed_to_its_next_request():
    _, drafter = told()
    drafter.after(int32s([1]), int32s([1]), int32s([0]))
    drafter.release(1)
    drafter.admit(1, int32s([9]), 1, SAMPLING, STOPPING)
    assert drafter.propose(int32s([1])) == {}


def test_none_before_a_step_without_drafts_was_measured():
    """By what else would a gain be known?"""
    _, drafter = told(cost=StepCost(40))
    found = [step(drafter, [0], seconds=0.01) for _ in range(5)]
    assert found[0] == {}
    assert found[-1] != {}


def test_where_nothing_is_worth_it_the_source_is_asked_seldom_and_told_all():
    source, drafter = told(cost=StepCost(40))
    source.chance = 0.01
    for number in range(400):
        assert step(drafter, [3, 5], [number, 1000 + number], seconds=0.01) == {}
    assert len(source.calls) < 150
    drafter.release(5)  # (all was told)
    tokens = [token for _, _, tokens in source.calls for token in tokens]
    assert tokens == [token for number in range(400) for token in (number, 1000 + number)]
    # What is worth it is seen within some steps, and from then on each step has drafts.
    source.chance = 0.95
    found = [step(drafter, [3], seconds=0.01) for _ in range(20)]
    assert any(found[:9])
    assert all(found[9:])


def test_a_new_request_is_looked_at_from_its_first_token_on():
    source, drafter = told(cost=StepCost(40))
    source.chance = 0.01
    for _ in range(400):
        step(drafter, [3], seconds=0.01)
    drafter.release(4)
    drafter.admit(4, int32s([1]), 1, SAMPLING, STOPPING)
    before = len(source.calls)
    step(drafter, [3, 4])
    assert len(source.calls) == before + 1


def quoting(method: str, text: list[int], seconds) -> tuple[int, int, list[int]]:
    """Runs one request whose prompt is its answer.  Steps, drafts, and the answer."""
    speculation = Speculation(method=method, num_speculative_tokens=7)
    drafter = make_drafter(
        speculation, max_num_seqs=4, vocab_size=1000, ngram=ngram_kernel(), suffix=suffix_kernel
    )
    drafter.admit(2, int32s([*text, 999]), len(text) + 1, SAMPLING, STOPPING)
    answer = [text[0]]
    steps = drafts = 0
    run, drafted = 1, 0
    while len(answer) < len(text):
        drafter.after(int32s([2]), int32s([run]), int32s(answer[-run:]))
        drafter.took(1 + drafted, seconds(1 + drafted))
        found = drafter.propose(int32s([2])).get(2, int32s([])).tolist()
        run, drafted = 1, len(found)
        while run <= drafted and text[len(answer) + run - 1 :][:1] == found[run - 1 : run]:
            run += 1
        answer += text[len(answer) : len(answer) + run]
        run = min(run, len(answer))
        steps, drafts = steps + 1, drafts + drafted
    return steps, drafts, answer


@pytest.mark.parametrize("method", ["auto", "ngram"])
def test_an_answer_that_quotes_takes_a_fraction_of_the_steps(method):
    text = np.random.default_rng(0).integers(0, 900, 300).tolist()
    steps, _, answer = quoting(method, text, lambda tokens: 0.01 + 0.0001 * tokens)
    assert answer[: len(text)] == text
    assert steps < (70 if method == "auto" else 55)


def test_none_where_a_step_is_bound_by_arithmetic():
    text = np.random.default_rng(0).integers(0, 900, 300).tolist()
    steps, drafts, _ = quoting("auto", text, lambda tokens: 0.01 * tokens**1.3)
    assert drafts < 20
    assert steps > 280


def test_a_method_that_nobody_has():
    with pytest.raises(ValueError, match="give auto, ngram, suffix, draft_model or mtp"):
        make_drafter(
            Speculation(method="draft"),
            max_num_seqs=4,
            vocab_size=10,
            ngram=ngram_kernel(),
            suffix=suffix_kernel,
        )


def test_bounded_by_the_configured_number():
    source = NgramGuesses(ngram_kernel(), 2, most=3)
    drafter = ChoosingDrafter(source, cost=None)
    drafter.admit(0, int32s([1, 2, 3, 4, 5, 6, 7]), 7, SAMPLING, STOPPING)
    assert step(drafter, [0], [1, 2], [2]) == {0: [3, 4, 5]}


def test_guesses_that_say_nothing_of_themselves_are_judged_by_position():
    judged = Judged(2, 4, prior=0.5)
    judged.admit(1)
    assert judged.chances(1, [5, 6, 7]).tolist() == pytest.approx([0.5, 0.25, 0.125])
    for _ in range(60):
        judged.chances(1, [5, 6, 7, 8])
        judged.judge(1, [5, 6, 0, 8])
    found = judged.chances(1, [5, 6, 7, 8])
    assert found[1] > 0.9
    assert found[2] < 0.1
    judged.admit(1)
    judged.judge(1, [0, 0, 0])  # nothing was guessed of this request
    others = judged.chances(1, [5, 6, 7])  # (what is known of it is what is known of all)
    assert others[1] > 0.8
    assert others[2] < 0.2


def test_what_a_grammar_forces_is_drafted_where_it_promises_more():
    source, forced, constrained = Told(), {}, [True]
    mixed = WithForced(source, lambda slots: forced, lambda: constrained[0], 8, 3)
    drafter = ChoosingDrafter(mixed, cost=None)
    for slot in range(3):
        drafter.admit(slot, int32s([1]), 1, SAMPLING, STOPPING)
    source.chance = 0.3
    forced[1] = [7, 8, 9, 7]
    assert step(drafter, [0, 1]) == {0: [0, 1, 2], 1: [7, 8, 9]}
    source.chance = 0.99
    assert step(drafter, [0, 1], [5, 7]) == {0: [0, 1, 2], 1: [10, 11, 12]}
    # It is judged by what comes: this model spells it otherwise.
    source.chance = 0.5
    found = [step(drafter, [1], [6])[1] for _ in range(20)]
    assert found[0] == [7, 8, 9]
    assert found[-1] == [10, 11, 12]
    source.chance = 0.05
    drafter.release(1)
    drafter.admit(1, int32s([1]), 1, SAMPLING, STOPPING)
    assert step(drafter, [1]) == {1: [7, 8, 9]}
    constrained[0] = False
    assert step(drafter, [1]) == {1: [10, 11, 12]}


def test_what_is_forced_is_asked_after_each_step():
    """It comes and goes with the answer's place, so that it was worth nothing lately says little."""
    source, forced = Told(), {}
    source.chance = 0.01
    mixed = WithForced(source, lambda slots: forced, lambda: True, 8, 3)
    drafter = ChoosingDrafter(mixed, cost=StepCost(40))
    drafter.admit(1, int32s([1]), 1, SAMPLING, STOPPING)
    for _ in range(300):
        assert step(drafter, [1], seconds=0.01) == {}
    forced[1] = [7, 8, 9]
    assert step(drafter, [1])[1][0] == 7
