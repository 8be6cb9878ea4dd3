"""Runs a coroutine from a plain function, as far as it goes without waiting.

Theory.  A coroutine that has nothing to wait for ends within its first step, so one that wants its effect
can take that step itself; a task (an object, an entry in the event loop's queue, a turn later) is needed only
for what really waits.  Such a coroutine has by then yielded the future that it waits for; a task that awaits
`Begun` yields the same future to the event loop, and goes on from there.  This is what eager tasks are
(Python 3.12), without a task where nothing waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any


class Begun:
    """Something awaitable that has been begun, and waits.  Await it once, in a task, for the rest of it."""

    __slots__ = ("_steps", "_waits_for")

    def __init__(self, steps: Generator[Any, Any, None], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        future = self._waits_for
        try:
            while True:
                try:
                    value = yield future
                except BaseException as error:  # what it waits for failed, or the task is cancelled
                    future = self._steps.throw(error)
                else:
                    future = self._steps.send(value)
        except StopIteration:
            return


def begin(work: Awaitable[None]) -> Begun | None:
    """Runs it until it ends (None) or waits.  Raises what it raises."""
    steps = work.__await__()
    try:
        future = next(steps)
    except StopIteration:
        return None
    return Begun(steps, future)
