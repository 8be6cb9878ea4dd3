"""Bytes of request bodies that are in memory, of all requests together, and how a body is received.

A body counts from its first byte until it has been decoded.  When the bodies of all requests would be more
than the limit, uploads that have stalled lose their place, the most stalled first; if that is not enough, the
request that wants more is answered 503.  So neither many bodies at once nor many half ones cost more than the
limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request

from baton.gateway.errors import ApiError, InstanceUnavailable, TooLarge

DEFAULT_LIMIT_BYTES = 256 << 20
STALLED_S = 1.0
"""An upload that brought nothing for so long may lose its place."""
_DISCARDED_BYTES = 256 << 20
"""Of a body that is too large, so many more are read and thrown away, so that the client reads the answer."""


class Bodies:
    """The bodies of one server."""

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held = 0
        self.refused = 0
        """Requests that found no room."""
        self.evicted = 0
        """Uploads that lost their place."""
        self._growing: dict[Body, None] = {}  # the one that brought nothing for longest first

    def begin(self) -> Body:
        """For one request.  Call `end` on it, whatever happens."""
        return Body(self)

    def collect(self) -> Iterator[Metric]:
        """For Prometheus."""
        prefix = "baton:http_body"
        yield GaugeMetricFamily(prefix + "_bytes", "Bytes of request bodies in memory.", value=self.held)
        yield CounterMetricFamily(
            prefix + "_refused", "Requests for whose body there was no memory.", value=self.refused
        )
        yield CounterMetricFamily(
            prefix + "_evicted", "Stalled uploads that lost their place to others.", value=self.evicted
        )

    def grow(self, body: Body, size: int) -> None:
        """Raises `InstanceUnavailable` if there is no room for so many bytes more."""
        now = asyncio.get_running_loop().time()
        if self.held + size > self.limit_bytes:
            self._make_room(body, size, now)
        self.held += size
        body.size += size
        body.grown_at = now
        self._growing.pop(body, None)
        self._growing[body] = None

    def complete(self, body: Body) -> None:
        """Nothing more comes; it is held still."""
        self._growing.pop(body, None)

    def release(self, body: Body) -> None:
        self.held -= body.size
        body.size = 0
        self._growing.pop(body, None)

    def _make_room(self, wants: Body, size: int, now: float) -> None:
        for body in list(self._growing):
            if self.held + size <= self.limit_bytes or now - body.grown_at < STALLED_S:
                break
            if body is not wants:
                self.release(body)
                self.evicted += 1
                body.evict()
        if self.held + size > self.limit_bytes:
            self.refused += 1
            raise _no_room()


class Body:
    """One request's."""

    __slots__ = ("_all", "_expiry", "grown_at", "size")

    def __init__(self, bodies: Bodies) -> None:
        self._all = bodies
        self._expiry: asyncio.Timeout | None = None
        self.size = 0
        self.grown_at = 0.0

    async def receive(self, request: Request, limit: int) -> list[bytes]:
        """All of it, in the pieces in which it came: to put a long one together takes milliseconds.  Raises
        `TooLarge`, or `InstanceUnavailable` if there is no memory for it."""
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit + _DISCARDED_BYTES:
            raise _too_large(limit)
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(None) as self._expiry:
                async for piece in request.stream():
                    size += len(piece)
                    if not piece:
                        continue
                    if size <= limit:
                        self._all.grow(self, len(piece))
                        pieces.append(piece)
                    elif size > limit + _DISCARDED_BYTES:
                        break
                    elif pieces:
                        pieces.clear()
                        self._all.release(self)
        except TimeoutError:
            raise _no_room() from None
        finally:
            self._expiry = None
        if size > limit:
            raise _too_large(limit)
        self._all.complete(self)
        return pieces

    def end(self) -> None:
        self._all.release(self)

    def evict(self) -> None:
        """Its place was given to another one."""
        if self._expiry is not None:
            self._expiry.reschedule(asyncio.get_running_loop().time())


def _too_large(limit: int) -> ApiError:
    return TooLarge(f"the body is larger than {limit >> 10} KiB, the limit here; send less")


def _no_room() -> ApiError:
    return InstanceUnavailable(
        "the server receives as many bytes of requests as it may (--max-body-memory); try again",
        code="bodies_full",
        retry_after_s=1,
    )
