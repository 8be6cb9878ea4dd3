"""Drafts by n-grams against a search that looks at everything, by every kernel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.drafting.ngram import NgramGuesses
from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.ngram import native_kernel, numba_kernel

MOST = 5


@pytest.fixture(scope="module", params=[*instruction_sets(), "numba"])
def kernel(request):
    return numba_kernel() if request.param == "numba" else native_kernel(load(request.param))


def match_before(text: list[int], place: int, longest: int) -> int:
    """So many tokens before `place` are those at the end."""
    count = 0
    while count < min(place, longest) and text[place - 1 - count] == text[len(text) - 1 - count]:
        count += 1
    return count


def longest_match(text: list[int], shortest: int, longest: int) -> tuple[int, int]:
    """Its length and its place, by looking at every place; (0, 0): there is none."""
    key = min(3, longest)
    found = [(match_before(text, place, longest), place) for place in range(len(text) - 1, 0, -1)]
    of_key = [pair for pair in found if pair[0] >= key][:16]
    best = max(of_key, key=lambda pair: pair[0], default=(0, 0))
    for n in range(key - 1, shortest - 1, -1):
        if best[0] < n:
            best = next((pair for pair in found if pair[0] >= n), best)
    return best if best[0] >= shortest else (0, 0)


def going_on(text: list[int], place: int) -> list[int]:
    grown = list(text)
    for index in range(MOST):
        grown.append(grown[place + index])
    return grown[len(text) :]


class Expected:
    """What the theory in drafting/ngram.py says of a text that begins with a prompt, token by token."""

    def __init__(self, prompt: list[int], shortest: int, longest: int) -> None:
        self.text = list(prompt)
        self.lengths = shortest, longest
        self.place = self.since = self.differed = 0

    def add(self, token: int) -> None:
        """The place behind a difference, 0: none, if this token comes next."""
        text, place, longest = self.text, self.place, self.lengths[1]
        match, source = longest_match(text, *self.lengths)
        right = match > 0 and text[source] == token
        begins = 0
        if place and text[place] == token:
            self.since += 1
            self.place = place + 1 if self.since < longest else 0
        elif place and not right and self.since == 0 and text[self.differed] == token:
            self.place, self.since = self.differed + 1, 1
        else:
            if place and not right and self.since >= 2:
                begins = place
            elif not right and match >= min(4, longest):
                begins = source
            self.place = 0
        if begins:
            self.since = int(begins + 1 < len(text) and text[begins + 1] == token)
            self.place, self.differed = begins + 1 + self.since, begins
        text.append(token)

    def guesses(self) -> list[list[int]]:
        """That of the longest match, and that behind a difference; an empty one if there is neither."""
        places = longest_match(self.text, *self.lengths)[1], self.place
        found = [going_on(self.text, place) for place in places if place]
        return found or [[]]


def guess(index: NgramGuesses, slot: int, new: list[int]) -> list[int]:
    found = index.follow(np.array([slot]), np.array([len(new)]), np.array(new, np.int32))
    assert found.counts[0] in (0, MOST)
    return found.drafts[0, : found.counts[0]].tolist()


@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=90),
    cuts=st.lists(st.integers(1, 7), max_size=40),
    shortest=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_the_longest_match_is_found(kernel, text, cuts, shortest, more):
    longest = shortest + more
    index = NgramGuesses(kernel, 3, most=MOST, shortest=shortest, longest=longest)
    first = cuts[0] if cuts else 1
    index.admit(1, np.array(text[:first], np.int32), 1)
    done = min(first, len(text))
    wanted = Expected(text[:done], shortest, longest)
    for cut in cuts[1:]:
        if done < len(text):
            new, done = text[done : done + cut], min(done + cut, len(text))
            for token in new:
                wanted.add(token)
            assert guess(index, 1, new) in wanted.guesses()


def test_who_has_no_guess_has_no_chance(kernel):
    """The arrays of a result are used again: nothing of an earlier guess is left in a row that has none."""
    index = NgramGuesses(kernel, 2, most=MOST)
    for slot in (0, 1):
        index.admit(slot, np.array([1, 2, 1], np.int32), 3)
    both, runs = np.array([0, 1]), np.array([1, 1])
    found = index.follow(both, runs, np.array([2, 2], np.int32))
    assert found.counts.tolist() == [MOST, MOST]
    assert (found.chances > 0).all()
    found.chances[:] = 1
    found = index.follow(both, runs, np.array([7, 1], np.int32))
    assert found.counts.tolist() == [0, MOST]
    assert (found.chances[0] == 0).all()
    assert (found.chances[1] > 0).all()


def test_it_finds_the_same_in_a_long_text_that_grew(kernel):
    """Room is made anew several times, and slots do not see each other's texts."""
    random = np.random.default_rng(1)
    index = NgramGuesses(kernel, 2, most=MOST, shortest=2, longest=8)
    texts = [Expected([], 2, 8), Expected([], 2, 8)]
    index.admit(0, np.empty(0, np.int32), 1)
    index.admit(1, np.empty(0, np.int32), 1)
    for _ in range(60):
        runs = random.integers(1, 60, 2)
        parts = [random.integers(0, 12, run).tolist() for run in runs]
        for text, part in zip(texts, parts, strict=True):
            for token in part:
                text.add(token)
        found = index.follow(np.array([0, 1]), runs, np.concatenate(parts).astype(np.int32))
        for slot in (0, 1):
            assert found.drafts[slot, : found.counts[slot]].tolist() in texts[slot].guesses()
    lengths = [len(text.text) for text in texts]
    assert [index.length(slot) for slot in (0, 1)] == lengths
    assert index.nbytes <= 2 * 24 * sum(lengths)
    index.release(0)
    index.release(1)
    assert index.nbytes == 0


