"""What the processes of an instance may rely on between each other: the rings and tickets in shared memory
and those of the simulator keep it alike."""

from __future__ import annotations

import os
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingReader, RingWriter, create_ring
from baton.ipc.ticket import TicketReader, TicketWriter, create_tickets
from baton.simulation.wires.rings import LogEnd, ReportEnd, TicketBoard, TicketEnd


class RealReports:
    """A rank's report ring with room for few records."""

    def __init__(self, room):
        self._fd = create_ring(64 * room, 1)
        self._engine, self._rank = Doorbell.create(), Doorbell.create()
        self.writer = RingWriter(self._fd, [self._engine])
        self._reader = RingReader(self._fd, 0, self._rank)

    def read(self, count):
        """What the engine finds when it looks, at most so many."""
        self._engine.drain()
        return [record for _ in range(count) if (record := self._reader.read()) is not None]

    def rung(self):
        """The engine was told to look since it looked last."""
        return self._engine.drain()

    def close(self):
        self.writer.close()
        self._reader.close()
        self._engine.close()
        self._rank.close()
        os.close(self._fd)


class SimulatedReports:
    def __init__(self, room):
        self._sent = deque()
        self.writer = ReportEnd(room, self._sent.append, lambda: None)

    def read(self, count):
        found = [self._sent.popleft() for _ in range(min(count, len(self._sent)))]
        for _ in found:
            self.writer.freed()
        return found

    def rung(self):
        return bool(self._sent)

    def close(self):
        """Nothing is held."""


@pytest.mark.parametrize("kind", [RealReports, SimulatedReports])
@given(st.integers(1, 4), st.lists(st.sampled_from(["write", "quiet", "ring", "flush", "read"]), max_size=60))
def test_reports_come_in_order_and_none_waits_unheard(kind, room, script):
    """`quiet`: written without ringing, as steps are of which nobody waits for the tokens."""
    reports, written, read = kind(room), [], []
    for op in script:
        if op in ("write", "quiet"):
            written.append(f"report {len(written)}".encode().ljust(50))
            went = reports.writer.write(written[-1], op == "write")
            assert went == (not reports.writer.pending)
            if op == "write" and went:
                read += reports.read(len(written))
                assert read == written, "all of it is there for who is rung"
            elif not went:
                assert reports.rung(), "what has to wait rings, however it was written"
                read += reports.read(1)
        elif op == "flush":
            assert reports.writer.flush() == (not reports.writer.pending)
        elif op == "ring":
            reports.writer.ring()
        elif op == "read" and reports.rung():
            read += reports.read(2)
        assert read == written[: len(read)]
    while True:
        reports.writer.flush()
        reports.writer.ring()
        read += reports.read(len(written))
        if not reports.writer.pending and len(read) == len(written):
            break
    assert read == written
    reports.close()


class RealLog:
    def __init__(self):
        self._fd = create_ring(1 << 14, 1)
        self._writer = RingWriter(self._fd)
        self.end = RingReader(self._fd, 0)

    def append(self, record):
        self._writer.write(record)

    def news(self):
        return self.end.has_news()

    def close(self):
        self._writer.close()
        self.end.close()
        os.close(self._fd)


class SimulatedLog:
    def __init__(self):
        self._records = []
        self.end = LogEnd(self._records)

    def append(self, record):
        self._records.append(record)
        self.end.publish()

    def news(self):
        return self.end.has_news

    def close(self):
        """Nothing is held."""


@pytest.mark.parametrize("kind", [RealLog, SimulatedLog])
@given(st.lists(st.booleans(), max_size=60))
def test_commands_are_read_once_in_order(kind, script):
    log, written, read = kind(), [], 0
    for writes in script:
        if writes:
            written.append(f"batch {len(written)}".encode())
            log.append(written[-1])
        else:
            record = log.end.read()
            assert record == (written[read] if read < len(written) else None)
            read += record is not None
        assert log.news() == (read < len(written))
        assert not log.end.partial
    log.close()


def real_tickets(followers, entries):
    fd = create_tickets(followers, entries)
    bells = [Doorbell.create() for _ in range(followers)]
    bell = Doorbell.create()
    writer = TicketWriter(fd, bells)
    readers = [TicketReader(fd, number, bells[number], {}, bell) for number in range(followers)]

    def close():
        for end in (writer, *readers, *bells, bell):
            end.close()
        os.close(fd)

    return writer, readers, close


def simulated_tickets(followers, entries):
    ends = [TicketEnd(lambda: None) for _ in range(followers)]

    def write(round_, sequence):
        for end in ends:
            end.visible[round_] = sequence

    board = TicketBoard(entries, write)
    board.ends = ends
    return board, ends, lambda: None


@pytest.mark.parametrize("make", [real_tickets, simulated_tickets])
@given(st.integers(1, 3), st.integers(1, 5), st.lists(st.integers(0, 3), max_size=120))
def test_no_ticket_is_lost_or_overwritten(make, followers, entries, script):
    writer, readers, close = make(followers, entries)
    written, taken = [], [0] * followers
    for op in script:
        if op == 0 or op > followers:
            sequence = len(written) * 7
            if writer.publish(len(written) + 1, sequence):
                written.append(sequence)
                assert len(written) - min(taken) <= entries
            else:
                assert len(written) - min(taken) == entries
        else:
            sequence = readers[op - 1].take(taken[op - 1] + 1)
            if taken[op - 1] < len(written):
                assert sequence == written[taken[op - 1]]
                taken[op - 1] += 1
            else:
                assert sequence is None
        assert writer.lag() == len(written) - min(taken)
    close()
