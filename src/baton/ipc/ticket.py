"""Tickets: how the ranks of a worker group agree on what they have read before each round.

Theory.  All ranks read the same command log, but not at the same moment.  If two of them entered round k
with different commands, they would compose different batches and the next collective would hang.  So the
leader (rank 0) decides: "round k applies the log up to sequence n", and a follower enters round k only with
that ticket, whatever else it has read.

A ticket is one 64-bit word, n in the upper 40 bits and the low 24 bits of k in the lower, in entry
`k % entries`.  One aligned word is written by one store, so there is no torn ticket, on any CPU.  Each
follower publishes the last round that it took; the leader never writes round k before every follower has
taken round k - entries, so no ticket is overwritten unread.

Waking is as in `ring.py`: the leader rings the followers' doorbells after every ticket; a follower that takes
a ticket while the leader's `waiting` word is set rings the leader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from baton.ipc.doorbell import Doorbell
from baton.ipc.memory import SharedMemory, create_memory
from baton.ipc.processes.process import Waiter
from baton.protocol.rules.silence import Silence

ENTRIES = 64
RETRY_S = 0.005
"""While the leader waits for a follower: look again at least so often."""

_MAGIC = 0x4241544F4E544B31
_CACHE_LINE = 8
_MAGIC_WORD, _ENTRIES_WORD, _FOLLOWERS_WORD = 0, 1, 2
_WAITING_WORD = 1 * _CACHE_LINE
_TAKEN_WORD = 2 * _CACHE_LINE
_ROUND_BITS = 24
_ROUND_MASK = (1 << _ROUND_BITS) - 1
MAX_SEQUENCE = (1 << 64 - _ROUND_BITS) - 1


class TicketTimeout(RuntimeError):
    """A ticket did not come, or was not taken, in time; the message says which and for how long."""


class PeerDied(RuntimeError):
    """A process that this one waited for is dead; `who` names it."""

    def __init__(self, who: str, waiting_for: str) -> None:
        super().__init__(f"the {who} died while this rank waited for {waiting_for}")
        self.who = who


def create_tickets(followers: int, entries: int = ENTRIES) -> int:
    """Makes the memory for a leader and `followers` others and returns its memfd."""
    if followers < 1 or entries < 1:
        raise ValueError(f"tickets need followers and entries, not {followers} and {entries}")
    fd = create_memory("baton-tickets", 8 * (_TAKEN_WORD + _CACHE_LINE * followers + entries))
    memory = SharedMemory(fd)
    memory.words[_ENTRIES_WORD] = entries
    memory.words[_FOLLOWERS_WORD] = followers
    memory.words[_MAGIC_WORD] = _MAGIC
    memory.close()
    return fd


class _Tickets:
    def __init__(self, fd: int) -> None:
        if os.fstat(fd).st_size < 8 * _TAKEN_WORD:
            raise ValueError(f"descriptor {fd} is not ticket memory")
        self._memory = SharedMemory(fd)
        self._words = self._memory.words
        if self._words[_MAGIC_WORD] != _MAGIC:
            self._memory.close()
            raise ValueError(f"descriptor {fd} is not ticket memory")
        self.entries: int = self._words[_ENTRIES_WORD]
        self.followers: int = self._words[_FOLLOWERS_WORD]
        self._first_entry = _TAKEN_WORD + _CACHE_LINE * self.followers

    def close(self) -> None:
        """Unmaps the memory; safe to call twice.  The descriptor stays the caller's."""
        self._memory.close()


