"""Signs of life: what is written to clients for whom nothing else comes, so that they do not give up.

One timer serves all streams of a server.  A stream notes when it was last written to; the timer looks at all
streams when the first of them can have been silent for the interval, and no more often than every tenth of
it: what is due within such a tenth is written at once.  So a thousand streams that flow cost one look an
interval, and a server without streams has no timer.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger(__name__)

_SLACK = 0.1
"""Of the interval: so much earlier a sign may be written, to be written with others."""


class Silent(Protocol):
    """A stream that may fall silent."""

    written: float
    """When something was last written, on the event loop's clock."""

    def give_sign(self) -> None:
        """Writes a sign of life.  Must not raise."""


@dataclass(eq=False)
class SignsOfLife:
    """Of one server."""

    interval_s: float = 0.0
    """After such a silence a client gets one; 0: never."""
    early_headers_s: float = 0.0
    """After so long an answer in one piece begins, and white space goes before it; 0: it never does."""
    looks: int = 0
    """How often the timer looked at the streams."""
    _streams: dict[Silent, None] = field(default_factory=dict)
    _timer: asyncio.TimerHandle | None = None

    def watch(self, stream: Silent) -> None:
        """From now on it gets signs of life."""
        if not self.interval_s:
            return
        self._streams[stream] = None
        due = stream.written + self.interval_s
        if self._timer is not None and self._timer.when() > due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._look_at(due)

    def leave(self, stream: Silent) -> None:
        """It gets none any more."""
        self._streams.pop(stream, None)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, when: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        self.looks += 1
        now = asyncio.get_running_loop().time()
        slack = self.interval_s * _SLACK
        silent_since = now + slack - self.interval_s
        for stream in [one for one in self._streams if one.written <= silent_since]:
            stream.written = now
            try:
                stream.give_sign()
            except Exception:  # (a defect: it must not cost the others their signs)
                log.exception("a sign of life could not be written")
        if self._streams:
            first = min(one.written for one in self._streams) + self.interval_s
            self._look_at(max(first, now + slack))


SILENT = SignsOfLife()
"""Gives none."""
