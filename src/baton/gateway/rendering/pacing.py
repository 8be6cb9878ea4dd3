"""Which signs of a silence are events, where clients count events: the first few, and then one a minute.

Claude Code 2.1 takes a `ping` for a sign of life thirty times in one silence, and gives a stream up 300 s
after the thirtieth; one every ten seconds lasts for 600 s, one a minute for half an hour.  The signs between
are comments, which keep proxies and the clients waiting that count bytes.
"""

from __future__ import annotations

COMMENT = b": keep-alive\n\n"
"""Of server-sent events."""
_FIRST = 5
"""So many come as they are due: who watches a silence begin sees that the server is there."""
_THEN_S = 60.0
_SLACK_S = 6.0
"""Signs come within a tenth of their interval."""


class Pace:
    """Of one stream."""

    __slots__ = ("_first", "_last_s")

    def __init__(self, first: int = _FIRST) -> None:
        self._first = first
        self._last_s = 0.0
        """How long the silence was at the last event."""

    def is_due(self, silent_s: float) -> bool:
        """Whether the sign that is written after so many seconds of silence is an event."""
        if silent_s < self._last_s:  # (something came in between)
            self._last_s = 0.0
        if not self._first and silent_s - self._last_s < _THEN_S - _SLACK_S:
            return False
        self._first = max(0, self._first - 1)
        self._last_s = silent_s
        return True
