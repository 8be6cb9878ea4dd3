"""The connection of a gateway to one instance: a socket, and what to do when it breaks.

`Cluster` decides what happens to requests; this file connects, and passes on what arrives.  The supervisor
(or `join`, for an instance that registers itself) calls `attach` after each start, `lost` when the process
died, and `failed` when it will not be started again.  When the connection breaks and the supervisor has not
said that the process died, the client waits `_BROKEN_GRACE_S` for it to say so; then it counts
as a loss, as nothing that was in flight will be answered, and the client connects again by itself.

A message of the engine that cannot be understood is logged and dropped.  Requests would miss tokens without
notice, so the connection it came over counts as lost, and the client connects again a little later.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.member import Answer, Member, State
from baton.gateway.errors import ApiError, InstanceUnavailable
from baton.gateway.instances.channel import EngineChannel
from baton.gateway.instances.patience import within
from baton.ipc.sockets.curve import Encryption, Place
from baton.protocol.codec import MalformedMessage
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Hello, QueryKind, ToEngine, Welcome
from baton.protocol.rules.proof import NONCE_BYTES, answer, claim

log = logging.getLogger(__name__)

_CLOSE_LINGER_MS = 200
_BROKEN_GRACE_S = 0.25
"""A broken connection is usually a dead process: the supervisor gets so long to say so, and why."""
_PROVEN_RECONNECT_MS = 2000
"""ZeroMQ's own, where the other end has to prove itself: long enough for the connection to be given up
first."""
_UNREADABLE_GRACE_S = 1.0
"""Before the client connects again to an instance that sent an unreadable message: it may send another."""

HEARTBEAT_S = 2.0
"""Between two questions whether an engine answers."""
SILENT_S = 10.0
"""An engine that does not answer for so long does nothing any more."""


class Owner(Protocol):
    """What a connection needs of the `ClusterClient` that it belongs to."""

    cluster: Cluster
    encryption: Encryption | None
    watches: bool

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]: ...
    @property
    def closed(self) -> bool: ...
    def settle(self) -> None: ...
    async def wait_for(self, condition: Callable[[], bool]) -> None: ...
    def reader_died(self, name: str, error: Exception) -> None: ...


class InstanceClient:
    """One instance of a `ClusterClient`, which makes it."""

    def __init__(self, owner: Owner, member: Member) -> None:
        self.member = member
        self.endpoint = ""
        self.secret = ""
        """Of an instance that joined: it must prove that it knows it before it is used."""
        self._owner = owner
        self._cluster = owner.cluster
        self._channel: EngineChannel | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._incarnation = ""

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def state(self) -> State:
        return self.member.state

    @property
    def failure(self) -> str | None:
        """Why the instance was lost or is failing; None while all is well."""
        return self.member.failure

    @property
    def welcome(self) -> Welcome | None:
        """What the running instance said of itself; None unless the state is `ready`."""
        return self.member.welcome

    @property
    def restarts(self) -> int:
        """How many times the instance became ready again after the first."""
        return self.member.restarts

    @property
    def incarnation(self) -> str:
        """That it was attached to last."""
        return self._incarnation

    @property
    def in_flight(self) -> int:
        """Sequences that are there, or may be handed over to it: as long as there are any, somebody watches
        whether it answers."""
        return self._cluster.table.involving(self.name)

    @property
    def connected(self) -> bool:
        """There is a connection, or there will be one without anybody's doing."""
        return self._channel is not None or self._grace is not None

    # -- what the supervisor calls

    async def attach(self, endpoint: str, incarnation: str) -> Welcome:
        """Connects to a new incarnation and returns when it can serve.

        The caller bounds the wait (by cancelling) and watches the process.  Raises
        `InstanceUnavailable` if `failed` is called meanwhile.
        """
        channel = self.open(endpoint, incarnation)
        try:
            return await self.ready()
        except asyncio.CancelledError:
            if self._channel is channel and self.state != "ready":
                self.close()
            raise

    async def connect(self, endpoint: str, deadline_s: float, incarnation: str = "") -> Welcome:
        """`attach` with a deadline; raises `InstanceUnavailable` when it passes."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self.attach(endpoint, incarnation)
        except TimeoutError:
            raise InstanceUnavailable(f"no answer from {endpoint} within {deadline_s:g} s") from None

    def lost(self, reason: str) -> None:
        """The instance's process is gone.  What was there goes on elsewhere, or waits for the next one."""
        self._cluster.lost(self.name, reason, self._now())
        self._owner.settle()
        self.close()

    def failed(self, reason: str) -> None:
        """The instance will not come back."""
        self._cluster.failed(self.name, reason, self._now())
        self._owner.settle()
        self.close()

    async def ready(self) -> Welcome:
        """Waits until the instance can serve.  Raises `InstanceUnavailable` when it has failed.

        The wait has no deadline of its own: the supervisor gives up on an instance that does not
        become ready, and calls `failed`.
        """
        member = self.member
        await self._owner.wait_for(lambda: member.welcome is not None or member.state == "failed")
        if member.welcome is None:
            raise member.unavailable("the instance")
        return member.welcome

    async def query(self, what: QueryKind, deadline_s: float = 5.0, argument: str = "") -> dict[str, Any]:
        """Asks the instance.  Raises `InstanceUnavailable` without an instance or an answer in time."""
        clock, asked = self.member.clock, time.monotonic()
        reply = await self.answered(
            lambda answer: self._cluster.query(self.name, what, answer, argument), what, deadline_s
        )
        if what == "stats" and isinstance(now := reply.get("now"), float):
            clock.sent(asked, now)
            clock.heard(now, time.monotonic())
        return reply

    async def answered(
        self, ask: Callable[[Answer], int], what: str = "stand", deadline_s: float = 5.0
    ) -> dict[str, Any]:
        """What the instance says to what `ask` asks, which returns the query's number.  Raises as `query`."""
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def settle(answer: dict[str, Any] | ApiError) -> None:
            if reply.done():
                return
            if isinstance(answer, ApiError):
                reply.set_exception(answer)
            else:
                reply.set_result(answer)

        number = ask(settle)
        self._owner.settle()
        try:
            return await within(reply, deadline_s)
        except TimeoutError:
            raise InstanceUnavailable(
                f"{self._cluster.call(self.name)} did not answer the query {what!r} within {deadline_s:g} s",
                code="timeout",
            ) from None
        finally:
            self._cluster.forget(number)

    # -- what the cluster's client calls

    async def watch(self) -> None:
        """Notices an instance that registers again and again, and whose engine does nothing.  For those that
        joined; the others are watched by their supervisors, in the same way."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self.state == "ready" and self.in_flight and await self.silent():
                self.lost(f"its engine has not answered for {SILENT_S:.0f} s")

    async def silent(self) -> bool:
        """Asks for statistics; true if no answer came within `SILENT_S` in which this process was awake."""
        try:
            await self.query("stats", SILENT_S)
        except InstanceUnavailable as error:
            return error.code == "timeout"
        return False

    def open(self, endpoint: str, incarnation: str) -> EngineChannel:
        """Connects, without waiting for anything."""
        self.close()
        channel = EngineChannel(
            self._owner.context,
            endpoint,
            self._receive,
            self._reader_died,
            self._connection_broke,
            reconnect_ms=_PROVEN_RECONNECT_MS if self.secret else None,
            encryption=self._owner.encryption,
        )
        self._channel, self.endpoint, self._incarnation = channel, endpoint, incarnation
        if self.secret:
            between = (self.secret, secrets.token_bytes(NONCE_BYTES), self._cluster.name, incarnation)
            hello = Hello(self._cluster.name, between[1], claim(*between), self._owner.watches)
            self._cluster.attach(self.name, incarnation, self._now(), hello, answer(*between))
        else:
            hello = Hello(self._cluster.name, watches=self._owner.watches)
            self._cluster.attach(self.name, incarnation, self._now(), hello)
        self.member.clock.shared = endpoint.startswith("ipc:")
        self._owner.settle()
        return channel

    def send(self, message: ToEngine) -> None:
        if self._channel is not None:
            self._channel.send(TO_ENGINE.encode(message))

    @property
    def closed(self) -> bool:
        """As of the `ClusterClient`."""
        return self._owner.closed

    def close_if_failing(self) -> None:
        if self.member.failure is not None and self._channel is not None:
            self.close()

    def close(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._channel is not None:
            self._channel.close(0 if self.state == "restarting" else _CLOSE_LINGER_MS)
            self._channel = None

    # -- inside

    def _now(self) -> float:
        return time.monotonic()  # (the loop's own is as old as its turn, and the clock of this)

    def _receive(self, data: bytes) -> None:
        try:
            self._cluster.receive(self.name, FROM_ENGINE.decode(data), self._now())
        except MalformedMessage as error:
            self._unreadable(str(error))
            return
        self._owner.settle()

    def _unreadable(self, error: str) -> None:
        sender = f"instance {self._incarnation or '?'} at {Place.parse(self.endpoint).address}"
        log.error("a message of %s cannot be read: %s; dropped, and the connection with it", sender, error)
        self.lost(f"a message of the instance could not be read: {error}")
        loop = asyncio.get_running_loop()
        self._grace = loop.call_later(_UNREADABLE_GRACE_S, self._connect_again)

    def _connect_again(self) -> None:
        self._grace = None
        self.open(self.endpoint, self._incarnation)

    def _connection_broke(self) -> None:
        if self._grace is None:
            if self.secret:
                self.close()  # ZeroMQ would connect again to any process that listens there, without a proof
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(_BROKEN_GRACE_S, self._reconnect)

    def _reconnect(self) -> None:
        """Nobody said that the process died: the connection is at fault."""
        self._grace = None
        reason = "the connection to the instance broke"
        log.error("%s: %s; connecting again", self.name, reason)
        self._cluster.lost(self.name, reason, self._now())
        self._connect_again()

    def _reader_died(self, error: Exception) -> None:
        self._owner.reader_died(self.name, error)
