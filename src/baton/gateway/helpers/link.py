"""The connection to one helper: a job goes out, its answer comes back.  Belongs to one event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

from baton.gateway.errors import InternalError, Overloaded
from baton.gateway.helpers.wire import ANSWER, ENDS, HELLO, JOB
from baton.gateway.reading.jobs import JOBS, Job

WALL_S = 60.0
"""More than a helper's CPU time takes on a busy machine."""
STARVES_S, STARVING = 1.0, 0.5
"""A job starves that has had less than this part of a core for so long."""


class HelperLost(Exception):
    """The helper died with a job in its hands."""


class Starved(Exception):
    """The job is to be done again by a helper that has a share of the machine."""


class HelperLink(asyncio.Protocol):
    """The connection to one helper."""

    def __init__(
        self,
        on_slow: Callable[[HelperLink], None],
        on_lost: Callable[[HelperLink], None],
        on_starving: Callable[[HelperLink], None],
    ) -> None:
        """`on_slow`: the job takes longer than `ask` was told.  `on_lost`: the helper died, or was ended.
        `on_starving`, once a job: the machine is too busy for it."""
        self._on_slow, self._on_lost, self._on_starving = on_slow, on_lost, on_starving
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._process: int | None = None
        """A descriptor of the helper's process, once it has said who it is."""
        self._pid = 0
        self._data = bytearray()
        self._known = False
        self._size = -1
        """Of the answer, its head included; -1 while that has not come."""
        self.usable = True
        self.slow = False
        self.starving = False
        self.chosen = False
        """Its job was given up for another helper (`Starved`)."""
        self._slow_s = 0.0
        self._cpu_s = 0.0
        """The CPU time that the helper had used when it was last looked at."""
        self._timers: list[asyncio.TimerHandle] = []

    async def ask(self, job: Job, body: Sequence[bytes], size: int, slow_s: float) -> bytes:
        """`size`: bytes of the body's pieces.  Raises `HelperLost`, `InternalError` if nothing comes,
        `Overloaded` if that is because the machine is too busy, or what `fail` was given.  `on_slow` is
        called if the job takes longer than `slow_s` from when the helper runs."""
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
            for one in self._timers:
                one.cancel()
            self._timers.clear()
            self.starving = False

    def fail(self, error: Exception) -> bool:
        """The job ends with this error.  False: there is none."""
        if self._answer is None or self._answer.done():
            return False
        self._answer.set_exception(error)
        return True

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
            self._pid = pid
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
        self._cpu_s = cpu_s(self._pid)
        self._timers = [
            loop.call_later(self._slow_s, self._on_slow, self),
            loop.call_later(STARVES_S, self._look),
        ]

    def _look(self) -> None:
        """Whether the job gets on."""
        before, self._cpu_s = self._cpu_s, cpu_s(self._pid)
        if self._cpu_s - before < STARVES_S * STARVING:
            self.starving = True
            self._on_starving(self)
        else:
            self._timers[1] = asyncio.get_running_loop().call_later(STARVES_S, self._look)

    def _overdue(self) -> None:
        took = f"reading this request took more than {WALL_S:g} s"
        if self.starving:
            self.fail(Overloaded(f"{took} on a busy machine; try again", code="reading", retry_after_s=1))
        else:
            self.fail(InternalError(took, code="helper_overdue"))


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that this process has used; 0 if it is gone."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # (its clock's number: clock_getcpuclockid(3))
    except OSError:
        return 0.0
