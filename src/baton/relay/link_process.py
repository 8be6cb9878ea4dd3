"""The process on the leader's host that stands for the ranks of all others: the shell around `Link`.

    python -m baton.relay.link_process WIRING

Started by the engine's process like a worker, and to the engine it is one: its death is that of every rank
that it stands for.  It sleeps on its doorbell (rung with each ticket), its socket and the sockets of the
ranks here that look for the others; with nothing to pass on it wakes a few times within `--node-timeout`, to
say so.

ZeroMQ does not say which connection of a ROUTER was closed, only that one was: then each that takes part is
written to, and one that is gone cannot be (`ROUTER_MANDATORY`).
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import time
from socket import socket as Socket

import msgspec
import zmq

from baton.engine.shell.sockets import listen
from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import ParentGone, Waiter, die_with_parent
from baton.ipc.ring import RETRY_S, RingReader, RingWriter
from baton.ipc.sockets.curve import Doorkeeper, Encryption
from baton.ipc.sockets.zeromq import has_messages, terminate
from baton.ipc.ticket import TicketReader
from baton.observe.logs import configure_logging
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.nodes import FROM_LEADER, FROM_NODE
from baton.protocol.messages.reports import REPORTS, StrangersRefused, WorkerFailed
from baton.protocol.rules.cluster_secret import Secrets
from baton.relay.link import Link, Lost
from baton.relay.meeting_sockets import MeetingSockets
from baton.worker.loop import flush_reports
from baton.worker.wiring import LinkWiring

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20
"""Of a message of a relay."""
_BIND_S = 5.0
"""What the link of the incarnation before may take to end."""
_MISSING_S = 5.0
"""Nodes that have not come after this are named in the log."""
_TOGETHER_S = 1.0
"""Within so long what is refused is one report."""
_FAREWELL_S = 1.0
_LINGER_MS = 200
_TURN = 256


class LinkProcess:
    """Runs the link of one incarnation in the calling thread."""

    def __init__(self, wiring: LinkWiring, secrets: Secrets) -> None:
        """Raises `OSError` if it cannot listen."""
        config = wiring.config
        self._wiring = wiring
        self._doorbell = Doorbell(wiring.doorbell)
        engine = Doorbell(wiring.engine_doorbell)
        leader = Doorbell(wiring.leader_doorbell)
        self._commands = RingReader(wiring.command_ring, wiring.reader, engine)
        self._transfers: RingReader | None = None
        if wiring.transfer_ring is not None:
            self._transfers = RingReader(wiring.transfer_ring, wiring.reader, engine)
        self._tickets = TicketReader(wiring.tickets, wiring.follower, self._doorbell, {}, leader)
        self._reports = {rank: RingWriter(fd, [engine]) for rank, fd in wiring.report_rings.items()}
        self.link = Link(config, wiring.incarnation, config.command_ring_bytes)
        self._meetings = MeetingSockets(
            [Socket(fileno=fd) for fd in wiring.meetings], self.link.meeting, self.link.say
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        encrypts = bool(secrets) and config.transfer_encryption
        self._door = Doorkeeper(self._context, Encryption(secrets, leads=True) if encrypts else None)
        self._router = self._listen(config.nodes.listen)
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._gone = False
        """Some connection has been closed."""
        self._unreachable: list[bytes] = []
        """Could not be written to."""
        self._round = 0
        self._stopping = False
        self._came: set[int] = set()
        self._refused = dict.fromkeys(("handshake", "half_open", "message"), 0)
        self._refusals_told = dict(self._refused)
        self._tell_refusals_at = 0.0
        self._descriptors: tuple[int, ...] = ()
        self._waiter = Waiter(())
        self._name_missing_at: float | None = time.monotonic() + _MISSING_S

    def run(self) -> int:
        """Returns the exit code."""
        try:
            while True:
                self._turn()
                if self.link.lost is not None:
                    self._fail(self.link.lost)
                    return 1
                if self._stopping or self.link.over:
                    self.link.leave("")
                    self._send()
                    return 0
                self._sleep()
        finally:
            self._router.disable_monitor()
            self._monitor.close(0)
            self._router.close(_LINGER_MS)
            terminate(self._context, _LINGER_MS / 1000 + 0.3)

    def stop(self) -> None:
        """From the SIGTERM handler."""
        self._stopping = True
        self._doorbell.ring()

    # -- a turn

    def _turn(self) -> None:
        self._doorbell.drain()
        self._door.turn()
        self._door.count(self._refused.__setitem__)
        self._receive()
        self._meetings.turn()
        self._pump()
        now = time.monotonic()
        self.link.on_clock(now)
        self._tell_of_refusals(now)
        self._write_reports()
        self._send()
        self._tell_who_is_missing(now)

    def _pump(self) -> None:
        """From the rings to the link, as far as the nodes have room."""
        link = self.link
        while link.room and (sequence := self._tickets.take(self._round + 1)) is not None:
            self._round += 1
            link.ticket(self._round, sequence)
        while link.room and (record := self._commands.read()) is not None:
            link.command(record)
        while link.room and self._transfers is not None and (record := self._transfers.read()) is not None:
            link.transfer(record)

    def _receive(self) -> None:
        for _ in range(_TURN):
            if not has_messages(self._router):
                break
            identity, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            try:
                if len(frames) != 1:
                    raise MalformedMessage(f"{len(frames)} frames where one was expected")
                message = FROM_NODE.decode(frames[0])
            except MalformedMessage as error:
                self._refused["message"] += 1
                log.warning("a message of %s is not read: %s", identity[:40].hex(), error)
                continue
            self.link.on_message(identity, message, time.monotonic())
        while has_messages(self._monitor):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            self._gone = True
        if has_messages(self._router):
            return
        # Only now: the last message of a connection says why it was closed.
        for identity in self._unreachable:
            self.link.on_lost(identity)
        self._unreachable.clear()
        if self._gone:
            self._gone = False
            self.link.probe()

    def _write_reports(self) -> None:
        link = self.link
        reports, link.reports = link.reports, []
        for rank, record in reports:
            self._reports[rank].append(record)
        full = {rank for rank, writer in self._reports.items() if not writer.flush()}
        for number, ranks in link.nodes().items():
            if not full.intersection(ranks):
                link.done(number)

    def _send(self) -> None:
        for identity, message in self.link.flush(time.monotonic()):
            try:
                self._router.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
                self._router.send(FROM_LEADER.encode(message), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (errno.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._unreachable.append(identity)

    def _sleep(self) -> None:
        if self.link.lost is not None or self._unreachable or self._gone:
            return
        if has_messages(self._router) or self._door.busy():
            return
        deadlines = [self.link.next_deadline(), self._door.half_open.next_deadline(), self._name_missing_at]
        if self._refused != self._refusals_told:
            deadlines.append(self._tell_refusals_at)
        deadline = min((at for at in deadlines if at is not None), default=None)
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        if self._waits_for_memory():
            timeout = RETRY_S if timeout is None else min(timeout, RETRY_S)
        sockets = (self._router.fileno(), self._monitor.fileno(), *self._door.descriptors())
        descriptors = (self._doorbell.fileno(), *sockets, *self._meetings.descriptors())
        if descriptors != self._descriptors:
            self._descriptors, self._waiter = descriptors, Waiter(descriptors)
        if not has_messages(self._monitor):
            self._waiter.wait(timeout)

    def _waits_for_memory(self) -> bool:
        """A report waits for space, or a record is published and not visible yet."""
        if any(writer.pending for writer in self._reports.values()):
            return True
        return self.link.room and self._commands.has_news()

    # -- what people are told

    def _tell_of_refusals(self, now: float) -> None:
        """To the engine, which counts them: the first at once, those of the next second together."""
        if self._refused == self._refusals_told or now < self._tell_refusals_at:
            return
        told, self._refusals_told = self._refusals_told, dict(self._refused)
        handshakes, half_open, messages = (self._refused[at] - told[at] for at in told)
        rank = min(self._reports)
        report = StrangersRefused(rank, handshakes=handshakes, half_open=half_open, messages=messages)
        self._reports[rank].append(REPORTS.encode(report))
        self._tell_refusals_at = now + _TOGETHER_S

    def _tell_who_is_missing(self, now: float) -> None:
        for number in sorted(self.link.nodes().keys() - self._came):
            self._came.add(number)
            log.info("node %d takes part", number)
        if self._name_missing_at is not None and now >= self._name_missing_at:
            self._name_missing_at = None
            if self.link.missing:
                log.warning(
                    "waits for node %s of %d: baton serve --instance --node %d --leader %s there",
                    ", ".join(map(str, self.link.missing)),
                    self._wiring.config.nodes.count,
                    self.link.missing[0],
                    self._wiring.config.nodes.listen.removeprefix("tcp://"),
                )

    def _fail(self, lost: Lost) -> None:
        log.error("%s", lost.reason)
        self.link.leave(f"the instance has failed: {lost.reason}")
        self._send()
        reports = self._reports[lost.rank]
        reports.append(REPORTS.encode(WorkerFailed(lost.rank, lost.reason)))
        flush_reports(reports, self._doorbell, _FAREWELL_S)

    def _listen(self, endpoint: str) -> zmq.Socket[bytes]:
        give_up = time.monotonic() + _BIND_S
        while True:
            try:
                return listen(self._context, endpoint, MAX_BYTES, door=self._door)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > give_up:
                    raise OSError(error.errno, f"--leader: {error.strerror}") from None
                time.sleep(0.05)


def run_link(wiring: LinkWiring) -> int:
    """The whole life of a link process.  Returns its exit code."""
    secrets = Secrets.taken_from(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(wiring.config.log_level, f"{wiring.config.name}/link", wiring.config.log_format)
    try:
        die_with_parent(wiring.engine_pid)
    except ParentGone as error:
        log.error("the engine (process %d) is gone: %s", wiring.engine_pid, error)
        return 1
    try:
        process = LinkProcess(wiring, secrets)
        signal.signal(signal.SIGTERM, lambda *_: process.stop())
        return process.run()
    except Exception as error:
        log.exception("the link failed")
        reports = RingWriter(
            wiring.report_rings[min(wiring.report_rings)], [Doorbell(wiring.engine_doorbell)]
        )
        reports.write(REPORTS.encode(WorkerFailed(min(wiring.report_rings), f"the link failed: {error}")))
        return 1


if __name__ == "__main__":
    sys.exit(run_link(msgspec.json.decode(sys.argv[1], type=LinkWiring)))