QUOTED = [*range(100, 130)]


@pytest.mark.parametrize(
    ("said", "next_one"),
    [
        ([], 112),
        ([7], 113),  # in place of 112
        ([113], 114),  # 112 was left out
        ([7, 112], 113),  # 7 was put in
        ([7, 113], 114),
        ([7, 113, 114, 8], 116),  # another one, two tokens later
        ([7, 8], None),
        ([7, 113, 8], None),  # sooner
    ],
)
def test_a_text_is_gone_on_with_behind_a_difference(kernel, said, next_one):
    index = NgramGuesses(kernel, 1, most=MOST)
    index.admit(0, np.array(QUOTED, np.int32), 30)
    for token in [104, 105, 106, 107, 108, 109, 110, 111, *said]:
        found = guess(index, 0, [token])
    assert found[:1] == ([] if next_one is None else [next_one])
    if next_one is not None:
        assert found == [*range(next_one, next_one + MOST)]


def test_a_short_match_that_was_wrong_is_not_gone_on_with(kernel):
    index = NgramGuesses(kernel, 1, most=MOST)
    index.admit(0, np.array(QUOTED, np.int32), 30)
    assert guess(index, 0, [109, 110, 111])[:1] == [112]
    assert guess(index, 0, [7]) == []


def test_room_that_is_made_anew_keeps_what_is_behind_a_difference(kernel):
    index = NgramGuesses(kernel, 1, most=MOST)
    text = np.arange(1000, 1505, dtype=np.int32)
    index.admit(0, text, len(text))
    for token in (1100, 1101, 1102, 1103, 7):  # 510 of 512
        found = guess(index, 0, [token])
    assert found[0] == 1105
    assert guess(index, 0, [1105, 1106, 1107, 8])[0] == 1109


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end(kernel):
    index = NgramGuesses(kernel, 1, most=MOST)
    index.admit(0, np.array([7, 8, 9, 7, 8], np.int32), 1)
    assert guess(index, 0, [9]) == [7, 8, 9, 7, 8]


def test_a_slot_that_is_used_again_knows_nothing_of_before(kernel):
    index = NgramGuesses(kernel, 1, most=MOST)
    index.admit(0, np.array([1, 2, 3, 4], np.int32), 1)
    assert guess(index, 0, [1, 2]) != []
    index.admit(0, np.array([5], np.int32), 1)
    assert guess(index, 0, [1, 2]) == []


