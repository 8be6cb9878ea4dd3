"""Timeouts for answers of other processes, which a stall of the gateway's own event loop does not trigger.

`asyncio.timeout` expires when its timer runs, and after a callback that took long the event loop runs timers
before it reads sockets: the answer may already be there.  These waits notice that they look late, and then
wait on (`protocol/rules/silence.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

from baton.protocol.rules.silence import Silence

T = TypeVar("T")


async def any_within(futures: Iterable[asyncio.Future[Any]], patience_s: float) -> bool:
    """Returns when one of them is done (true), or after `patience_s` in which the loop was awake (false).
    Cancels nothing."""
    waited = tuple(futures)
    loop = asyncio.get_running_loop()
    silence = Silence(patience_s, loop.time())
    while True:
        left = max(0.0, silence.deadline - loop.time())
        done, _ = await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if done:
            return True
        if silence.look(loop.time()):
            return False


async def within(future: asyncio.Future[T], patience_s: float) -> T:
    """The result of a future.  Raises `TimeoutError` after `patience_s` in which the loop was awake."""
    if not await any_within((future,), patience_s):
        raise TimeoutError
    return future.result()
