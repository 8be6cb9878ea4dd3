"""Drafts from other requests' answers against a search that looks at everything, by every kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.drafting.ngram import NgramGuesses
from baton.drafting.suffix import SuffixGuesses, bytes_per_token
from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.ngram import native_kernel, numba_kernel
from baton.model.cpu.suffix import native_suffix, numba_suffix

MOST = 5
BYTES = 1 << 20
LONELY = 1000
"""Tokens from here on stand nowhere twice: a text that ends with one is guessed from nothing."""


@pytest.fixture(scope="module", params=[*instruction_sets(), "numba"])
def kernels(request):
    return made(request.param)


def made(name: str):
    if name == "numba":
        return numba_kernel(), numba_suffix()
    return native_kernel(load(name)), native_suffix(load(name))


def store_of(
    kernels, *, slots=2, depth=8, requests=100, most_bytes=BYTES, factor=float(MOST), least=0.0, most=MOST
):
    own = NgramGuesses(kernels[0], slots, most=most, shortest=2, longest=16)
    return SuffixGuesses(
        own,
        kernels[1],
        slots,
        depth=depth,
        most_requests=requests,
        most_bytes=most_bytes,
        factor=factor,
        least=least,
    )


def salt(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def ints(values: Sequence[int]):
    return np.array(values, np.int32)


def answer(
    store: SuffixGuesses, prompt: Sequence[int], tokens: Sequence[int], name: str = "", slot: int = 0
) -> None:
    """A request that comes, is answered and leaves."""
    store.admit(slot, ints(prompt), len(prompt), salt(name))
    if tokens:
        store.follow(ints([slot]), ints([len(tokens)]), ints(tokens))
    store.release(slot)


def others_guess(store: SuffixGuesses, text: Sequence[int], name: str = "", slot: int = 1) -> list[int]:
    """What follows a text by what others were answered, whether its own text promises more or not."""
    store.admit(slot, ints([LONELY + 1]), 1, salt(name))
    store.follow(ints([slot]), ints([len(text)]), ints(text))
    count = int(store._rows[slot, 3])
    found = store._opened[slot, :count].tolist()
    store._begin.pop(slot)  # it is not stored
    store.release(slot)
    return found


class Document(NamedTuple):
    text: list[int]
    first: int
    name: str


def expected(
    documents: list[Document], text: list[int], name: str, *, depth: int, factor: float, least: float
):
    """What the theory in drafting/suffix.py says, by looking at every place."""
    ends: list[tuple[int, Document, int]] = []
    for document in reversed(documents):
        if document.name != name:
            continue
        for place in range(len(document.text) - 1, document.first - 1, -1):
            count = 0
            while (
                count < min(depth, place, len(text))
                and document.text[place - 1 - count] == text[len(text) - 1 - count]
            ):
                count += 1
            ends.append((count, document, place))
    level = depth.bit_length() - 1
    while level > 0 and not any(count >= 1 << level for count, *_ in ends):
        level -= 1
    if level == 0:
        return []
    near = [end for end in ends if end[0] >= 1 << level][:16]
    match = max(count for count, *_ in near)
    going = [(document.text, place) for count, document, place in near if count == match]
    drafts: list[int] = []
    together = 1.0
    while going and len(drafts) < min(MOST, max(1, int(factor * match))):
        said = [t[place + len(drafts)] for t, place in going if place + len(drafts) < len(t)]
        if not said:
            break
        token, votes = Counter(said).most_common(1)[0]  # of equal ones the first, which is the newest
        together *= votes / len(going)
        if together < least - 1e-6:
            break
        going = [
            (t, place)
            for t, place in going
            if place + len(drafts) < len(t) and t[place + len(drafts)] == token
        ]
        drafts.append(token)
    return drafts


@settings(max_examples=80, deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=1, max_size=12),
            st.lists(st.integers(0, 3), max_size=30),
            st.sampled_from("ab"),
        ),
        max_size=12,
    ),
    asked=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.sampled_from("ab")), max_size=8
    ),
    depth=st.sampled_from((2, 3, 5, 8, 16)),
    factor=st.sampled_from((0.0, 0.5, 1.0, 5.0)),
    least=st.sampled_from((0.0, 0.1, 0.4, 0.7)),
)
def test_what_follows_the_longest_match_is_found(kernels, requests, asked, depth, factor, least):
    store = store_of(kernels, depth=depth, factor=factor, least=least)
    documents = []
    for prompt, tokens, name in requests:
        answer(store, prompt, tokens, name)
        text, first = [*prompt, *tokens], len(prompt) + 1
        before = max(first - depth, 0)
        if len(text) > first:
            documents.append(Document(text[before:], first - before, name))
    assert store.num_documents == len(documents)
    for text, name in asked:
        wanted = expected(documents, text, name, depth=depth, factor=factor, least=least)
        assert others_guess(store, text, name) == wanted


def test_an_answer_helps_the_next_request_from_its_first_token_on(kernels):
    """The prompts end alike, so the second token of the answer is known with the first."""
    store = store_of(kernels)
    answer(store, [1, 2, 3, 4], [50, 51, 52, 53, 54, 55])
    store.admit(1, ints([9, 2, 3, 4]), 4, salt(""))
    found = store.follow(ints([1]), ints([1]), ints([50]))
    assert found.drafts[0, : found.counts[0]].tolist() == [51, 52, 53, 54, 55]
    assert (np.diff(found.chances[0]) < 0).all()


def test_nothing_comes_from_another_salt(kernels):
    text = list(range(100, 140))
    for most_bytes in (BYTES, 1):  # (in the smallest tables all look at the same entries)
        store = store_of(kernels, slots=3, most_bytes=most_bytes)
        answer(store, [1, 2, 3], text, "mine")
        answer(store, [1, 2, 3], text[::-1], "mine")
        for name in ("other", "mine "):
            assert others_guess(store, [1, 2, 3, *text[:10]], name) == []
        assert others_guess(store, [1, 2, 3, *text[:10]], "mine") == text[10:15]
        # What others add has no influence, however often it says otherwise.
        for _ in range(20):
            answer(store, [1, 2, 3], [*text[:10], 7, 7, 7], "other")
        assert others_guess(store, [1, 2, 3, *text[:10]], "other") == [7, 7, 7]
        if most_bytes == BYTES:
            assert others_guess(store, [1, 2, 3, *text[:10]], "mine") == text[10:15]


def test_without_a_salt_nothing_is_kept(kernels):
    store = store_of(kernels)
    store.admit(0, ints([1, 2]), 2)
    store.follow(ints([0]), ints([4]), ints([3, 4, 5, 6]))
    store.release(0)
    assert store.num_documents == 0
    answer(store, [1, 2], [3, 4, 5, 6])
    assert store.num_documents == 1
    store.admit(0, ints([1, 2]), 2)
    assert store.follow(ints([0]), ints([1]), ints([3])).counts.tolist() == [0]


def test_the_oldest_go_first_by_number_and_by_room(kernels):
    random = np.random.default_rng(1)
    texts = [random.integers(0, 1 << 20, 60).tolist() for _ in range(40)]
    store = store_of(kernels, requests=7)
    for text in texts:
        answer(store, text[:4], text[4:])
    found = [others_guess(store, text[:20]) == text[20:25] for text in texts]
    assert found == [False] * 33 + [True] * 7
    store = store_of(kernels, most_bytes=1)  # the smallest ring: 256 tokens, 64 for each of these
    for text in texts:
        answer(store, text[:4], text[4:])
    found = [others_guess(store, text[:20]) == text[20:25] for text in texts]
    assert found == [False] * 36 + [True] * 4
    assert store.num_documents == 4


@pytest.mark.parametrize("depth", [2, 24, 64])
def test_memory_is_bounded(kernels, depth):
    """Many times what there is room for; what is kept is the newest, and is all there."""
    wanted = 1 << 20
    store = store_of(kernels, depth=depth, requests=300, most_bytes=wanted)
    assert wanted / 2.5 < store.nbytes <= wanted
    assert store.nbytes - store._documents.nbytes == store._size * bytes_per_token(depth)
    arrays = [id(array) for array in (store._tokens, store._links, store._tables, store._documents)]
    random = np.random.default_rng(2)
    texts = []
    while sum(map(len, texts)) < 6 * store._size:
        texts.append(random.integers(0, 1 << 30, int(random.integers(3, 2000))).tolist())
        answer(store, [LONELY + 7], texts[-1])
    assert [id(array) for array in (store._tokens, store._links, store._tables, store._documents)] == arrays
    assert 3 < store.num_documents <= 300
    kept = [text for text in texts[-store.num_documents :] if len(text) > 40]
    assert kept
    for text in kept:
        for place in (5, len(text) // 2, len(text) - 6):
            assert others_guess(store, text[max(place - 30, 0) : place]) == text[place : place + 5]


def test_a_long_answer_is_cut_and_indexed_in_pieces(kernels):
    store = store_of(kernels, slots=3, most_bytes=4 << 20)
    quarter = store._size // 4
    text = np.random.default_rng(3).integers(0, 1 << 30, quarter + 500).tolist()
    answer(store, [LONELY + 7], text)
    assert store._store[13] == 0  # nothing of it is indexed, nobody has waited
    store.admit(2, ints([1]), 1, salt("else"))
    steps = 0
    while store._store[13] == 0:
        before = int(store._store[14])
        store.follow(ints([2]), ints([1]), ints([steps]))
        steps += 1
        assert store._store[14] - before <= 70 or store._store[13]
    assert steps > (quarter - 5000) / 70
    assert others_guess(store, text[quarter - 20 : quarter - 10]) == text[quarter - 10 : quarter - 5]
    assert others_guess(store, text[quarter + 100 : quarter + 110]) == []


def test_what_a_slot_was_admitted_with_is_not_stored_again(kernels):
    """A preempted request: each of its epochs stores what it generated."""
    store = store_of(kernels)
    store.admit(0, ints([1, 2, 3]), 3, salt(""))
    store.follow(ints([0]), ints([4]), ints([10, 11, 12, 13]))
    store.release(0)
    store.admit(0, ints([1, 2, 3, 10, 11, 12, 13]), 3, salt(""))
    store.follow(ints([0]), ints([3]), ints([14, 15, 16]))
    store.release(0)
    assert [row.tolist()[1:3] for row in store._documents[:2]] == [[7, 4], [10, 7]]
    assert others_guess(store, [11, 12]) == [13]
    assert others_guess(store, [12, 13]) == [14, 15, 16]


def test_a_row_takes_what_promises_more(kernels):
    """Its own text says otherwise than others' answers; what came true lately wins."""
    for theirs_are_right in (True, False):
        store = store_of(kernels, depth=2)
        for number in range(60):  # a pair of tokens is followed by 1 there, by 2 in the prompt
            answer(store, [LONELY + number], [LONELY + number, 10 + number, 100 + number, 1])
        own = [token for number in range(60) for token in (10 + number, 100 + number, 2)]
        store.admit(1, ints(own), len(own), salt(""))
        first = []
        for number in range(60):
            found = store.follow(
                ints([1]), ints([3]), ints([LONELY + 100 + number, 10 + number, 100 + number])
            )
            first.append((int(found.drafts[0, 0]), float(found.chances[0, 0])))
            store.follow(ints([1]), ints([1]), ints([1 if theirs_are_right else 2]))
        assert {token for token, _ in first[30:]} == {1 if theirs_are_right else 2}
        assert first[-1][1] > 0.8