def test_the_same_slot_may_occur_several_times(kernel):
    index = NgramGuesses(kernel, 2, most=MOST)
    index.admit(0, np.array([1, 2, 3, 4], np.int32), 1)
    index.admit(1, np.array([1], np.int32), 1)
    found = index.follow(np.array([0, 1, 0]), np.array([1, 2, 2]), np.array([9, 6, 7, 1, 2], np.int32))
    assert found.counts.tolist() == [0, 0, MOST]
    assert found.drafts[2].tolist() == [3, 4, 9, 1, 2]


def test_a_chance_is_what_came_true(kernel):
    """Of matches of the same length: what was right of them, whether anybody drafted or not."""
    index = NgramGuesses(kernel, 2, most=MOST)
    quoting = np.arange(100, 400, dtype=np.int32)
    index.admit(0, quoting, 1)
    first = index.follow(np.array([0]), np.array([2]), quoting[:2]).chances[0].copy()
    assert (np.diff(first) < 0).all()  # a draft is only of use if those before it are right
    assert 0.2 < first[0] < 0.4
    later = index.follow(np.array([0]), np.array([198]), quoting[2:200]).chances[0].copy()
    assert later[0] > 0.97
    assert later[-1] > 0.85
    # Another request whose guesses are never right: its own chances fall, whatever the others' are.
    index.admit(1, np.tile(np.arange(20, dtype=np.int32), 20), 1)
    random = np.random.default_rng(2)
    for new in range(1000, 1080):
        start = int(random.integers(0, 15))
        index.follow(np.array([1]), np.array([3]), np.array([start, start + 1, new], np.int32))
    wrong = index.follow(np.array([1]), np.array([2]), np.array([3, 4], np.int32))
    assert wrong.counts[0] == MOST
    assert wrong.chances[0, 0] < 0.12


def test_corrections_are_expected_after_some(kernel):
    """16 tokens and a correction, again and again."""
    index = NgramGuesses(kernel, 1, most=MOST)
    text = np.arange(1000, 1400, dtype=np.int32)
    index.admit(0, text, len(text))
    chances: list[float] = []
    for begin in range(1000, 1160, 16):
        index.follow(np.array([0]), np.array([16]), np.arange(begin, begin + 16, dtype=np.int32))
        found = index.follow(np.array([0]), np.array([1]), np.array([7], np.int32))
        assert found.drafts[0, 0] == begin + 17
        chances.append(found.chances[0, 0])
        index.follow(np.array([0]), np.array([1]), np.array([begin + 17], np.int32))
    assert chances == sorted(chances)
    assert chances[-1] > 0.8


def test_prompts_are_not_judged(kernel):
    """That a prompt repeats itself does not say that its answer does."""
    index = NgramGuesses(kernel, 1, most=MOST)
    index.admit(0, np.tile(np.arange(50, dtype=np.int32), 30), 1)
    assert not index._all.any()


def test_kernels_agree():
    """To the last bit, after any history."""
    if not instruction_sets():
        pytest.skip("no native library")
    kernels = [numba_kernel(), native_kernel(load(instruction_sets()[0]))]
    indexes = [NgramGuesses(kernel, 4, most=MOST) for kernel in kernels]
    random = np.random.default_rng(3)
    for _ in range(200):
        slot = int(random.integers(0, 4))
        prompt = random.integers(0, 6, int(random.integers(1, 100))).astype(np.int32)
        for index in indexes:
            index.admit(slot, prompt, 1)
            for other in range(4):
                if other not in index._arrays:
                    index.admit(other, prompt, 1)
        runs = random.integers(1, 9, 4)
        tokens = random.integers(0, 6, runs.sum()).astype(np.int32)
        a, b = [index.follow(np.arange(4), runs, tokens) for index in indexes]
        assert a.counts.tolist() == b.counts.tolist()
        assert (indexes[0]._texts[:, 4:] == indexes[1]._texts[:, 4:]).all()
        for row, count in enumerate(a.counts):
            assert a.drafts[row, :count].tolist() == b.drafts[row, :count].tolist()
            np.testing.assert_allclose(a.chances[row, :count], b.chances[row, :count], rtol=1e-5)


def test_lengths_are_checked():
    with pytest.raises(ValueError, match="1 <= shortest"):
        NgramGuesses(lambda *_: None, 1, most=4, shortest=4, longest=3)