class TicketWriter(_Tickets):
    """The leader's end.  `doorbells` are the followers'; rounds count from 1 without gaps."""

    def __init__(self, fd: int, doorbells: Sequence[Doorbell]) -> None:
        super().__init__(fd)
        self._doorbells = tuple(doorbells)
        self._taken_words = [_TAKEN_WORD + _CACHE_LINE * i for i in range(self.followers)]
        self._last = 0
        self._limit = self.entries  # the last round that may be written, as last computed

    def publish(self, round_: int, sequence: int) -> bool:
        """Says "round `round_` applies the log up to `sequence`".

        False: the slowest follower is `entries` rounds behind, nothing was written; try again when
        rung, and after `RETRY_S` at most.
        """
        if round_ != self._last + 1:
            raise ValueError(f"ticket for round {round_} after round {self._last}: rounds have no gaps")
        if not 0 <= sequence <= MAX_SEQUENCE:
            raise ValueError(f"sequence {sequence} does not fit into a ticket")
        if round_ > self._limit and not self._may_write(round_):
            return False
        self._words[self._first_entry + round_ % self.entries] = (
            sequence << _ROUND_BITS | round_ & _ROUND_MASK
        )
        self._last = round_
        for doorbell in self._doorbells:
            doorbell.ring()
        return True

    def lag(self) -> int:
        """Rounds that the slowest follower has not taken yet."""
        return self._last - self._slowest()

    def _slowest(self) -> int:
        return min(self._words[word] for word in self._taken_words)

    def _may_write(self, round_: int) -> bool:
        self._limit = self._slowest() + self.entries
        if round_ > self._limit:
            self._words[_WAITING_WORD] = 1
            self._limit = self._slowest() + self.entries
        if round_ > self._limit:
            return False
        self._words[_WAITING_WORD] = 0
        return True


class TicketReader(_Tickets):
    """A follower's end.  `index` counts followers from 0 (rank - 1).

    `doorbell` is its own; `watch` maps pidfds to what dies when they become readable.
    """

    def __init__(
        self,
        fd: int,
        index: int,
        doorbell: Doorbell,
        watch: Mapping[int, str],
        leader_doorbell: Doorbell | None = None,
    ) -> None:
        super().__init__(fd)
        if not 0 <= index < self.followers:
            self.close()
            raise ValueError(f"follower {index} of {self.followers}")
        self._taken_word = _TAKEN_WORD + _CACHE_LINE * index
        self._doorbell = doorbell
        self._watch = dict(watch)
        self._leader_doorbell = leader_doorbell
        self._waiter = Waiter([doorbell.fileno(), *self._watch])

    def take(self, round_: int) -> int | None:
        """The sequence up to which round `round_` applies the log; None: no ticket yet."""
        word = self._words[self._first_entry + round_ % self.entries]
        if word & _ROUND_MASK != round_ & _ROUND_MASK or not word:
            return None
        self._words[self._taken_word] = round_
        if self._words[_WAITING_WORD] and self._leader_doorbell is not None:
            self._leader_doorbell.ring()
        return word >> _ROUND_BITS

    def wake(self) -> None:
        """From a signal handler: has a wait call its `on_wake`."""
        self._doorbell.ring()

    def wait(
        self,
        round_: int,
        *,
        timeout_s: float | None,
        spin_s: float = 0.0,
        on_wake: Callable[[], bool] | None = None,
    ) -> int | None:
        """Sleeps until the ticket of `round_` is there and takes it.

        `timeout_s` None is for a leader that may have nothing to do: then the doorbell and the deaths in
        `watch` are what ends the wait.  `spin_s`, tens of microseconds at most, looks before it sleeps:
        right after a round the next ticket is often that near.  `on_wake` is called before each
        sleep, so after each ring that brought no ticket; if it returns true the wait ends with None.

        Raises `PeerDied`, or `TicketTimeout` after `timeout_s` in which this process was not stopped itself.
        """
        if spin_s > 0.0:
            until = time.perf_counter() + spin_s
            while time.perf_counter() < until:
                if (sequence := self.take(round_)) is not None:
                    return sequence
        silence = None if timeout_s is None else Silence(timeout_s, time.monotonic())
        while True:
            self._doorbell.drain()
            if (sequence := self.take(round_)) is not None:
                return sequence
            if on_wake is not None and on_wake():
                return None
            if silence is not None and silence.look(time.monotonic()):
                raise TicketTimeout(
                    f"no ticket for round {round_} within {timeout_s:.1f} s: the leader rank is stuck"
                )
            left = None if silence is None else silence.deadline - time.monotonic()
            dead = [self._watch[fd] for fd in self._waiter.wait(left) if fd in self._watch]
            if dead:
                # It may have written the ticket before it died.
                if (sequence := self.take(round_)) is not None:
                    return sequence
                raise PeerDied(dead[0], f"the ticket of round {round_}")
