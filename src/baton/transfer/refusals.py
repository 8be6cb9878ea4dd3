"""What a page server refuses, and to whom: in the log, and to the engine, which counts it.

A first refusal is reported at once; those of the next second are reported together, so that a flood of them
is a message a second.  (The log is limited where it is written, `observe/logs.py`.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from baton.protocol.messages.reports import StrangersRefused
from baton.transfer.tasks import TaskGenerator, Tasks, Wait

log = logging.getLogger(__name__)

_TOGETHER_S = 1.0


class Refusals:
    """Those of one rank.  Used by one thread; `report` is called by it."""

    def __init__(self, rank: int, tasks: Tasks, report: Callable[[StrangersRefused], None]) -> None:
        self._rank = rank
        self._tasks = tasks
        self._report = report
        self._strangers = self._grants = 0
        self._telling = False

    def stranger(self, address: str, why: str) -> None:
        """A connection from there is closed."""
        log.warning("pages: a connection from %s is refused: %s", address, why)
        self._strangers += 1
        self._begin()

    def grant(self, address: str, why: str) -> None:
        """A question from there is answered with this."""
        log.warning("pages: a question from %s is refused: %s", address, why)
        self._grants += 1
        self._begin()

    def _begin(self) -> None:
        if not self._telling:
            self._telling = True
            self._tasks.start(self._tell(), self._told)

    def _tell(self) -> TaskGenerator:
        while self._strangers or self._grants:
            self._report(StrangersRefused(self._rank, self._strangers, self._grants))
            self._strangers = self._grants = 0
            yield Wait(-1, 0, _TOGETHER_S)

    def _told(self, _result: Any, error: Exception | None) -> None:
        self._telling = False
        if error is not None:
            raise error
