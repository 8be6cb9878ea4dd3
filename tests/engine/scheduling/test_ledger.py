import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.scheduling.ledger import Ledger, LedgerError


def test_a_new_pool_is_free():
    ledger = Ledger(5, 2)
    assert ledger.counts() == {"total": 5, "free": 5, "cached": 0, "held": 0, "exported": 0, "reserved": 0}
    ledger.check()


def test_an_empty_pool_is_refused():
    with pytest.raises(LedgerError, match="give the KV cache more memory"):
        Ledger(0, 1)


def test_a_claim_is_all_or_nothing():
    ledger = Ledger(4, 2)
    ledger.claim(0, [], 3)
    with pytest.raises(LedgerError, match="2 blocks wanted, 1 of 4 available"):
        ledger.claim(1, [], 2)
    assert ledger.table(1) == []
    assert ledger.available == 1
    with pytest.raises(LedgerError, match="slot 0 still holds 3"):
        ledger.claim(0, [], 1)
    ledger.check()


def test_a_shared_block_is_held_until_the_last_holder_lets_go():
    ledger = Ledger(4, 3)
    block = ledger.claim(0, [], 1)[0]
    ledger.mark(block)
    assert ledger.claim(1, [block], 1)[0] == block
    ledger.release(0)
    assert ledger.counts()["held"] == 2
    ledger.release(1)
    assert ledger.counts() == {"total": 4, "free": 3, "cached": 1, "held": 0, "exported": 0, "reserved": 0}
    ledger.check()


def test_eviction_takes_free_blocks_first_then_the_oldest_tail():
    evicted = []
    ledger = Ledger(6, 3)
    ledger.on_evict = evicted.append
    old, new = ledger.claim(0, [], 2), ledger.claim(1, [], 2)
    for block in old + new:
        ledger.mark(block)
    ledger.release(0)
    ledger.release(1)
    ledger.claim(2, [], 2)
    assert evicted == []
    ledger.extend(2, 3)
    assert evicted == [old[1], old[0], new[1]]
    ledger.check()


def test_a_reused_block_is_not_evicted():
    ledger = Ledger(2, 3)
    first, second = ledger.claim(0, [], 2)
    ledger.mark(first)
    ledger.mark(second)
    ledger.release(0)
    assert ledger.idle([first]) == 1
    ledger.claim(1, [first], 1)  # evicts the second
    assert ledger.available == 0
    with pytest.raises(LedgerError):
        ledger.extend(1, 1)
    ledger.check()


def test_an_unmarked_block_becomes_free_at_once_or_when_it_is_let_go():
    ledger = Ledger(3, 2)
    a, b = ledger.claim(0, [], 2)
    ledger.mark(a)
    ledger.mark(b)
    ledger.unmark(a)
    ledger.release(0)
    assert ledger.counts() == {"total": 3, "free": 2, "cached": 1, "held": 0, "exported": 0, "reserved": 0}
    ledger.unmark(b)
    assert ledger.num_free == 3
    ledger.check()


def test_the_yield_of_slots_counts_blocks_that_only_they_hold():
    ledger = Ledger(8, 4)
    block = ledger.claim(0, [], 2)[0]
    ledger.mark(block)
    ledger.claim(1, [block], 1)
    ledger.claim(2, [block], 2)
    assert ledger.yield_of([0]) == 1
    assert ledger.yield_of([0, 1]) == 2
    assert ledger.yield_of([0, 1, 2]) == 5


def test_the_snapshot_names_the_holders():
    ledger = Ledger(4, 2)
    ledger.claim(1, [], 3)
    shot = ledger.snapshot(lambda slot: f"request {slot}")
    assert shot["held_by"] == {"request 1": 3}
    assert shot["free"] + shot["cached"] + shot["held"] == shot["total"] == 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ledger: ledger._refs.__setitem__(0, 2), "block 0 is in 1 tables but counts 2 owners"),
        (lambda ledger: ledger._free.append(0), "block 0: owned 1 times, 1 times free"),
        (lambda ledger: ledger._free.pop(), "block 1: owned 0 times, 0 times free"),
        (lambda ledger: ledger._tables[1].append(0), "block 0 is in 2 tables"),
    ],
)
def test_check_notices_wrong_books(spoil, message):
    ledger = Ledger(4, 2)
    ledger.claim(0, [], 1)
    spoil(ledger)
    with pytest.raises(LedgerError, match=message):
        ledger.check()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("claim", "extend", "release", "mark", "unmark", "share")),
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_the_sum_is_the_pool_whatever_happens(moves):
    ledger = Ledger(10, 4)
    known: set[int] = set()
    ledger.on_evict = known.remove
    for what, slot, number in moves:
        before = ledger.available
        table = list(ledger.table(slot))
        try:
            if what == "claim":
                ledger.claim(slot, [], number)
                assert before - ledger.available == number
            elif what == "extend":
                ledger.extend(slot, number)
            elif what == "share":
                shared = sorted(known)[:number]
                assert ledger.claim(slot, shared, 1)[:-1] == shared
            elif what == "release":
                ledger.release(slot)
                assert not ledger.table(slot)
            elif table:
                block = table[number % len(table)]
                (ledger.mark if what == "mark" else ledger.unmark)(block)
                (known.add if what == "mark" else known.discard)(block)
        except LedgerError:
            assert list(ledger.table(slot)) == table
            assert ledger.available == before
        ledger.check()
    for slot in range(4):
        ledger.release(slot)
    assert ledger.available == 10
    ledger.check()


