"""A rank's view of the command log: records of the ring, decoded, checked, waiting to be applied.

Theory.  *Collecting* a record (reading it from the ring) and *applying* it are two things: a follower may
collect ahead of its ticket, and has to when a record is larger than the ring, because a reader that does
not read holds the writer's space.  What is applied, and when, is decided by the round (`rounds.py`).

On other channels a malformed message is logged and dropped.  Here that would let the ranks diverge, and the
engine believe in commands that nobody has applied, so a record that cannot be decoded, or a gap in the
sequence, is fatal: `CommandLogBroken`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from baton.ipc.ring import PUBLISHED_WORD, RingReader
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.commands import COMMANDS, Command, CommandBatch


class CommandLogBroken(RuntimeError):
    """A record of the command log is malformed or missing; this worker cannot go on."""


class CommandLog:
    """Reads command batches from a ring.  `collected` and `applied` are sequence numbers."""

    def __init__(self, reader: RingReader) -> None:
        self._reader = reader
        self._words = reader.words
        self._waiting: deque[CommandBatch] = deque()
        self.collected = 0
        """Everything up to this has been read from the ring."""
        self.applied = 0
        """Everything up to this has been handed out by `take`."""

    def has_news(self) -> bool:
        """Whether the ring holds something unread: one look at one word."""
        return self._words[PUBLISHED_WORD] != self._reader.cursor

    @property
    def partial(self) -> bool:
        """A record has been read in part; its rest needs space that other readers must free."""
        return self._reader.partial

    def collect(self) -> bool:
        """Reads all records that are complete.  Returns whether there were any."""
        before = self.collected
        while (record := self._reader.read()) is not None:
            try:
                batch = COMMANDS.decode(record)
            except MalformedMessage as error:
                raise CommandLogBroken(
                    f"record {self.collected + 1} of the command log is malformed: {error}"
                ) from None
            if batch.sequence != self.collected + 1:
                raise CommandLogBroken(
                    f"command batch {batch.sequence} came after batch {self.collected}: the log has no gaps"
                )
            self._waiting.append(batch)
            self.collected = batch.sequence
        return self.collected != before

    def take(self, sequence: int) -> Iterator[Command]:
        """The commands of all batches up to `sequence` that were not taken before, in order.

        `sequence` must be collected.
        """
        if sequence > self.collected:
            raise CommandLogBroken(f"batch {sequence} is to be applied, only {self.collected} are read")
        while self.applied < sequence:
            batch = self._waiting.popleft()
            self.applied = batch.sequence
            yield from batch.commands