def test_a_guess_that_is_never_right_promises_little(kernels):
    store = store_of(kernels)
    answer(store, [LONELY + 1], [LONELY + 2, *range(300)])
    store.admit(1, ints([LONELY + 3]), 1, salt(""))
    chances = []
    for number in range(80):
        place = 3 * number
        new = LONELY + 1000 + number
        found = store.follow(ints([1]), ints([4]), ints([new, place, place + 1, place + 2]))
        assert found.drafts[0, 0] == place + 3
        chances.append(float(found.chances[0, 0]))
    assert chances[0] > 0.3
    assert chances[-1] < 0.1


def test_own_guesses_are_limited_too(kernels):
    """`max_spec_factor` and `min_token_prob` are of both, as elsewhere."""
    text = [*range(100, 130), 100, 101]
    for factor, least, count in ((1.0, 0.0, 3), (0.5, 0.0, 1), (2.0, 0.0, 5), (2.0, 0.3, 1)):
        store = store_of(kernels, factor=factor, least=least)
        store.admit(0, ints(text), len(text), salt(""))
        found = store.follow(ints([0]), ints([1]), ints([102]))
        assert found.counts.tolist() == [count]
        assert found.drafts[0, :count].tolist() == [*range(103, 103 + count)]
        assert not found.chances[0, count:].any()


