"""The virtual clock: a heap of timers, each with an owner, and the parties that own them.

Theory.  Nothing in a simulated run happens but the firing of a timer, one after the other, in the order of
(time, number of the timer): so a run is a function of its plan.  A timer belongs to a `Party`.  The timers of
a dead party never fire; those of a stalled one (a stopped process, a frozen network) wait until it goes on,
and keep their order.  Every party has a clock of its own, which runs at its own rate from its own zero.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop as _pop
from heapq import heappush as _push
from typing import Any

Action = Callable[..., None]


class Party:
    """Somebody to whom things happen: a process, a supervisor, the network, a person."""

    __slots__ = ("alive", "clock_offset", "clock_rate", "name", "stalled_until")

    def __init__(self, name: str, clock_rate: float = 1.0, clock_offset: float = 0.0) -> None:
        self.name = name
        self.alive = True
        self.stalled_until = 0.0
        """Virtual time until which it does nothing."""
        self.clock_rate = clock_rate
        self.clock_offset = clock_offset

    def local(self, now: float) -> float:
        """What its own clock shows at virtual time `now`, in seconds."""
        return self.clock_offset + now * self.clock_rate

    def global_time(self, local: float) -> float:
        """When its own clock will show `local`."""
        return (local - self.clock_offset) / self.clock_rate


class Timer:
    """Something that will happen at `at`, unless it is cancelled or its owner dies."""

    __slots__ = ("action", "args", "at", "cancelled", "number", "owner")

    def __init__(self, at: float, number: int, owner: Party, action: Action, args: tuple[Any, ...]) -> None:
        self.at = at
        self.number = number
        self.owner = owner
        self.action = action
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __lt__(self, other: Timer) -> bool:
        return (self.at, self.number) < (other.at, other.number)

    def __str__(self) -> str:
        return f"{self.owner.name}: {getattr(self.action, '__name__', self.action)} at {self.at:.4f}"


class Events:
    """The timers of a run.  `now` is virtual time in seconds, from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fired = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = 0

    def at(self, when: float, owner: Party, action: Action, *args: Any) -> Timer:
        """Has `action(*args)` happen at virtual time `when`, not before now."""
        number = self._numbers = self._numbers + 1
        if when < self.now:
            when = self.now
        timer = Timer(when, number, owner, action, args)
        _push(self._heap, (when, number, timer))
        return timer

    def after(self, delay: float, owner: Party, action: Action, *args: Any) -> Timer:
        return self.at(self.now + delay, owner, action, *args)

    def next(self) -> Timer | None:
        """Takes the next timer that is to fire, and moves the clock to it; None: nothing will ever happen."""
        heap = self._heap
        while heap:
            when, number, timer = _pop(heap)
            owner = timer.owner
            if timer.cancelled or not owner.alive:
                continue
            if owner.stalled_until > when:
                timer.at = owner.stalled_until
                _push(heap, (timer.at, number, timer))
                continue
            self.now = when
            self.fired += 1
            return timer
        return None

    def pending(self) -> list[Timer]:
        """Timers that will fire, in order."""
        return [timer for _, _, timer in sorted(self._heap) if not timer.cancelled and timer.owner.alive]
