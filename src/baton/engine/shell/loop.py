"""The engine's shell: the only file of the engine that does I/O (but for recordings, `tape.py`).

Theory.  The supervisor and gateways of this host speak to the engine on a socket in a private directory,
gateways of other hosts on a *public* one.  Each socket has its own share of a turn, the private one first; so
a flood on the public one does not keep the supervisor waiting.

One thread, one loop, one place to sleep.  A turn: silence the doorbell, take what the gateways sent
(ZeroMQ ROUTER) and what other engines did (`peers.py`), take what the workers reported (rings), look at the
clock, let the core decide, append its commands to the log and send its messages; then sleep in `poll()` on
the sockets, the doorbell, the workers' pidfds and the signal pipe, until something comes or the next
deadline.  Nothing in a turn blocks:

* the command ring has its own queue; while something waits in it the loop looks again after `RETRY_S`, and
  the workers ring when they have made room;
* ZeroMQ queues for each gateway without a limit (SNDHWM 0).  What a gateway has not read is bounded by what
  it was admitted for (requests in flight × max_tokens), and dropping a message would lose tokens;
* a gateway that is gone is unroutable (ROUTER_MANDATORY), and its requests are cancelled, as soon as its
  connection ends (`leavers.py`);
* a peer that there is no way to is lost, and its hand-overs end.

ROUTER_HANDOVER is on: a gateway that comes back under the identity of a connection that is dead but not yet
noticed to be so takes it over, where it would be ignored without a word otherwise.

**Rest.**  A model that takes half a millisecond a step would have this loop, ZeroMQ's threads and the gateway
woken for each token, and they compete with the model for the same cores.  So a turn that follows another one
closely is followed by a rest of `REST_S`, in which the workers' doorbell wakes nobody; what they report
meanwhile is read together.  Only while nothing but tokens is awaited (`EngineCore.unhurried`), so nobody who
waits for blocks, a slot or pages waits longer, and never where steps take longer than two rests.

ZeroMQ's descriptor is edge-triggered and every operation on the socket may consume the edge, so the socket's
events are looked at again before each sleep.

How it ends:  SIGTERM (or `stop`) tells workers and gateways, waits a bounded time for the workers, and
returns 0.  After a worker's death, a failure that the core found, or a defect in the engine itself the loop
sends the reason to the gateways and returns 1; if none has come yet, it waits a bounded time for the first.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence

import msgspec
import zmq

from baton.engine.recording.recorder import RecordingCore, create_core
from baton.engine.shell.command_writer import CommandWriter
from baton.engine.shell.deaths import describe_deaths
from baton.engine.shell.leavers import Leavers, keep_asking
from baton.engine.shell.peers import Peers
from baton.engine.shell.signals import stopped_by_sigterm
from baton.engine.shell.sockets import Socket, bound_endpoint, listen
from baton.ipc.doorbell import Doorbell
from baton.ipc.processes.process import Waiter, open_pidfd
from baton.ipc.ring import RETRY_S, RingCorrupted, RingReader, RingWriter
from baton.ipc.sockets.curve import Doorkeeper, Encryption
from baton.ipc.sockets.zeromq import has_messages, terminate
from baton.protocol.codec import MalformedMessage
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.handover import PeerMessage
from baton.protocol.messages.reports import REPORTS
from baton.protocol.messages.requests import (
    FROM_ENGINE,
    TO_ENGINE,
    FromEngine,
    Hello,
    Target,
    ToEngine,
    Welcome,
    max_message_bytes,
)
from baton.protocol.rules.proof import Prover

log = logging.getLogger(__name__)

REST_S = 0.001
"""The grain of `poll()`."""
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_TURN = 256
"""Messages, and records of each ring, that are taken in one turn."""
_TURN_BYTES = 1 << 20
"""Of messages of gateways that are taken in one turn, the last one may go beyond: what is asked in between is
answered soon, whatever else is sent."""
_PUBLIC = b"public/"
"""In front of the identities of those who speak on the public socket."""
_BESIDES_SUBMIT = 1 << 20
"""What a hand-over adds to a request that a gateway may send."""
_LINGER_MS = 1000
"""How long what was sent last may take to leave."""
_TERM_S = 0.5
_LEAVE_S = 4.0
"""How long workers may take to leave after they were told to."""


class EngineLoop:
    """Runs the engine of one instance in the calling thread.

    `commands` is the writer of the command log, `transfers` that of the ring of the workers' transfer threads
    (None: fetches take the log), `reports[rank]` the reader of that rank's ring, `doorbell`
    what they ring, `worker_pids[rank]` the workers' processes.  Listens on `endpoint` (`ipc://…` or
    `tcp://…`) for gateways and on `config.peer_endpoint` for engines from the moment it is made.  Raises
    `OSError` if that is impossible, or `ProcessLookupError` if a worker is gone and was reaped already.
    `registration_secret`: only gateways that know it are listened to ("": all).  `encryption`: of connections
    of TCP, which members of the cluster alone can make; None: they are open and in clear.
    """

    def __init__(
        self,
        config: InstanceConfig,
        *,
        incarnation: str,
        endpoint: str,
        commands: RingWriter,
        reports: Sequence[RingReader],
        doorbell: Doorbell,
        worker_pids: Sequence[int],
        transfers: RingWriter | None = None,
        public: str = "",
        registration_secret: str = "",
        encryption: Encryption | None = None,
        link_doorbell: Doorbell | None = None,
    ) -> None:
        self._commands = CommandWriter(commands, transfers, link_doorbell)
        self._reports = tuple(reports)
        self._doorbell = doorbell
        self._prover = Prover(registration_secret, incarnation)
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: Peers | None = None
        self._door = Doorkeeper(self._context, encryption)
        max_bytes = max_message_bytes(config.max_model_len)
        secret = secrets.token_bytes(16)
        try:
            self._socket = listen(self._context, endpoint, max_bytes)
            self._routers = [(b"", self._socket)]
            if public:
                listener = listen(self._context, public, max_bytes, door=self._door, prepare=keep_asking)
                self._routers.append((_PUBLIC, listener))
            if config.peer_endpoint:
                limit = max_bytes + _BESIDES_SUBMIT
                self._peers = Peers(
                    self._context, config.peer_endpoint, incarnation, limit, secret, door=self._door
                )
        except OSError:
            self._context.destroy(0)
            raise
        self._leavers = Leavers(self._door, [router for _, router in self._routers])
        self.endpoint = bound_endpoint(self._socket)
        """Where it listens for gateways: with `tcp://…:0` the port is known only now."""
        self.public = bound_endpoint(self._routers[-1][1], self._door) if public else ""
        """The same for gateways of other hosts; "": they are to use `endpoint`."""
        self.core = create_core(
            config,
            incarnation=incarnation,
            workers=worker_pids,
            now=time.monotonic(),
            peer_endpoint=self._peers.endpoint if self._peers else "",
            secret=secret,
        )
        self._pidfds = {open_pidfd(pid): rank for rank, pid in enumerate(worker_pids)}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        sockets = [*self._door.descriptors(), *self._leavers.descriptors()]
        sockets += [router.fileno() for _, router in self._routers]
        if self._peers is not None:
            sockets.append(self._peers.fileno())
        others = (*sockets, self._wake_read, *self._pidfds)
        self._waiter = Waiter((*others, doorbell.fileno()))
        self._resting = Waiter(others)
        self._read_at = 0.0
        """When the last turn began that read reports."""
        self._hasty = False
        """Whether this turn read reports, and another one did not long before it."""

    def run(self) -> int:
        """Serves until `stop` or SIGTERM (returns 0) or the instance fails (returns 1)."""
        try:
            with stopped_by_sigterm(self.stop, self._wake_write):
                return self._serve()
        finally:
            self._close()

    def stop(self) -> None:
        """Makes `run` shut the instance down.  For signal handlers and other threads."""
        self._stopping = True
        self._doorbell.ring()

    # -- the loop

    def _serve(self) -> int:
        core = self.core
        dead: set[int] = set()
        while True:
            try:
                self._turn(dead)
            except Exception as error:
                self._defect(error)
            if core.failure is not None:
                self._say_why()
                return 1
            if core.closing:
                if core.ready:  # a worker that loads its model reads no commands
                    self._await_workers()
                return 0
            try:
                dead = self._sleep()
            except Exception as error:
                dead = set()
                self._defect(error)

    def _defect(self, error: Exception) -> None:
        """An exception of this code: the instance fails, and the core tells its gateways."""
        log.exception("a defect in the engine")
        self.core.fail(f"a defect in the engine: {type(error).__name__}: {error}")
        self._flush(time.monotonic())

    def _turn(self, dead: set[int]) -> None:
        """Takes what has arrived, decides, sends.  `dead`: pidfds that have become readable."""
        self._doorbell.drain()
        self._door.turn()
        self._leavers.turn(time.monotonic())
        self._door.count(self.core.refused)
        self._receive()
        if self._peers is not None:
            self._peers.turn(self.core, time.monotonic(), _TURN)
        self._read_reports(None if dead else _TURN)
        now = time.monotonic()
        for identity in self._leavers.gone(now, self.core.gateways(), self._send):
            self.core.gateway_lost(identity)
        if dead:
            self.core.fail(describe_deaths(dead, self._pidfds, self.core.workers, self.core.worker_failures))
        self.core.on_clock(now)
        if self._stopping:
            self.core.shut_down()
        self._flush(now)

    def _sleep(self) -> set[int]:
        """Waits until there is something to do.  Returns the pidfds of workers that have died."""
        timeout: float | None = None
        deadlines = [self.core.next_deadline(), self._door.half_open.next_deadline()]
        deadlines.append(self._leavers.next_deadline())
        deadlines.append(self._peers.next_deadline() if self._peers else None)
        deadline = min((at for at in deadlines if at is not None), default=None)
        if deadline is not None:
            timeout = deadline - time.monotonic()
        busy = self._door.busy() or self._leavers.busy() or (self._peers is not None and self._peers.busy())
        if busy or any(has_messages(router) for _, router in self._routers):
            timeout = 0.0
        elif self._hasty and self.core.unhurried and not self._stopping:
            timeout = REST_S if timeout is None else min(timeout, REST_S)
            return self._dead(self._resting.wait(timeout))
        elif self._commands.pending or any(reader.has_news() for reader in self._reports):
            timeout = RETRY_S if timeout is None else min(timeout, RETRY_S)
        return self._dead(self._waiter.wait(timeout))

    def _dead(self, ready: list[int]) -> set[int]:
        return {fd for fd in ready if fd in self._pidfds}

    def _receive(self) -> None:
        for prefix, router in self._routers:
            self._receive_from(prefix, router)

    def _receive_from(self, prefix: bytes, router: Socket) -> None:
        taken = 0
        for _ in range(_TURN):
            if taken >= _TURN_BYTES or not has_messages(router):
                return
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            taken += sum(map(len, frames))
            identity = prefix + frames[0]
            try:
                if len(frames) != 2:
                    raise MalformedMessage(f"{len(frames) - 1} frames where one was expected")
                message = TO_ENGINE.decode(frames[1])
            except MalformedMessage as error:
                self.core.violation(f"gateway {identity.hex()}", str(error))
                continue
            if not self._is_admitted(identity, message):
                continue
            self.core.on_message(identity, message, time.monotonic())

    def _is_admitted(self, identity: bytes, message: ToEngine) -> bool:
        if isinstance(message, Hello):
            admitted = self._prover.admits(identity, message.nonce, message.gateway, message.claim)
        else:
            admitted = self._prover.knows(identity)
        if not admitted:
            self.core.violation(f"gateway {identity.hex()}", "this instance did not register with it")
        return admitted

    def _read_reports(self, limit: int | None) -> None:
        self._hasty = False
        if self._reports[0].has_news():
            now = time.monotonic()
            self._hasty = now - self._read_at < 2 * REST_S
            self._read_at = now
        for rank, reader in enumerate(self._reports):
            try:
                self._read_ring(rank, reader, limit)
            except (RingCorrupted, MalformedMessage) as error:
                self.core.fail(f"what worker rank {rank} reports cannot be read: {error}")

    def _read_ring(self, rank: int, reader: RingReader, limit: int | None) -> None:
        count = 0
        while reader.has_news() and (limit is None or count < limit):
            record = reader.read()
            if record is None:
                return
            self.core.on_report(rank, REPORTS.decode(record), time.monotonic())
            count += 1
        if reader.has_news():
            self._doorbell.ring()  # the rest is for the next turn, which must not sleep

    def _flush(self, now: float) -> None:
        """Sends what the core wants sent, and what follows if a gateway or a peer turns out to be gone."""
        while True:
            outgoing = self.core.flush(now)
            if outgoing.batch is not None:
                self._commands.append(outgoing.batch)
            self._commands.grant(self.core.take_grants())
            gateways = [to for to, message in outgoing.gateways if not self._send(to, message)]
            for identity in gateways:
                self.core.gateway_lost(identity)
            peers = {to.incarnation for to, message in outgoing.peers if not self._tell(to, message, now)}
            for peer in sorted(peers):
                self.core.peer_lost(peer, now)
            if not gateways and not peers:
                break
        self._commands.flush()

    def _send(self, identity: bytes, message: FromEngine) -> bool:
        """False: the gateway is gone."""
        if type(message) is Welcome:
            message = msgspec.structs.replace(message, proof=self._prover.answer(identity))
        router = self._socket
        if identity.startswith(_PUBLIC):
            router, identity = self._routers[-1][1], identity.removeprefix(_PUBLIC)
        try:
            router.send(identity, _MORE)
            router.send(FROM_ENGINE.encode(message), _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def _tell(self, to: Target, message: PeerMessage, now: float) -> bool:
        """False: there is no way to this peer."""
        return self._peers is not None and self._peers.send(to, message, now)

    # -- the end

    def _say_why(self) -> None:
        """The instance has failed: if nobody was there to be told, the first that comes is (`LastWords`)."""
        core = self.core
        ears = Waiter((self._socket.fileno(), self._wake_read, self._doorbell.fileno()))
        while not core.over:
            until = core.next_deadline()
            if until is not None and not has_messages(self._socket):
                ears.wait(until - time.monotonic())
            self._doorbell.drain()
            self._receive_from(b"", self._socket)
            now = time.monotonic()
            core.on_clock(now)
            if self._stopping:
                core.shut_down()
            self._flush(now)

    def _ranks(self, pidfds: set[int]) -> set[int]:
        return {self._pidfds[fd] for fd in pidfds}

    def _await_workers(self) -> None:
        """Waits, for a bounded time, until all workers have left."""
        deadline = time.monotonic() + _LEAVE_S
        alive = set(self._pidfds)
        while alive and (left := deadline - time.monotonic()) > 0:
            self._doorbell.drain()
            self._commands.flush()
            timeout = min(left, RETRY_S) if self._commands.pending else left
            alive -= set(Waiter((*alive, self._doorbell.fileno())).wait(timeout))
        if alive:
            log.warning("worker ranks %s did not leave within %.0f s", sorted(self._ranks(alive)), _LEAVE_S)

    def _close(self) -> None:
        if isinstance(self.core, RecordingCore):
            self.core.close()
        if self._peers is not None:
            self._peers.close()
        for _, router in self._routers:
            router.close(_LINGER_MS)
        terminate(self._context, _LINGER_MS / 1000 + _TERM_S)
        for fd in (*self._pidfds, self._wake_read, self._wake_write):
            os.close(fd)
