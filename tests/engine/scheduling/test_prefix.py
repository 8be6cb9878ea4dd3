from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import PrefixIndex, extend_keys, root_key


def keys_of(tokens: list[int], salt: str = "", size: int = 2) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(salt), array("i", tokens), size, len(tokens) // size)
    return keys


def test_keys_are_equal_exactly_for_equal_prefixes():
    one, other = keys_of([1, 2, 3, 4, 5, 6]), keys_of([1, 2, 3, 4, 9, 9])
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert keys_of([3, 4])[0] != one[1], "the same block at another place is another block"
    assert keys_of([1, 2], "tenant")[0] != one[0]
    assert len(set(one)) == 3


def test_keys_are_extended_not_computed_again():
    tokens = array("i", range(10))
    keys: list[bytes] = []
    extend_keys(keys, root_key("s"), tokens, 2, 3)
    extend_keys(keys, root_key("s"), tokens, 2, 5)
    extend_keys(keys, root_key("s"), tokens, 2, 4)
    assert keys == keys_of(list(range(10)), "s")


def test_a_match_ends_at_the_first_unknown_block_and_at_the_limit():
    ledger = Ledger(6, 2)
    index = PrefixIndex(ledger)
    keys, blocks = keys_of([1, 2, 3, 4, 5, 6, 7, 8]), ledger.claim(0, [], 4)
    for place in (0, 1, 3):
        assert index.insert(keys[place], blocks[place])
    assert index.match(keys, 4) == blocks[:2]
    assert index.match(keys, 1) == blocks[:1]
    assert index.match(keys_of([9, 9]), 4) == []


def test_of_two_blocks_with_one_content_the_first_is_known_and_the_other_private():
    ledger = Ledger(4, 2)
    index = PrefixIndex(ledger)
    (key,) = keys_of([1, 2])
    (first,), (second,) = ledger.claim(0, [], 1), ledger.claim(1, [], 1)
    assert index.insert(key, first)
    assert not index.insert(key, second)
    assert index.insert(key, first), "telling it again changes nothing"
    ledger.release(0)
    ledger.release(1)
    assert ledger.counts() == {"total": 4, "free": 3, "cached": 1, "held": 0, "exported": 0, "reserved": 0}
    assert index.match([key], 1) == [first]


def test_an_evicted_block_is_forgotten():
    ledger = Ledger(2, 2)
    index = PrefixIndex(ledger)
    keys, blocks = keys_of([1, 2, 3, 4]), ledger.claim(0, [], 2)
    for key, block in zip(keys, blocks, strict=True):
        index.insert(key, block)
    ledger.release(0)
    ledger.claim(1, [], 1)
    assert index.match(keys, 2) == blocks[:1], "the tail went first"
    ledger.extend(1, 1)
    assert index.match(keys, 2) == []
    assert len(index) == 0


def test_clearing_forgets_held_blocks_too():
    ledger = Ledger(4, 2)
    index = PrefixIndex(ledger)
    keys, blocks = keys_of([1, 2, 3, 4]), ledger.claim(0, [], 2)
    index.insert(keys[0], blocks[0])
    assert index.clear() == 1
    ledger.release(0)
    assert ledger.num_free == 4
    ledger.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), max_size=25))
def test_what_the_index_says_is_true(sequences):
    """Against a model that remembers what was written into each block."""
    ledger = Ledger(8, 1)
    index = PrefixIndex(ledger)
    written: dict[int, tuple[int, ...]] = {}
    for tokens in sequences:
        keys = keys_of(tokens)
        shared = index.match(keys, (len(tokens) - 1) // 2)
        for place, block in enumerate(shared):
            assert written[block] == tuple(tokens[: 2 * place + 2])
        table = ledger.claim(0, shared, len(keys) - len(shared))
        for place in range(len(shared), len(keys)):
            written[table[place]] = tuple(tokens[: 2 * place + 2])
            index.insert(keys[place], table[place])
        ledger.release(0)
        ledger.check()
        assert len(index) == ledger.num_cached
