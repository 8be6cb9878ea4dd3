"""The ledger: the owner of every KV block, at every moment.

Theory.  A block is in exactly one of these states, and the numbers of the states sum to the pool:

| state | who owns it | leaves by |
| --- | --- | --- |
| free | nobody; its content means nothing | `claim`, `extend`, `reserve` |
| held | one or more slots, each of which has it in its block table | the `release` of the last one |
| exported | a hand-over whose other side may be reading it | `give_up` of the last one |
| reserved | a hand-over that is to arrive in it | `seat` (then it is held), or `give_up` |
| cached | the prefix index; content is known, nobody uses it | a new owner (`claim`, `reserve`), eviction |

A block may have several owners at once (a shared prefix); it is counted in the first state of the order
held, exported, reserved, cached, free that is true of it.

A slot *holds* blocks through its table, and only `release(slot)`, called when the worker has closed the
slot's epoch, gives them up: there is no operation that frees a single block.  That is the whole defence
against freeing what a worker still writes.  In the same way a hand-over owns blocks through the table under
its `Key`, and only `give_up(key)` ends that: called when its fetches are over on every rank (reserved), or
when nobody can read the pages any more or is allowed to believe them (exported).  *When* that is, is for
`arrivals.py` and `departures.py` to know; they own the deadlines.

A block that the prefix index knows (`mark`) becomes cached when its last holder lets go; any other becomes
free.  Cached blocks are evicted, least recently released first, only when no free one is left.  A table is
released from its tail to its head, so the tail is evicted first and a cached chain loses its leaves before
its root.

Every operation is O(1) per block that it touches.  `check` recounts everything from the tables.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

Key = Hashable
"""Names a hand-over that owns blocks outside of the slots."""


class LedgerError(RuntimeError):
    """The ledger was asked for something impossible, or its books do not balance: a defect of the engine."""


def _nobody(block: int) -> None:
    """Nobody wants to know of evictions."""


class Ledger:
    """Owns `num_blocks` blocks with ids 0 … num_blocks-1 for holders (slots) 0 … max_slots-1."""

    def __init__(self, num_blocks: int, max_slots: int) -> None:
        if num_blocks < 1:
            raise LedgerError(f"a pool of {num_blocks} blocks holds nothing; give the KV cache more memory")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = _nobody
        """Called with each block that is evicted from the cache, before it gets a new owner."""
        self._refs = [0] * num_blocks
        self._known = bytearray(num_blocks)
        """1: the prefix index knows the block."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._tables: list[list[int]] = [[] for _ in range(max_slots)]
        self._reserved: dict[Key, list[int]] = {}
        self._exported: dict[Key, list[int]] = {}

    @property
    def available(self) -> int:
        """Blocks that could be claimed now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.counts()["held"]

    def table(self, slot: int) -> Sequence[int]:
        """The blocks of a slot in order of position; empty if it holds none."""
        return self._tables[slot]

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody holds (so that sharing them takes from what is available)."""
        refs = self._refs
        return sum(1 for block in blocks if not refs[block])

    def claim(self, slot: int, shared: Sequence[int], count: int) -> list[int]:
        """Gives an empty slot the `shared` blocks followed by `count` fresh ones; returns its table.

        All or nothing.  Raises `LedgerError` if the slot holds blocks or too few are available.
        """
        if self._tables[slot]:
            raise LedgerError(f"slot {slot} still holds {len(self._tables[slot])} blocks")
        table = self._gather(shared, count)
        self._tables[slot] = table
        return list(table)

    def extend(self, slot: int, count: int) -> list[int]:
        """Appends `count` fresh blocks to a slot's table; returns them.  All or nothing."""
        self._require(count)
        fresh = self._take(count)
        self._tables[slot].extend(fresh)
        return fresh

    def release(self, slot: int) -> None:
        """The worker has closed the slot: it holds nothing any more."""
        table, self._tables[slot] = self._tables[slot], []
        self._let_go(table)

    # -- hand-overs

    def reserve(self, key: Key, shared: Sequence[int], count: int) -> list[int]:
        """Gives a hand-over the `shared` blocks followed by `count` fresh ones; returns its table.

        All or nothing.  Raises `LedgerError` if the key is in use or too few blocks are available.
        """
        if key in self._reserved:
            raise LedgerError(f"{key} has a reservation already")
        table = self._gather(shared, count)
        self._reserved[key] = table
        return list(table)

    def reserved(self, key: Key) -> Sequence[int]:
        """The blocks reserved under a key, in order of position."""
        return self._reserved[key]

    def seat(self, key: Key, slot: int) -> list[int]:
        """The hand-over has arrived: its reserved blocks are the slot's from now on; returns them."""
        if self._tables[slot]:
            raise LedgerError(f"slot {slot} still holds {len(self._tables[slot])} blocks")
        table = self._tables[slot] = self._reserved.pop(key)
        return list(table)

    def export(self, slot: int, key: Key, count: int) -> list[int]:
        """The first `count` blocks of the slot stay as they are after its release, until `give_up(key)`."""
        if key in self._exported:
            raise LedgerError(f"{key} is exported already")
        table = self._tables[slot][:count]
        if len(table) < count:
            raise LedgerError(f"slot {slot} holds {len(table)} blocks, {count} are to be exported")
        for block in table:
            self._refs[block] += 1
        self._exported[key] = table
        return list(table)

    def give_up(self, key: Key) -> None:
        """What the hand-over owned is its no more; nothing happens if it owned nothing."""
        self._let_go(self._reserved.pop(key, ()))
        self._let_go(self._exported.pop(key, ()))

    # -- the prefix index

    def mark(self, block: int) -> None:
        """The prefix index knows this held block: keep its content when nobody holds it any more."""
        self._known[block] = 1

    def unmark(self, block: int) -> None:
        """The prefix index has forgotten this block; if nobody holds it, it is free."""
        self._known[block] = 0
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def yield_of(self, slots: Iterable[int], keys: Iterable[Key] = ()) -> int:
        """How many blocks become available when these slots and hand-overs let go, and nobody else."""
        shares = Counter(block for slot in slots for block in self._tables[slot])
        for key in keys:
            shares.update(self._reserved.get(key, ()))
            shares.update(self._exported.get(key, ()))
        return sum(1 for block, share in shares.items() if share == self._refs[block])

    def _require(self, count: int) -> None:
        if count > self.available:
            raise LedgerError(f"{count} blocks wanted, {self.available} of {self.num_blocks} available")

    def _gather(self, shared: Sequence[int], count: int) -> list[int]:
        """Shared blocks and fresh ones, each with one more owner.  All or nothing."""
        self._require(count + self.idle(shared))
        for block in shared:
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1
        return [*shared, *self._take(count)]

    def _let_go(self, table: Sequence[int]) -> None:
        refs, known = self._refs, self._known
        for block in reversed(table):
            refs[block] -= 1
            if refs[block]:
                continue
            if known[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._known[block] = 0
                self.on_evict(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def counts(self) -> dict[str, int]:
        """Blocks by state."""
        unheld: set[int] = set()
        exported = 0
        if self._exported or self._reserved:
            outside: Counter[int] = Counter()
            for tables in (self._exported, self._reserved):
                for table in tables.values():
                    outside.update(table)
            unheld = {block for block, owners in outside.items() if owners == self._refs[block]}
            exported = len(unheld & {block for table in self._exported.values() for block in table})
        return {
            "total": self.num_blocks,
            "free": self.num_free,
            "cached": self.num_cached,
            "held": self.num_blocks - self.available - len(unheld),
            "exported": exported,
            "reserved": len(unheld) - exported,
        }

    def snapshot(self, slots: Callable[[int], str] = str, keys: Callable[[Key], str] = str) -> dict[str, Any]:
        """Counts by state, and how many blocks each slot (`slots(slot)`) and hand-over (`keys(key)`) has."""
        return {
            **self.counts(),
            "shared": sum(1 for refs in self._refs if refs > 1),
            "held_by": {slots(slot): len(table) for slot, table in enumerate(self._tables) if table},
            "exported_by": {keys(key): len(table) for key, table in self._exported.items()},
            "reserved_by": {keys(key): len(table) for key, table in self._reserved.items()},
        }

    def check(self) -> None:
        """Recounts everything from the tables.  Raises `LedgerError` that names the block that is wrong."""
        tables = [*self._tables, *self._exported.values(), *self._reserved.values()]
        shares = [0] * self.num_blocks
        for table in tables:
            for block in table:
                shares[block] += 1
        idle = {*self._free, *self._cached}
        is_partition = len(idle) == len(self._free) + len(self._cached) == shares.count(0)
        is_partition = is_partition and not any(map(shares.__getitem__, idle))
        indexed = {block for block, known in enumerate(self._known) if known and not shares[block]}
        if shares != self._refs or not is_partition or indexed != set(self._cached):
            self._find_fault(shares)
        for table in tables:
            if len(set(table)) != len(table):
                raise LedgerError(f"a table has a block twice: {table}")
        counts = self.counts()
        total = sum(number for state, number in counts.items() if state != "total")
        if total != self.num_blocks or counts["held"] < 0:
            raise LedgerError(f"the states together are not the pool: {counts}")

    def _find_fault(self, shares: list[int]) -> None:
        """Raises `LedgerError` for the first block that is not in one place; `shares` counts its tables."""
        free = Counter(self._free)
        for block in range(self.num_blocks):
            owners, refs = shares[block], self._refs[block]
            if owners != refs:
                raise LedgerError(f"block {block} is in {owners} tables but counts {refs} owners")
            places = (refs > 0) + free[block] + (block in self._cached)
            if places != 1:
                raise LedgerError(
                    f"block {block}: owned {refs} times, {free[block]} times free, "
                    f"cached: {block in self._cached}"
                )
            if bool(self._known[block]) != (block in self._cached) and not refs:
                raise LedgerError(f"block {block} is cached but not in the prefix index, or the reverse")
        raise LedgerError("the ledger holds a block that is not of the pool")
