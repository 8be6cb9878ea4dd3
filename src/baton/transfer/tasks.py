"""Many waiting tasks in one thread: a task is a generator that yields what it waits for.

Theory.  A task yields `Wait` (a descriptor to become ready, a time to pass, or whichever is first) or None
(it could go on, but others should have a turn).  It is resumed when its wait is over, with whether the
descriptor became ready; one that yielded None is resumed after the others had theirs.  `cancel` closes a
generator where it stands, so a task stops at its next yield and its `finally` clauses run.  `wake` ends a
wait early: the task is resumed with None.  Nothing here blocks but `run_once`, in `select`.

What a task raises is given to the function that was named with it: a task never ends the others.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Wait(NamedTuple):
    """Until `fd` is ready for `events`, for `seconds` at most; `fd` -1: just so long."""

    fd: int
    events: int
    seconds: float


TaskGenerator = Generator[Wait | None, Any, Any]
OnEnd = Callable[[Any, Exception | None], None]
"""Called with what the task returned, or with the exception that ended it.  Not after `cancel`."""


@dataclass(eq=False, slots=True)
class Task:
    """A generator under way."""

    generator: TaskGenerator
    on_end: OnEnd
    fd: int = -1
    turn: int = 0
    """Which of its waits this is: a deadline of an earlier one means nothing."""
    ready: bool | None = None
    """What it is resumed with."""
    waits: bool = False
    over: bool = False


class Tasks:
    """Runs tasks.  Not thread-safe: everything is called by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._ready: deque[Task] = deque()
        self._deadlines: list[tuple[float, int, int, Task]] = []
        self._order = itertools.count()
        self.alive: set[Task] = set()
        self.current: Task | None = None
        """The one that is having its turn."""

    def start(self, generator: TaskGenerator, on_end: OnEnd) -> Task:
        """Runs it from the next `run_once` on."""
        task = Task(generator, on_end)
        self.alive.add(task)
        self._ready.append(task)
        return task

    def cancel(self, task: Task) -> None:
        """Stops the task where it waits; idempotent.  `on_end` is not called."""
        if task.over:
            return
        self._forget(task)
        task.generator.close()

    def wake(self, task: Task) -> None:
        """Resumes a task that waits.  One that does not wait looks for itself anyway."""
        if task.waits and not task.over:
            self._wake(task, None)

    def run_once(self, timeout_s: float | None) -> None:
        """Gives each task that can run one turn; sleeps for `timeout_s` at most if there is none."""
        self._select(timeout_s)
        for _ in range(len(self._ready)):
            if not self._ready:
                break  # a task that ran has cancelled others
            self._turn(self._ready.popleft())

    def close(self) -> None:
        for task in list(self.alive):
            self.cancel(task)
        self._selector.close()

    def _turn(self, task: Task) -> None:
        if task.over:
            return
        self.current = task
        try:
            wait = task.generator.send(task.ready)
        except StopIteration as end:
            self._forget(task)
            task.on_end(end.value, None)
        except Exception as error:
            self._forget(task)
            task.on_end(None, error)
        else:
            if wait is None:
                task.ready = None
                self._ready.append(task)
            else:
                self._wait(task, wait)
        finally:
            self.current = None

    def _wait(self, task: Task, wait: Wait) -> None:
        task.waits = True
        if wait.fd >= 0:
            self._selector.register(wait.fd, wait.events, task)
            task.fd = wait.fd
        deadline = self._clock() + wait.seconds
        heapq.heappush(self._deadlines, (deadline, next(self._order), task.turn, task))

    def _select(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(self._timeout(timeout_s)):
            self._wake(key.data, True)
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, turn, task = heapq.heappop(self._deadlines)
            if turn == task.turn:
                self._wake(task, False)
        if len(self._deadlines) > 64 + 4 * len(self.alive):
            self._deadlines = [entry for entry in self._deadlines if entry[2] == entry[3].turn]
            heapq.heapify(self._deadlines)

    def _timeout(self, timeout_s: float | None) -> float | None:
        if self._ready:
            return 0.0
        while self._deadlines and (
            self._deadlines[0][3].over or self._deadlines[0][2] != self._deadlines[0][3].turn
        ):
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return timeout_s
        left = max(self._deadlines[0][0] - self._clock(), 0.0)
        return left if timeout_s is None else min(left, timeout_s)

    def _wake(self, task: Task, ready: bool | None) -> None:
        """Its wait is over."""
        self._unregister(task)
        task.waits = False
        task.ready = ready
        task.turn += 1
        self._ready.append(task)

    def _forget(self, task: Task) -> None:
        task.over = True
        task.turn += 1
        self._unregister(task)
        self.alive.discard(task)

    def _unregister(self, task: Task) -> None:
        if task.fd >= 0:
            self._selector.unregister(task.fd)
            task.fd = -1
