"""Fetches take the ring of the transfer threads; all else, and every number, stays in the log."""

from baton.engine.command_writer import CommandWriter
from baton.ipc.ring import RingReader, RingWriter, create_ring
from baton.protocol.commands import COMMANDS, Abort, CommandBatch, DropFetch, Fetch, Preempt
from baton.protocol.handover import InstanceSource

FETCH = Fetch(1, InstanceSource("t", 8, []), b"", b"", 0, -1)
BATCHES = [
    CommandBatch(1, [Abort(0, 1)]),
    CommandBatch(2, [Preempt(1, 1), FETCH, Abort(2, 1), DropFetch([1])]),
    CommandBatch(3, [FETCH]),
]


def ring(capacity=1 << 12):
    fd = create_ring(capacity, 1)
    return RingWriter(fd), RingReader(fd, 0)


def read(reader):
    return [COMMANDS.decode(record) for record in reader.records()]


def test_a_batch_is_parted():
    (log, log_reader), (transfers, transfer_reader) = ring(), ring()
    writer = CommandWriter(log, transfers)
    for batch in BATCHES:
        writer.append(batch)
    assert writer.pending
    assert writer.flush()
    assert not writer.pending
    assert read(log_reader) == [
        BATCHES[0],
        CommandBatch(2, [Preempt(1, 1), Abort(2, 1)]),
        CommandBatch(3, []),
    ]
    assert read(transfer_reader) == [CommandBatch(1, [FETCH, DropFetch([1])]), CommandBatch(2, [FETCH])]


def test_without_a_ring_for_transfers_everything_takes_the_log():
    log, reader = ring()
    writer = CommandWriter(log, None)
    for batch in BATCHES:
        writer.append(batch)
    assert writer.flush()
    assert read(reader) == BATCHES


def test_a_full_ring_keeps_the_writer_waiting_whichever_it_is():
    (log, _), (transfers, reader) = ring(), ring(64)
    writer = CommandWriter(log, transfers)
    for _ in range(5):
        writer.append(CommandBatch(1, [DropFetch(list(range(1000, 1020)))]))
    assert not writer.flush()
    assert writer.pending
    found = []
    while writer.pending:
        found += read(reader)
        writer.flush()
    found += read(reader)
    assert [batch.sequence for batch in found] == [1, 2, 3, 4, 5]
