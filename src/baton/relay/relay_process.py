"""The process on a host that is not the leader's, the parent of the ranks there: the shell around `Node`.

    python -m baton.launch.instances.processes.relay LAUNCH

It sleeps on its doorbell (rung by its ranks), its socket and its ranks' pidfds.  While nothing runs it wakes
a few times within `--node-timeout`, to say that it is there.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from types import FrameType

import zmq

from baton.engine.shell.sockets import set_tcp_options
from baton.ipc.processes.children import Process
from baton.ipc.processes.process import Waiter, describe_exit, open_pidfd
from baton.ipc.ring import RETRY_S
from baton.ipc.sockets.curve import Encryption, Place
from baton.ipc.sockets.zeromq import has_messages, terminate
from baton.ipc.ticket import TicketWriter
from baton.protocol.codec import MalformedMessage
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.nodes import FROM_LEADER, FROM_NODE
from baton.relay.meeting_sockets import MeetingSockets
from baton.relay.node import Node
from baton.worker.wiring import GroupWiring

log = logging.getLogger(__name__)

_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LINGER_MS = 200
_TURN = 256


class RelayProcess:
    """Runs the relay of one node in one incarnation.  `workers[i]` is rank `group.ranks[i]`."""

    def __init__(
        self,
        node: Node,
        config: InstanceConfig,
        group: GroupWiring,
        tickets: TicketWriter,
        workers: Sequence[Process],
        encryption: Encryption | None,
        key: bytes,
    ) -> None:
        """`key`: of the leader (`ipc/sockets/curve.py`); empty without encryption."""
        self._node = node
        self._group = group
        self._ticket_writer = tickets
        self._tickets: deque[tuple[int, int]] = deque()
        self._alive = {
            open_pidfd(worker.pid): (rank, worker.pid)
            for rank, worker in zip(group.ranks, workers, strict=True)
        }
        self._meetings = MeetingSockets(group.meetings, node.meeting, node.say)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.ROUTING_ID, b"relay" + os.urandom(8))
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        endpoint = config.nodes.listen
        set_tcp_options(self._dealer, endpoint)
        if encryption is not None:
            encryption.connect(self._dealer, key)
        self._monitor = self._dealer.get_monitor_socket(_BROKEN)
        self._dealer.connect(Place.parse(endpoint).address)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._told_to_leave = False
        self._gone = False
        """The connection has been closed; what came before may be unread."""
        self._descriptors: tuple[int, ...] = ()
        self._ready: list[int] = []
        """Descriptors with which the last sleep ended."""
        self._waiter = Waiter(())

    def run(self) -> str:
        """Returns why it is over; "": as it should be."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        node = self._node
        try:
            while node.over is None:
                self._turn()
                if node.over is None:
                    self._sleep()
            self._send()
            return node.over
        finally:
            self._dealer.disable_monitor()
            self._monitor.close(0)
            self._dealer.close(_LINGER_MS)
            terminate(self._context, _LINGER_MS / 1000 + 0.3)

    # -- a turn

    def _turn(self) -> None:
        node, group = self._node, self._group
        group.doorbell.drain()
        self._receive()
        self._meetings.turn()
        self._read_reports()
        self._write_rings()
        node.on_clock(time.monotonic())
        self._look_after_workers()
        if self._told_to_leave:
            node.leave("the relay was told to leave")
        self._send()

    def _receive(self) -> None:
        node = self._node
        for _ in range(_TURN):
            if not has_messages(self._dealer):
                break
            data = self._dealer.recv(zmq.NOBLOCK)
            try:
                node.on_message(FROM_LEADER.decode(data), time.monotonic())
            except MalformedMessage as error:
                log.error("a message of the leader cannot be read: %s", error)
                node.on_lost()
        while has_messages(self._monitor):
            self._monitor.recv_multipart(zmq.NOBLOCK)
            self._gone = True
        if self._gone and not has_messages(self._dealer):
            node.on_lost()

    def _read_reports(self) -> None:
        for rank, reader in zip(self._group.ranks, self._group.reports, strict=True):
            while self._node.room and (record := reader.read()) is not None:
                self._node.report(rank, record)

    def _write_rings(self) -> None:
        """As the leader's rings are: records before the tickets that speak of them."""
        node, group = self._node, self._group
        commands, node.commands = node.commands, []
        for record in commands:
            group.commands.append(record)
        gone = group.commands.flush(ring=False)
        transfers, node.transfers = node.transfers, []
        if group.transfers is not None:
            for record in transfers:
                group.transfers.append(record)
            gone = group.transfers.flush() and gone
        self._tickets += node.tickets
        node.tickets = []
        while gone and self._tickets and self._ticket_writer.publish(*self._tickets[0]):
            self._tickets.popleft()
        if gone:
            node.done()

    def _look_after_workers(self) -> None:
        dead = [fd for fd in self._ready if fd in self._alive]
        self._ready = []
        if not dead:
            return
        self._read_reports()  # it may have said why
        for fd in dead:
            rank, pid = self._alive.pop(fd)
            how = describe_exit(fd)
            os.close(fd)
            if how != "exited with status 0":
                self._node.leave(f"worker rank {rank} (process {pid}) {how}", rank)
        if not self._alive:
            self._node.leave("")

    def _send(self) -> None:
        for message in self._node.flush(time.monotonic()):
            try:
                self._dealer.send(FROM_NODE.encode(message), zmq.NOBLOCK)
            except zmq.Again:  # there is no queue any more: the connection broke
                self._node.on_lost()
                return

    def _sleep(self) -> None:
        group = self._group
        if has_messages(self._dealer) or has_messages(self._monitor):
            return
        timeout = max(0.0, self._node.next_deadline() - time.monotonic())
        transfers = group.transfers is not None and group.transfers.pending
        torn = self._node.room and any(reader.has_news() for reader in group.reports)
        if group.commands.pending or transfers or self._tickets or torn:
            timeout = min(timeout, RETRY_S)
        sockets = (self._dealer.fileno(), self._monitor.fileno(), self._wake_read)
        descriptors = (group.doorbell.fileno(), *sockets, *self._alive, *self._meetings.descriptors())
        if descriptors != self._descriptors:
            self._descriptors, self._waiter = descriptors, Waiter(descriptors)
        self._ready = self._waiter.wait(timeout)

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        self._told_to_leave = True
