"""The engine's connections to other engines (`protocol/messages/handover.py`): sockets in, messages out.

Theory.  The engine listens on one ROUTER.  To each peer that the core speaks to there is one *link*: a DEALER
with a monitor, opened by the first message to that peer.  Both sides of a hand-over speak, so each of them
has a link, and each notices the death of the other by itself, at once: the kernel closes a dead process's
connections.

A link is never reconnected behind our back (RECONNECT_IVL -1), because what was on its way when it broke is
gone.  What the core may rely on is: messages of one peer come in order and none is missing, or `peer_lost`
comes.  Three things make it so:

* a link that breaks, cannot be opened within `CONNECT_S` or is not wanted any more by the other side is
  closed, and this file calls `peer_lost` of the core; the next message to that peer opens a new one;
* the routing id says whose link it is, proves it, and has a number that grows with every link
  (`callers.py`).  So the engine that listens sees that a peer has opened another link, that is, that it
  has lost the one before, and maybe messages with it;
* what is left of an earlier link, what comes from a stranger, and a message that makes no sense (after which
  nothing on that link can be trusted) is not read, and never in silence: the sender is told with an empty
  message on the same connection (otherwise the direction from ROUTER to DEALER is not used), upon which it
  closes the link.

| link | event | what follows |
| --- | --- | --- |
| connecting | handshake done | open |
| connecting | refused, failed, `CONNECT_S` over | closed, `peer_lost` |
| open | broken, empty message | closed, `peer_lost` |

**Dead, or only away?**  A lost connection says nothing about what the peer's workers still read.  But a
unix socket that refuses connections has nobody left who listens, and an engine listens for as long as it
lives.  So after a loss the socket is tried again, for `PROBE_S` at most, and `peer_lost(…, dead=True)`
follows as soon as it refuses: pages that were promised to the dead are free then.  An address of TCP may be
refused by others than its owner, so there only leases help.

The descriptors of all sockets are in one epoll set, and that is the one descriptor that the loop sleeps on.
Monitors and links are read until they are empty whenever theirs is readable, so no edge is lost; the ROUTER
is looked at before each sleep.
"""

from __future__ import annotations