def test_kernels_agree():
    """To the last bit but rounding, after any history."""
    if not instruction_sets():
        pytest.skip("no native library")
    stores = [store_of(made(name), slots=4, most_bytes=1 << 14) for name in ("numba", instruction_sets()[0])]
    random = np.random.default_rng(4)
    admitted: set[int] = set()
    replaced = 0
    for _ in range(400):
        slot = int(random.integers(0, 4))
        prompt = ints(random.integers(0, 5, int(random.integers(1, 40))))
        name = salt(str(random.integers(0, 2)))
        for store in stores:
            store.admit(slot, prompt, len(prompt), name)
        admitted.add(slot)
        slots = ints(sorted(admitted))
        runs = ints(random.integers(1, 9, len(slots)))
        tokens = ints(random.integers(0, 5, int(runs.sum())))
        a, b = [store.follow(slots, runs, tokens) for store in stores]
        assert a.counts.tolist() == b.counts.tolist()
        replaced += int((a.counts % MOST > 0).sum())
        np.testing.assert_allclose(a.chances, b.chances, rtol=1e-4, atol=1e-7)
        for row, count in enumerate(a.counts):
            assert a.drafts[row, :count].tolist() == b.drafts[row, :count].tolist()
        assert [store.num_documents for store in stores] == [stores[0].num_documents] * 2
    assert replaced > 100


def test_the_same_slot_may_occur_several_times(kernels):
    """Steps that were kept and told together: what was guessed before them is judged by the first."""
    store = store_of(kernels)
    answer(store, [LONELY + 1], [LONELY + 2, *range(40)])
    store.admit(0, ints([LONELY + 3]), 1, salt(""))
    store.admit(1, ints([LONELY + 4]), 1, salt(""))
    store.follow(ints([0]), ints([2]), ints([3, 4]))
    judged = store._judged[0].sum()
    found = store.follow(ints([0, 1, 0]), ints([1, 2, 2]), ints([5, 20, 21, 6, 7]))
    assert store._judged[0].sum() == judged + 2  # right, of one
    assert found.drafts[1].tolist() == [22, 23, 24, 25, 26]
    assert found.drafts[2].tolist() == [8, 9, 10, 11, 12]


def test_a_depth_is_checked(kernels):
    with pytest.raises(ValueError, match="give 2 to 64"):
        store_of(kernels, depth=1)
