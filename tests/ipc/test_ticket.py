"""Tickets: none lost, none overwritten, and a wait that ends for a reason."""

import os
import subprocess
import sys
import threading

import pytest

from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import open_pidfd
from baton.ipc.ticket import MAX_SEQUENCE, PeerDied, TicketReader, TicketTimeout, TicketWriter, create_tickets


def make(followers=1, entries=4, watch=None):
    fd = create_tickets(followers, entries)
    bells = [Doorbell.create() for _ in range(followers)]
    leader_bell = Doorbell.create()
    writer = TicketWriter(fd, bells)
    readers = [TicketReader(fd, i, bells[i], watch or {}, leader_bell) for i in range(followers)]
    return writer, readers, leader_bell


def test_a_follower_that_takes_rings_the_waiting_leader():
    writer, (reader,), bell = make(1, 2)
    assert writer.publish(1, 10)
    assert writer.publish(2, 10)
    assert reader.take(1) == 10
    assert not bell.drain()
    assert writer.publish(3, MAX_SEQUENCE)
    assert not writer.publish(4, 0)
    assert reader.take(2) == 10
    assert bell.drain()
    assert writer.publish(4, 0)
    assert reader.take(3) == MAX_SEQUENCE
    assert reader.take(4) == 0


def test_misuse_is_refused():
    writer, _, _ = make()
    with pytest.raises(ValueError, match="no gaps"):
        writer.publish(2, 0)
    with pytest.raises(ValueError, match="does not fit"):
        writer.publish(1, MAX_SEQUENCE + 1)
    with pytest.raises(ValueError, match="not ticket memory"):
        TicketWriter(os.memfd_create("other"), [])
    with pytest.raises(ValueError, match="followers and entries"):
        create_tickets(0)


def test_a_wait_has_a_deadline_and_a_reason():
    _, (reader,), _ = make()
    with pytest.raises(TicketTimeout, match=r"round 1 within 0\.0 s"):
        reader.wait(1, timeout_s=0.03)


def test_a_rank_that_was_stopped_itself_does_not_take_the_others_for_stuck(monkeypatch):
    """All of the instance was stopped for longer than a step may take; the ticket comes when all go on."""
    writer, (reader,), _ = make()
    clock, waits = [100.0], []

    def wait(self, timeout_s):
        waits.append(timeout_s)
        clock[0] += 1000.0 if len(waits) == 1 else timeout_s
        if len(waits) == 3:
            writer.publish(1, 7)
        return []

    monkeypatch.setattr("baton.ipc.ticket.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("baton.ipc.ticket.Waiter.wait", wait)
    assert reader.wait(1, timeout_s=10.0) == 7
    with pytest.raises(TicketTimeout):
        reader.wait(2, timeout_s=10.0)


def test_a_wait_ends_when_the_leader_dies():
    leader = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    pidfd = open_pidfd(leader.pid)
    _, (reader,), _ = make(watch={pidfd: "leader rank"})
    threading.Timer(0.05, leader.kill).start()
    with pytest.raises(PeerDied, match=r"leader rank died .* ticket of round 1"):
        reader.wait(1, timeout_s=60.0)
    leader.communicate()
    os.close(pidfd)


def test_a_wait_wakes_for_the_ticket_and_calls_on_wake_for_other_rings():
    writer, (reader,), _ = make()
    wakes = []

    def on_wake():
        """What happens during the sleep that follows: first another ring, then the ticket."""
        wakes.append(1)
        action, arguments = (reader._doorbell.ring, ()) if len(wakes) == 1 else (writer.publish, (1, 5))
        threading.Timer(0.02, action, arguments).start()
        return False

    assert reader.wait(1, timeout_s=60.0, on_wake=on_wake) == 5
    assert len(wakes) == 2
    threading.Timer(0.02, reader._doorbell.ring).start()
    assert reader.wait(2, timeout_s=60.0, on_wake=lambda: len(wakes) > 2 or bool(wakes.append(1))) is None
    assert writer.publish(2, 6)
    assert reader.wait(2, timeout_s=60.0, spin_s=0.001) == 6