def test_what_is_exported_or_reserved_is_counted_once_and_kept():
    ledger = Ledger(10, 3)
    table = ledger.claim(0, [], 4)
    ledger.mark(table[0])
    assert ledger.export(0, "out", 2) == table[:2]
    assert ledger.counts()["held"] == 4, "as long as the slot holds them"
    ledger.release(0)
    assert ledger.counts() == {"total": 10, "free": 8, "cached": 0, "held": 0, "exported": 2, "reserved": 0}
    reserved = ledger.reserve("in", [table[0]], 2)
    assert reserved[0] == table[0]
    assert ledger.reserved("in") == reserved
    assert ledger.counts() == {"total": 10, "free": 6, "cached": 0, "held": 0, "exported": 2, "reserved": 2}
    assert ledger.yield_of([], ["out"]) == 1
    assert ledger.yield_of([], ["out", "in"]) == 4
    ledger.give_up("out")
    assert ledger.counts() == {"total": 10, "free": 7, "cached": 0, "held": 0, "exported": 0, "reserved": 3}
    assert ledger.seat("in", 1) == reserved
    assert ledger.counts()["held"] == 3
    shot = ledger.snapshot(lambda slot: f"slot {slot}", lambda key: f"key {key}")
    assert shot["held_by"] == {"slot 1": 3}
    assert shot["reserved_by"] == shot["exported_by"] == {}
    ledger.release(1)
    assert ledger.counts()["cached"] == 1
    ledger.check()


def test_hand_overs_cannot_own_what_is_not_there():
    ledger = Ledger(4, 2)
    ledger.claim(0, [], 2)
    with pytest.raises(LedgerError, match="3 blocks wanted, 2 of 4 available"):
        ledger.reserve("in", [], 3)
    with pytest.raises(LedgerError, match="holds 2 blocks, 3 are to be exported"):
        ledger.export(0, "out", 3)
    ledger.export(0, "out", 1)
    with pytest.raises(LedgerError, match="out is exported already"):
        ledger.export(0, "out", 1)
    ledger.reserve("in", [], 1)
    with pytest.raises(LedgerError, match="in has a reservation already"):
        ledger.reserve("in", [], 1)
    with pytest.raises(LedgerError, match="slot 0 still holds 2"):
        ledger.seat("in", 0)
    ledger.check()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ("claim", "extend", "release", "mark", "unmark", "reserve", "seat", "export", "give_up")
            ),
            st.integers(0, 3),
            st.integers(0, 5),
        ),
        max_size=80,
    )
)
def test_the_sum_is_the_pool_with_hand_overs_whatever_happens(moves):
    ledger = Ledger(12, 4)
    known: set[int] = set()
    ledger.on_evict = known.remove
    owners: dict[str, list[int]] = {}
    for what, slot, number in moves:
        key, table, before = (
            f"{what == 'export' or number % 2}-{slot}",
            list(ledger.table(slot)),
            ledger.counts(),
        )
        try:
            if what == "claim":
                ledger.claim(slot, sorted(known)[: number % 3], number)
            elif what == "extend":
                ledger.extend(slot, number)
            elif what == "release":
                ledger.release(slot)
            elif what == "reserve":
                owners[key] = ledger.reserve(key, sorted(known)[: number % 3], number)
            elif what == "export":
                owners[key] = ledger.export(slot, key, number)
            elif what == "seat" and key in owners:
                assert ledger.seat(key, slot) == owners.pop(key)
            elif what == "give_up":
                ledger.give_up(key)
                owners.pop(key, None)
            elif table and what in ("mark", "unmark"):
                block = table[number % len(table)]
                (ledger.mark if what == "mark" else ledger.unmark)(block)
                (known.add if what == "mark" else known.discard)(block)
        except (LedgerError, KeyError):
            assert ledger.counts() == before
        ledger.check()
        counts = ledger.counts()
        assert sum(counts.values()) == 2 * counts["total"]
        owned = {block for blocks in owners.values() for block in blocks}
        assert not owned & set(ledger._free)
        assert not owned & set(ledger._cached)
    for slot in range(4):
        ledger.release(slot)
    for key in owners:
        ledger.give_up(key)
    assert ledger.available == 12
