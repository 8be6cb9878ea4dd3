"""Fetches take the ring of the transfer threads; all else, and every number, stays in the log."""

from baton.engine.shell.command_writer import CommandWriter
from baton.ipc.ring import RingReader, RingWriter, create_ring
from baton.protocol.messages.commands import (
    COMMANDS,
    TRANSFERS,
    Abort,
    CommandBatch,
    DropFetch,
    Fetch,
    Preempt,
    Revoke,
    TransferBatch,
)
from baton.protocol.messages.handover import InstanceSource

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
    transferred = [TRANSFERS.decode(record) for record in transfer_reader.records()]
    assert transferred == [TransferBatch(1, [FETCH, DropFetch([1])]), TransferBatch(2, [FETCH])]


class Bell:
    def __init__(self):
        self.rung = 0

    def ring(self):
        self.rung += 1


def test_nobody_is_woken_for_what_is_not_for_him():
    """A fetch does not wake the token loop, a grant not even the transfer thread."""
    bells = [Bell(), Bell()]
    writers = [RingWriter(create_ring(1 << 12, 1), [bell]) for bell in bells]
    writer = CommandWriter(*writers)

    def rung():
        assert writer.flush()
        return [bell.rung for bell in bells]

    writer.append(CommandBatch(1, [Abort(0, 1)]))
    assert rung() == [1, 0]
    writer.append(CommandBatch(2, [FETCH]))
    assert rung() == [1, 1]
    writer.grant([Revoke([b"token"])])
    assert rung() == [1, 1]
    writer.append(CommandBatch(3, [FETCH, Abort(1, 1)]))
    assert rung() == [2, 2]


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
