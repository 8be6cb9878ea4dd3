"""The gateway's side of its helpers.  Belongs to one event loop.

Short bodies and long ones have helpers of their own (`_Lane`), so that a conversation of a line does not
wait behind a body of megabytes.  A helper has one job at a time; jobs beyond wait, in order, a bounded number
for a bounded time.  Helpers are forked when they are needed, and one is kept warm.

A job that is not done soon is *slow*: its helper leaves the lane, so that others find a place, and ends after
the job.  There are only so many slow ones; one more is refused, and its helper killed.

Helpers give way to everything else (`child.py`), and a machine may leave them nothing.  A job that *starves*
is given up, and done again by the one helper that has a share of the machine; others that starve go on as
they can meanwhile, and it takes them in order.

| what happens | what becomes of the job |
| --- | --- |
| the helper answers | that is the answer |
| it dies before that | the job is given to another one, once; then it fails |
| it starves | the job is given to the one that has a share, when that is free |
| nothing comes for `link.WALL_S`, or the request goes away | it fails, and the helper is killed |
| the parent of the helpers has died | another one is started |
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

import msgspec

from baton.gateway.errors import InstanceUnavailable, InternalError, Overloaded
from baton.gateway.helpers.link import WALL_S, HelperLink, HelperLost, Starved
from baton.gateway.helpers.wire import PATIENT, PROMPT, SHARING
from baton.gateway.reading.jobs import Job
from baton.gateway.reading.settings import Settings

log = logging.getLogger(__name__)

LONG_BODY = 64 << 10
"""Bytes from which a body goes to the lane of long ones; shorter ones are read in about a millisecond."""
_SHORT_HELPERS, _SHORT_SLOW, _SHORT_S = 4, 4, 0.25
_LONG_HELPERS, _LONG_SLOW, _LONG_S = 2, 2, 2.0
"""Of each lane: jobs at a time, slow ones beside, and the seconds after which a job is slow."""
_MAX_WAITING = 1024
"""Jobs of a lane that may wait for a helper ..."""
_WAIT_S = 20.0
"""... and how long."""
_IDLE_S = 30.0
"""A helper that nobody needs so long goes, but for one of the short lane."""
_TRIES = 2

LOST = "helper_lost"
"""The code of an error: no helper survived the job."""


class Helpers:
    """Reads bodies in other processes.  `start` in advance, or the first job does."""

    def __init__(self, settings: Settings) -> None:
        self._settings = msgspec.msgpack.encode(settings)
        self._gives_way = settings.nice > 0
        self._parent: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._short = _Lane(self, PROMPT, _SHORT_HELPERS, _SHORT_SLOW, _SHORT_S, keeps=1)
        self._long = _Lane(self, PATIENT, _LONG_HELPERS, _LONG_SLOW, _LONG_S, keeps=0)
        self._sharing = _Lane(self, SHARING, 1, 0, 2 * WALL_S, keeps=0)
        self._starving: deque[HelperLink] = deque()
        self._shared = False
        """The helper that has a share has a job."""
        self._closed = False
        self.num_jobs = 0
        """Jobs that a helper has answered."""
        self.num_lost = 0
        """Helpers that died with a job in their hands."""
        self.num_refused = 0
        """Jobs for which no helper was free in time."""
        self.num_starved = 0
        """Jobs that were done again."""

    @property
    def num_waiting(self) -> int:
        """Jobs that wait for a helper."""
        return self._short.num_waiting + self._long.num_waiting

    async def answer(self, job: Job, *body: bytes) -> bytes:
        """What `Reader.answer` says in a helper, of a body in pieces.  Raises `Overloaded` if too much waits,
        `InternalError` if no helper survives it."""
        size = sum(map(len, body))
        lane = self._long if size >= LONG_BODY else self._short
        for _ in range(_TRIES):
            try:
                found = await lane.answer(job, body, size)
            except Overloaded:
                self.num_refused += 1
                raise
            except HelperLost as error:
                if self._closed:
                    raise _closed() from None
                self.num_lost += 1
                log.warning("a helper died while it read a body of %d bytes: %s", size, error)
                continue
            self.num_jobs += 1
            return found
        raise InternalError(
            "the process that reads this request died, twice; the server's log may say more",
            code=LOST,
        )

    def start(self) -> None:
        """Starts the parent of the helpers, if there is none.  Jobs wait until it has imported what
        helpers need."""
        if self._closed:
            raise _closed()
        if self._parent is not None:
            if self._parent.poll() is None:
                return
            log.warning("the parent of the helpers has died; starting another one")
            self._end()
        ours, theirs = socket.socketpair()
        settings = os.memfd_create("baton-helpers")
        try:
            os.write(settings, self._settings)
            os.lseek(settings, 0, os.SEEK_SET)
            arguments = [str(theirs.fileno()), str(settings), str(os.getpid())]
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "baton.gateway.helpers.main", *arguments],
                pass_fds=(theirs.fileno(), settings),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},  # (its threads are lost in a fork)
            )
        finally:
            theirs.close()
            os.close(settings)
        ours.setblocking(False)
        self._control = ours

    async def fork(self, lane: _Lane) -> HelperLink:
        """A new helper."""
        self.start()
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            try:
                self._send(lane.kind, theirs)
            except OSError:  # it has died just now
                if self._parent is not None:
                    self._parent.kill()
                    self._parent.wait()
                self.start()
                self._send(lane.kind, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(
            lambda: HelperLink(lane.is_slow, lane.lost, lane.starves), sock=ours
        )
        return link

    def starves(self, link: HelperLink) -> None:
        """Its job may be done again."""
        if self._gives_way:
            self._starving.append(link)
            self._share()

    async def share(self, job: Job, body: Sequence[bytes], size: int) -> bytes:
        """The answer of the helper that has a share, for a link that is `chosen`."""
        return await self._sharing.answer(job, body, size)

    def end_share(self) -> None:
        """The job that was done again has ended."""
        self._shared = False
        self._share()

    def _share(self) -> None:
        while self._starving and not self._shared:
            link = self._starving.popleft()
            if link.starving and link.fail(Starved()):
                self._shared = link.chosen = True
                self.num_starved += 1

    def _send(self, kind: bytes, connection: socket.socket) -> None:
        assert self._control is not None
        socket.send_fds(self._control, [kind], [connection.fileno()])

    def close(self) -> None:
        """Ends all helpers; what waits fails."""
        self._closed = True
        self._short.close()
        self._long.close()
        self._sharing.close()
        self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._parent is not None:
            self._parent.kill()  # (its children die with it)
            self._parent.wait()
            self._parent = None


class _Lane:
    """Helpers for bodies of one size: at most `most`, of which `keeps` stay when there is nothing to do, and
    `most_slow` that have worked on a job for longer than `slow_s`."""

    def __init__(
        self, owner: Helpers, kind: bytes, most: int, most_slow: int, slow_s: float, *, keeps: int
    ) -> None:
        self._owner = owner
        self.kind = kind
        """Of its helpers, as the parent of them is asked for one."""
        self._most = most
        self._most_slow = most_slow
        self._slow_s = slow_s
        self._keeps = keeps
        self._idle: list[HelperLink] = []
        self._count = 0
        """Helpers that there are or will be in a moment, but for slow ones."""
        self._slow = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._used = 0
        """The most helpers at work since the timer was set."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def answer(self, job: Job, body: Sequence[bytes], size: int) -> bytes:
        """Raises `Overloaded`, `HelperLost`, `InternalError`."""
        link = await self._take()
        try:
            try:
                return await link.ask(job, body, size, self._slow_s)
            finally:
                self._give(link)
        except Starved:
            return await self._owner.share(job, body, size)
        finally:
            if link.chosen:
                self._owner.end_share()

    def starves(self, link: HelperLink) -> None:
        """Its job gets next to nothing of the machine."""
        if self.kind != SHARING:
            self._owner.starves(link)

    def is_slow(self, link: HelperLink) -> None:
        """Its job takes long."""
        if self._slow >= self._most_slow:
            link.fail(_busy())
            return
        link.slow = True
        self._slow += 1
        self._count -= 1
        self._next()

    async def _take(self) -> HelperLink:
        """A helper without a job.  Raises `Overloaded`."""
        if self._waiting or not self._has_room():
            if len(self._waiting) >= _MAX_WAITING:
                raise _busy()
            try:
                async with asyncio.timeout(_WAIT_S):
                    await self._turn()
            except TimeoutError:
                raise _busy() from None
        return await self._free()

    async def _turn(self) -> None:
        """Waits until there is room, and all that came before have had theirs."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        while True:
            try:
                await turn
            except BaseException:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._next()  # another job may have this place
                raise
            if self._has_room():
                return
            turn = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(turn)

    def _has_room(self) -> bool:
        return bool(self._idle) or self._count < self._most

    async def _free(self) -> HelperLink:
        if self._idle:
            link = self._idle.pop()
        else:
            self._count += 1
            try:
                link = await self._owner.fork(self)
            except BaseException:
                self._count -= 1
                self._next()
                raise
        self._used = max(self._used, self._count - len(self._idle))
        return link

    def _give(self, link: HelperLink) -> None:
        """Back after its job, whatever became of that."""
        if link.slow:
            link.close()
            self._slow -= 1
        elif link.usable:
            self._idle.append(link)
            if self._timer is None and len(self._idle) > self._keeps:
                self._used = self._count - len(self._idle)
                self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self._prune)
        else:
            link.close()
            self._count -= 1
        self._next()

    def lost(self, link: HelperLink) -> None:
        """An idle helper has died."""
        if link in self._idle:
            self._idle.remove(link)
            self._count -= 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for link in self._idle:
            link.close()
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(_closed())
        self._waiting.clear()

    def _next(self) -> None:
        """The first of those who wait may have another look."""
        while self._waiting and self._has_room():
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _prune(self) -> None:
        """Lets go what was not needed since the last time."""
        self._timer = None
        while self._idle and self._count > max(self._keeps, self._used):
            self._idle.pop(0).close()
            self._count -= 1
        if self._idle and self._count > self._keeps:
            self._used = self._count - len(self._idle)
            self._timer = asyncio.get_running_loop().call_later(_IDLE_S, self._prune)


def _closed() -> InstanceUnavailable:
    return InstanceUnavailable("the server shuts down", code="shutting_down")


def _busy() -> Overloaded:
    return Overloaded(
        "too many long or costly requests are being read; try again", code="reading", retry_after_s=1
    )


__all__ = ["LONG_BODY", "Helpers"]