import errno
import itertools
import logging
import select
import socket
import time
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.engine.handover.callers import Callers
from baton.engine.shell.sockets import Context, Socket, bound_endpoint, listen, set_tcp_options
from baton.ipc.sockets.curve import Doorkeeper, Place, Unprotected, protect
from baton.ipc.sockets.zeromq import has_messages
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.handover import PEER, PeerMessage
from baton.protocol.messages.requests import Target
from baton.protocol.rules.silence import Silence

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""What a link may take to be open."""
PROBE_S = 2.0
"""How long a peer whose link broke is looked at, whether it is dead.  Processes take a moment to die."""
_PROBE_EVERY_S = 0.05
_LINGER_MS = 200
_RECEIVE_HWM = 1000
"""Messages of one peer that are held here unread; beyond that its own queue grows, not ours."""
_TURN_BYTES = 4 << 20
"""Of messages that are taken in one turn; the last one may go beyond."""
_BROKEN = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class PeerEvents(Protocol):
    """What the engine core is told."""

    def on_peer(self, peer: str, message: PeerMessage, now: float) -> None: ...

    def peer_lost(self, peer: str, now: float, *, dead: bool = False) -> None: ...

    def refused(self, where: str, count: int) -> None: ...

    def violation(self, sender: str, what: str) -> None: ...


@dataclass(eq=False)
class _Link:
    peer: str
    endpoint: str
    socket: Socket
    monitor: Socket
    connecting: Silence | None
    """None: it is open."""

    def descriptors(self) -> tuple[int, int]:
        return self.socket.fileno(), self.monitor.fileno()


@dataclass
class _Suspect:
    """A peer on this host whose link was lost: is it dead?"""

    path: str
    next_look: float
    give_up: float


class Peers:
    """Listens on `endpoint` from the moment it is made.  Raises `OSError` if that is impossible.

    `secret`: the engine's (`protocol/rules/passes.py`).  `door`: of connections of TCP, in both
    directions; its owner calls it."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        incarnation: str,
        max_bytes: int,
        secret: bytes = b"",
        *,
        door: Doorkeeper | None = None,
    ) -> None:
        self._context = context
        self._encryption = None if door is None else door.encryption
        self._callers = Callers(incarnation, secret)
        self._strangers = 0
        """Messages on connections of strangers."""
        self._max_bytes = max_bytes
        self._router = listen(context, endpoint, max_bytes, _RECEIVE_HWM, door=door)
        self.endpoint = bound_endpoint(self._router, door)
        self._numbers = itertools.count(1)
        self._links: dict[str, _Link] = {}
        self._by_fd: dict[int, _Link] = {}
        self._suspects: dict[str, _Suspect] = {}
        self._lost: dict[str, str] = {}
        """Peers whose link broke, and of which the core was not told yet, with their endpoints."""
        self._epoll = select.epoll()
        self._epoll.register(self._router.fileno(), select.EPOLLIN)

    # -- what the loop needs

    def fileno(self) -> int:
        """Readable when `turn` has something to do; ask `busy` before sleeping on it."""
        return self._epoll.fileno()

    def busy(self) -> bool:
        """`turn` has something to do though the descriptor may not say so."""
        return bool(self._lost) or has_messages(self._router)

    def next_deadline(self) -> float | None:
        times = [link.connecting.deadline for link in self._links.values() if link.connecting is not None]
        times += [suspect.next_look for suspect in self._suspects.values()]
        return min(times, default=None)

    def turn(self, events: PeerEvents, now: float, limit: int) -> None:
        """Takes at most `limit` messages, and everything that is known of connections."""
        for fd, _ in self._epoll.poll(0) if self._links else ():
            link = self._by_fd.get(fd)
            if link is not None:
                self._look_at(link)
        self._receive(events, limit)  # before its sender is said to be lost
        for link in list(self._links.values()):
            if link.connecting is not None and link.connecting.look(now):
                self._break(link, f"no connection within {CONNECT_S:g} s")
        lost, self._lost = self._lost, {}
        for peer, endpoint in lost.items():
            self._tell_lost(events, peer, endpoint, now)
        if self._suspects:
            self._look_at_suspects(events, now)

    def send(self, to: Target, message: PeerMessage, now: float) -> bool:
        """False: there is no way to this peer; `peer_lost` is the caller's to call.

        While a loss is not told yet, what the core sends to that peer is dropped: it will be void.
        """
        data = PEER.encode(message)
        if len(data) > self._max_bytes:
            log.error("a message for peer %s has %d bytes, more than engines read", to.incarnation, len(data))
            return False
        self._callers.know(to.incarnation, to.key)
        if to.incarnation in self._lost:
            return True
        link = self._links.get(to.incarnation) or self._open(to, now)
        if link is None:
            return False
        if to.incarnation in self._lost:  # refused at once
            return True
        try:
            link.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # it broke since we looked last: there is no queue left
            self._look_at(link)
            if to.incarnation not in self._lost:
                self._break(link, "the connection broke")
            return True
        if has_messages(link.socket):  # sending may have consumed the edge
            self._look_at(link)
        return True

    def close(self) -> None:
        """Closes all links; each has `_LINGER_MS` for its last messages."""
        for link in list(self._links.values()):
            self._close(link, _LINGER_MS)
        self._epoll.close()
        self._router.close(0)

    # -- links

    def _open(self, to: Target, now: float) -> _Link | None:
        """SNDHWM 0: what can be under way to a peer is bounded by the hand-overs with it, which end with
        their leases; dropping a message would be worse than keeping it."""
        dealer = self._context.socket(zmq.DEALER)
        routing_id = self._callers.introduce(to.incarnation, to.key, next(self._numbers))
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        set_tcp_options(dealer, to.endpoint)
        monitor = dealer.get_monitor_socket(_BROKEN | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        link = _Link(
            to.incarnation, Place.parse(to.endpoint).address, dealer, monitor, Silence(CONNECT_S, now)
        )
        try:
            dealer.connect(protect(dealer, to.endpoint, self._encryption))
        except (zmq.ZMQError, Unprotected) as error:
            why = error.strerror if isinstance(error, zmq.ZMQError) else error
            log.warning("peer %s: cannot connect to %s: %s", to.incarnation, link.endpoint, why)
            _close_sockets(link, 0)
            return None
        self._links[to.incarnation] = link
        for fd in link.descriptors():
            self._by_fd[fd] = link
            self._epoll.register(fd, select.EPOLLIN)
        self._look_at(link)  # descriptors are silent until somebody has looked once
        return link

    def _look_at(self, link: _Link) -> None:
        """Reads its monitor until it is empty; then whether the other side wants it closed."""
        reason = ""
        while has_messages(link.monitor):
            event = recv_monitor_message(link.monitor, zmq.NOBLOCK)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.connecting = None
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                reason = "it refuses this engine: it has another --cluster-secret"
            elif reason:
                pass  # what follows a refusal says less
            else:
                reason = "the connection could not be made" if link.connecting else "the connection broke"
        if has_messages(link.socket):
            reason = "it does not read us any more (its log says why)"
        if reason and self._links.get(link.peer) is link:
            self._break(link, reason)

    def _break(self, link: _Link, reason: str) -> None:
        log.info("peer %s at %s: %s", link.peer, link.endpoint, reason)
        self._close(link, 0)
        self._lost[link.peer] = link.endpoint

    def _close(self, link: _Link, linger_ms: int) -> None:
        del self._links[link.peer]
        for fd in link.descriptors():
            self._epoll.unregister(fd)
            del self._by_fd[fd]
        _close_sockets(link, linger_ms)

    # -- messages

    def _receive(self, events: PeerEvents, limit: int) -> None:
        taken = 0
        for _ in range(limit):
            if taken >= _TURN_BYTES or not has_messages(self._router):
                return
            try:
                first = self._router.recv(zmq.NOBLOCK, copy=False)
                identity, frames = first.bytes, self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            taken += sum(map(len, frames))
            now = time.monotonic()  # not before it was received: a lease that it renews counts from here
            heard = self._callers.hear(identity)
            if heard.refusal:
                self._close_theirs(identity)
                if heard.stranger:
                    self._strangers += 1
                    events.refused("peer", self._strangers)
                    sender = f"peer {identity[:80]!r} at {_address(first)}"
                    events.violation(sender, f"{heard.refusal}; it is not read")
            if not heard.peer:
                continue
            if heard.reconnected:
                log.info("peer %s has connected again", heard.peer)
                events.peer_lost(heard.peer, now)
            try:
                if len(frames) != 1:
                    raise MalformedMessage(f"{len(frames)} frames where one was expected")
                message = PEER.decode(frames[0])
            except MalformedMessage as error:
                self._callers.refuse(identity, str(error))
                self._close_theirs(identity)
                events.violation(f"peer {heard.peer}", f"{error}; nothing more is read on this connection")
                events.peer_lost(heard.peer, now)
                continue
            events.on_peer(heard.peer, message, now)

    def _close_theirs(self, identity: bytes) -> None:
        """Asks the sender to close this connection: a ROUTER cannot do so itself."""
        try:
            self._router.send_multipart((identity, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise  # otherwise it is gone already

    # -- losses

    def _tell_lost(self, events: PeerEvents, peer: str, endpoint: str, now: float) -> None:
        path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else ""
        dead = bool(path) and _nobody_listens(path)
        if path and not dead:
            self._suspects[peer] = _Suspect(path, now + _PROBE_EVERY_S, now + PROBE_S)
        events.peer_lost(peer, now, dead=dead)

    def _look_at_suspects(self, events: PeerEvents, now: float) -> None:
        for peer, suspect in list(self._suspects.items()):
            if now < suspect.next_look:
                continue
            suspect.next_look = now + _PROBE_EVERY_S
            if _nobody_listens(suspect.path):
                del self._suspects[peer]
                events.peer_lost(peer, now, dead=True)
            elif now >= suspect.give_up:
                del self._suspects[peer]


def _address(frame: zmq.Frame) -> str:
    """Where it came from."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "a local socket"


def _close_sockets(link: _Link, linger_ms: int) -> None:
    link.socket.disable_monitor()
    link.monitor.close(0)
    link.socket.close(linger_ms)


def _nobody_listens(path: str) -> bool:
    """Whether a connection to this unix socket is refused, which only the kernel can do."""
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(address) in (errno.ECONNREFUSED, errno.ENOENT)
