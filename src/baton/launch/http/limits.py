"""What a client may take of the server before and while it is served: the table of connections.  The limits
are flags (`options/server.py`).

Theory.  Memory, descriptors and time are given to a connection in stages, and each stage has a limit:

| stage | what the server waits for | limit | then |
| --- | --- | --- | --- |
| head | a request, or the rest of its head | `timeout_head` after it began; bytes; headers | 408, 431 |
| body | more of the body | `timeout_body` without 4 KiB of progress | 408 |
| busy | the answer, which the server itself makes | (as many as `limit_concurrency`) | |
| unread | the client to read what was written | `timeout_write` without 4 KiB of progress | cut |
| idle | the next request | `timeout_keep_alive` | closed |
| lingering | a client that was refused to read why | 2 s | cut |

One sweep a second looks at the stages, so a request costs no timer.  A sweep that comes late closes nothing:
what clients sent meanwhile lies unread in the sockets.

When connections or descriptors run short, a new connection takes the place of one that waits for its client:
first of those whose head is not complete the oldest, then idle ones, then uploads that have stalled, those
that sent a key at the very end.  Connections that are being answered are never closed for others.  So
half-open connections cannot lock anybody out, however many there are.

No I/O, the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from baton.launch.options.server import HttpOptions

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Reason = Literal["head", "body", "idle", "unread", "lingering"]
Closed = Literal[
    "head_timeout", "body_timeout", "idle", "reader_timeout", "too_large", "malformed", "shed", "full"
]

SWEEP_S = 1.0
LATE_S = 1.0
"""A sweep so much later than it should have been judges nobody."""
LINGER_S = 2.0
PROGRESS_BYTES = 4096
STALLED_S, STALLED_WITH_KEY_S = 0.2, 2.0
"""An upload that brought nothing for so long may be closed for others."""


class Client(Protocol):
    """What the table asks of a connection."""

    received: int
    """Bytes of the present body."""

    def paused(self) -> bool:
        """The server itself does not read from it now."""

    def proven(self) -> bool:
        """Its request came with a key."""

    def unsent(self) -> int:
        """Bytes that wait for the client to read."""


C = TypeVar("C", bound=Client)


class _Mark:
    """How far something was when it was looked at last."""

    __slots__ = ("at", "bytes", "data_at")

    def __init__(self, bytes_: int, now: float) -> None:
        self.bytes = bytes_
        self.at = now
        self.data_at = now


class Connections(Generic[C]):
    """The connections of one server, by what they are waited for.  One that is in no stage is busy."""

    def __init__(self, limits: HttpOptions, now: float) -> None:
        self.limits = limits
        self.count = 0
        self.coming = 0
        """Accepted, and not opened yet: each has its place."""
        self.accepted = 0
        self.closed: dict[Closed, int] = {}
        """How many were ended by a limit, by which."""
        self._heads: dict[C, float] = {}  # oldest first, as all of the plain ones below
        self._idle: dict[C, float] = {}
        self._lingering: dict[C, float] = {}
        self._bodies: dict[C, _Mark] = {}  # by their last data
        self._unread: dict[C, _Mark] = {}
        self._swept_at = now

    # -- what connections say

    def comes(self) -> None:
        """A connection was accepted; `opened` or `lost` follows."""
        self.coming += 1

    def lost(self) -> None:
        """It could not be opened."""
        self.coming -= 1

    def opened(self, client: C, now: float) -> None:
        """A connection that came is served from now on, until it is `gone`."""
        self.coming -= 1
        self.count += 1
        self.accepted += 1
        self._heads[client] = now

    def gone(self, client: C) -> None:
        self.count -= 1
        self._leave(client)
        self._unread.pop(client, None)

    def head(self, client: C, now: float) -> None:
        """The first bytes of a request came."""
        self._leave(client)
        self._heads[client] = now

    def body(self, client: C, now: float) -> None:
        """Its body is awaited."""
        self._leave(client)
        self._bodies[client] = _Mark(0, now)

    def more(self, client: C, now: float) -> None:
        """Some of its body came."""
        mark = self._bodies.pop(client, None)
        if mark is not None:
            mark.data_at = now
            self._bodies[client] = mark

    def busy(self, client: C) -> None:
        """It is the server's turn."""
        self._leave(client)

    def idle(self, client: C, now: float) -> None:
        """It was answered."""
        self._leave(client)
        self._idle[client] = now

    def lingers(self, client: C, now: float) -> None:
        """It was told why it is refused, and may read that."""
        self._leave(client)
        self._lingering[client] = now

    def unread(self, client: C, now: float) -> None:
        """There is something that it has not read; beside whatever else it does."""
        if client not in self._unread:
            self._unread[client] = _Mark(client.unsent(), now)

    def read(self, client: C) -> None:
        """It took what was written."""
        self._unread.pop(client, None)

    def note(self, why: Closed) -> None:
        """A connection was ended, or not begun, by a limit."""
        self.closed[why] = self.closed.get(why, 0) + 1

    # -- what follows

    def overdue(self, now: float) -> list[tuple[C, Reason]]:
        """Those that have used up their time.  Call it every `SWEEP_S`."""
        late = now - self._swept_at > SWEEP_S + LATE_S
        self._swept_at = now
        if late:
            return []
        limits = self.limits
        found: list[tuple[C, Reason]] = []
        found += [(one, "head") for one in _older(self._heads, now - limits.timeout_head)]
        found += [(one, "idle") for one in _older(self._idle, now - limits.timeout_keep_alive)]
        found += [(one, "lingering") for one in _older(self._lingering, now - LINGER_S)]
        for client, mark in self._bodies.items():
            if client.paused() or client.received - mark.bytes >= PROGRESS_BYTES:
                mark.at, mark.bytes = now, client.received
            elif now - mark.at >= limits.timeout_body:
                found.append((client, "body"))
        for client, mark in list(self._unread.items()):
            left = client.unsent()
            if not left:
                del self._unread[client]
            elif mark.bytes - left >= PROGRESS_BYTES:
                mark.at, mark.bytes = now, left
            elif now - mark.at >= limits.timeout_write:
                found.append((client, "unread"))
        return found

    def dispensable(self, now: float) -> C | None:
        """The connection that is closed next when there is no room for another one; None: all are needed."""
        for waiting in (self._lingering, self._heads, self._idle):
            if waiting:
                return next(iter(waiting))
        proven = None
        for client, mark in self._bodies.items():
            silent_s = now - mark.data_at
            if silent_s < STALLED_S:
                break
            if not client.proven():
                return client
            if silent_s >= STALLED_WITH_KEY_S:
                proven = proven or client
        return proven

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # (flags do not need it)

        prefix = "baton:http_connections"
        yield GaugeMetricFamily(prefix, "Connections that are open.", value=self.count)
        waiting = GaugeMetricFamily(
            prefix + "_waiting", "Connections that wait for their client, by what for.", labels=["for"]
        )
        for name, stage in (("head", self._heads), ("next", self._idle), ("body", self._bodies)):
            waiting.add_metric([name], len(stage))
        waiting.add_metric(["reader"], len(self._unread))
        yield waiting
        yield CounterMetricFamily(
            prefix + "_accepted", "Connections that were accepted.", value=self.accepted
        )
        limited = CounterMetricFamily(
            prefix + "_limited", "Connections that a limit ended, by which.", labels=["limit"]
        )
        for why, count in self.closed.items():
            limited.add_metric([why], count)
        yield limited

    def _leave(self, client: C) -> None:
        self._heads.pop(client, None)
        self._idle.pop(client, None)
        self._bodies.pop(client, None)
        self._lingering.pop(client, None)


def _older(waiting: dict[C, float], than: float) -> list[C]:
    found = []
    for client, since in waiting.items():
        if since > than:
            break
        found.append(client)
    return found
