"""Entering a round: how far the log is applied before it, and sleeping while there is nothing to do.

Theory.  A *round* is: apply the log up to n, compose, run a step if there is one.  `enter(busy)` returns the
n of the next round, or None when it has slept or been told to leave instead; `busy` says that the last
round ran a step.  After a round with a step there is always another one, and after one without there is one
only when there are new commands; so a follower knows from its own slots whether a ticket must come soon.

* The leader takes what it has collected as n and writes the ticket of the round at once, before it composes.
* A follower waits for that ticket, then collects until it has n.
* A single rank is a leader without followers.

A record larger than the ring reaches the leader in parts, and every part needs the space of the one before:
the leader rings the followers so that they read their copy too, without a ticket.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import Waiter
from baton.ipc.ring import RETRY_S, RingWriter
from baton.ipc.ticket import RETRY_S as TICKET_RETRY_S
from baton.ipc.ticket import PeerDied, TicketReader, TicketTimeout, TicketWriter
from baton.protocol.rules.silence import Silence
from baton.worker.command_log import CommandLog, CommandLogBroken

SPIN_S = 30e-6
"""A follower looks so long for the next ticket, directly after a step, before it sleeps."""
_VISIBLE_S = 0.001
_VISIBLE_DEADLINE_S = 1.0


class LeaderRounds:
    """Rounds of rank 0.  `engine` is the engine's pidfd, `tickets` None for a single rank."""

    def __init__(
        self,
        log: CommandLog,
        reports: RingWriter,
        doorbell: Doorbell,
        engine: int,
        *,
        tickets: TicketWriter | None = None,
        follower_doorbells: Sequence[Doorbell] = (),
        timeout_s: float = 300.0,
    ) -> None:
        self._log = log
        self._reports = reports
        self._doorbell = doorbell
        self._engine = engine
        self._tickets = tickets
        self._follower_doorbells = tuple(follower_doorbells)
        self._timeout_s = timeout_s
        self._waiter = Waiter([doorbell.fileno(), engine])
        self._leaving = False
        self._round = 0

    def enter(self, busy: bool) -> int | None:
        """See the module.  Sleeps only if not `busy`."""
        if self._log.has_news():
            self._collect()
        sequence = self._log.collected
        if self._leaving:
            return None
        if not busy and sequence == self._log.applied:
            self._sleep()
            return None
        if self._tickets is not None and not self._tickets.publish(self._round + 1, sequence):
            self._wait_for_followers(self._tickets, sequence)
            if self._leaving:
                return None
        self._round += 1
        return sequence

    def leave(self) -> None:
        """From a signal handler: `enter` returns None from now on, and a sleep ends."""
        self._leaving = True
        self._doorbell.ring()

    def _collect(self) -> bool:
        found = self._log.collect()
        if self._log.partial:
            for doorbell in self._follower_doorbells:
                doorbell.ring()
        return found

    def _sleep(self) -> None:
        """Until there are commands, the engine dies, or a report that waits for space can be sent."""
        self._doorbell.drain()
        if self._reports.pending:
            self._reports.flush()
        timeout_s = RETRY_S if self._reports.pending else None
        if self._log.has_news():
            if self._collect():
                return
            timeout_s = _VISIBLE_S  # published, but perhaps not visible yet: nobody rings for it again
        if not self._leaving:
            self._wait(timeout_s, "commands")

    def _wait_for_followers(self, tickets: TicketWriter, sequence: int) -> None:
        """The followers are too far behind for another ticket: waits for them, within limits."""
        silence = Silence(self._timeout_s, time.monotonic())
        while not self._leaving and not tickets.publish(self._round + 1, sequence):
            if silence.look(time.monotonic()):
                raise TicketTimeout(
                    f"the slowest follower is {tickets.lag()} rounds behind round {self._round} and took "
                    f"no ticket for {self._timeout_s:.0f} s: it is stuck"
                )
            self._wait(TICKET_RETRY_S, "a follower to take its tickets")
            self._doorbell.drain()

    def _wait(self, timeout_s: float | None, reason: str) -> None:
        if self._engine in self._waiter.wait(timeout_s):
            raise PeerDied("engine", reason)


class FollowerRounds:
    """Rounds of ranks 1, 2, …: as the leader's tickets say."""

    def __init__(
        self, log: CommandLog, reports: RingWriter, tickets: TicketReader, *, timeout_s: float = 300.0
    ) -> None:
        self._log = log
        self._reports = reports
        self._tickets = tickets
        self._timeout_s = timeout_s
        self._leaving = False
        self._round = 0

    def enter(self, busy: bool) -> int | None:
        """See the module.  Raises `TicketTimeout` if no ticket follows a round with a step."""
        if self._leaving:
            return None
        sequence = self._tickets.take(self._round + 1)
        if sequence is None:
            sequence = self._tickets.wait(
                self._round + 1,
                timeout_s=self._timeout_s if busy else None,
                spin_s=SPIN_S if busy else 0.0,
                on_wake=self._on_wake,
            )
        if sequence is None:
            return None
        self._round += 1
        if sequence > self._log.collected:
            self._collect(sequence)
        return sequence

    def leave(self) -> None:
        """From a signal handler: see `LeaderRounds.leave`."""
        self._leaving = True
        self._tickets.wake()

    def _on_wake(self) -> bool:
        self._log.collect()
        if self._reports.pending:
            self._reports.flush()
        return self._leaving

    def _collect(self, sequence: int) -> None:
        """The leader has read up to `sequence`, so it is published; it is visible now or very soon."""
        give_up = time.monotonic() + _VISIBLE_DEADLINE_S
        while self._log.collected < sequence:
            if self._log.collect():
                continue
            if time.monotonic() > give_up:
                raise CommandLogBroken(
                    f"the leader applies batch {sequence}, this rank can read {self._log.collected} only"
                )
            time.sleep(0)


Rounds = LeaderRounds | FollowerRounds
