"""The connection to one helper: a job goes out, its answer comes back.  Belongs to one event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from baton.gateway.errors import InternalError
from baton.gateway.helpers.wire import ANSWER, ENDS, HELLO, JOB
from baton.gateway.reading.jobs import JOBS, Job

WALL_S = 60.0
"""More than a helper's CPU time takes on a busy machine."""


class HelperLost(Exception):
    """The helper died with a job in its hands."""


class HelperLink(asyncio.Protocol):
    """The connection to one helper."""

    def __init__(self, on_slow: Callable[[HelperLink], None], on_lost: Callable[[HelperLink], None]) -> None:
        """`on_slow`: the job takes longer than `ask` was told.  `on_lost`: the helper died, or was ended."""
        self._on_slow, self._on_lost = on_slow, on_lost
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._process: int | None = None
        """A descriptor of the helper's process, once it has said who it is."""
        self._data = bytearray()
        self._known = False
        self._size = -1
        """Of the answer, its head included; -1 while that has not come."""
        self.usable = True
        self.slow = False
        self._slow_s = 0.0
        self._slow_timer: asyncio.TimerHandle | None = None

    async def ask(self, job: Job, body: Sequence[bytes], size: int, slow_s: float) -> bytes:
        """`size`: bytes of the body's pieces.  Raises `HelperLost`, `InternalError` if nothing comes, or what
        `fail` was given.  `on_slow` is called if the job takes longer than `slow_s` from when the helper
        runs."""
        if not self.usable or self._transport is None:
            raise HelperLost("it had died before")
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        timer = loop.call_later(WALL_S, self._overdue)
        self._slow_s = slow_s
        if self._known:
            self._watch()
        try:
            self._transport.writelines((JOB.pack(JOBS.index(job), size), *body))
            return await self._answer
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None
            timer.cancel()
            if self._slow_timer is not None:
                self._slow_timer.cancel()
                self._slow_timer = None

    def fail(self, error: Exception) -> None:
        """The job ends with this error."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    def close(self) -> None:
        """Ends the helper, whatever it does."""
        self.usable = False
        if self._process is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)
            self._process = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._known:
            if len(self._data) < HELLO.size:
                return
            (pid,) = HELLO.unpack_from(self._data)
            del self._data[: HELLO.size]
            self._known = True
            if self._answer is not None:
                self._watch()
            with suppress(ProcessLookupError):
                self._process = os.pidfd_open(pid)
        if self._size < 0:
            if len(self._data) < ANSWER.size:
                return
            ends, size = ANSWER.unpack_from(self._data)
            self._size = ANSWER.size + size
            if ends == ENDS:
                self.usable = False
        if len(self._data) >= self._size:
            found, self._data, self._size = bytes(self._data[ANSWER.size :]), bytearray(), -1
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(found)

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(HelperLost(str(error or "it ended without an answer")))
        self._on_lost(self)
        self.close()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._slow_timer = loop.call_later(self._slow_s, self._on_slow, self)

    def _overdue(self) -> None:
        self.fail(InternalError(f"reading this request took more than {WALL_S:g} s", code="helper_overdue"))
