"""What another process's clock shows: bounds from messages that go anyway.

Theory.  Two processes on one machine read the same monotonic clock; on two machines the clocks begin
anywhere, and run nearly equally fast.  Let the offset be theirs minus ours.  A message that we sent at `s` on
our clock and they read at `r` on theirs was not read before it was sent: offset ≤ r − s.  One that they wrote
at `w` and we read at `h` says: offset ≥ w − h.  So each message bounds the offset from one side, the best of
each side is kept, and half of what lies between is the error, known and not guessed.  Old bounds get worse
with `DRIFT`, so newer ones take their place; an older message of which one learns late must be better by as
much.  Requests and answers, and the questions of heartbeats, are such messages.
"""

from __future__ import annotations

DRIFT = 2e-4
"""By so much, at most, two clocks run differently fast."""


class Alignment:
    """With one incarnation of one other process."""

    __slots__ = ("_lower", "_lower_at", "_upper", "_upper_at", "shared")

    def __init__(self) -> None:
        self.shared = False
        """It is a process of this machine: its clock is ours."""
        self._lower: float | None = None
        self._lower_at = 0.0
        self._upper: float | None = None
        self._upper_at = 0.0

    def sent(self, at: float, read_at: float) -> None:
        """We sent something at `at`, on our clock, and they read it at `read_at`, on theirs."""
        bound = read_at - at
        if self._upper is None or bound <= self._upper + DRIFT * (at - self._upper_at):
            self._upper, self._upper_at = bound, at

    def heard(self, written_at: float, at: float) -> None:
        """They wrote something at `written_at`, on their clock, and we read it at `at`, on ours."""
        bound = written_at - at
        if self._lower is None or bound >= self._lower - DRIFT * (at - self._lower_at):
            self._lower, self._lower_at = bound, at

    def offset(self, at: float) -> tuple[float, float | None]:
        """(their clock minus ours at our time `at`, by how much that can be wrong), in seconds.  The second
        is None while one side is not known: then messages of the other side are taken to need no time."""
        if self.shared:
            return 0.0, 0.0
        lower = None if self._lower is None else self._lower - DRIFT * abs(at - self._lower_at)
        upper = None if self._upper is None else self._upper + DRIFT * abs(at - self._upper_at)
        if lower is None or upper is None:
            known = self._lower if self._upper is None else self._upper
            return (0.0 if known is None else known), None
        return (lower + upper) / 2, max((upper - lower) / 2, 0.0)


class Moment:
    """Another process's clock about `at`, on ours: what was known of it then, or is by now, if that is more.

    What is learnt soon after a moment says more of it, and what is learnt an hour later less, as the clocks
    have drifted apart since."""

    __slots__ = ("_clock", "_error", "_offset", "at")

    def __init__(self, clock: Alignment, at: float) -> None:
        self.at = at
        self._clock = clock
        self._offset, self._error = clock.offset(at)

    def offset(self) -> tuple[float, float | None]:
        """As `Alignment.offset`."""
        if self._error != 0.0:
            offset, error = self._clock.offset(self.at)
            if error is not None and (self._error is None or error < self._error):
                self._offset, self._error = offset, error
        return self._offset, self._error
