"""From a thread to the event loop of another one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

log = logging.getLogger(__name__)


class Hop:
    """Calls functions on an event loop, from any thread and in order.

    All that are due are called by one entry in the loop's queue: the wake-up of a loop is a system call, and
    a step of the engine brings tokens of many requests.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`around`: they are called within this."""
        self.loop = loop
        self._around = around
        self._lock = threading.Lock()
        self._due: list[Callable[[], object]] = []

    def __call__(self, function: Callable[[], object]) -> bool:
        """False: the loop is closed, and the function is not called."""
        with self._lock:
            self._due.append(function)
            if len(self._due) > 1:
                return True
        try:
            self.loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            with self._lock:
                self._due = []
            return False
        return True

    def _run(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        with self._around():
            for function in due:
                try:
                    function()
                except Exception:  # (a defect: it must not cost the others their turn)
                    log.exception("what another thread wanted done failed")
