"""Load reports: how busy the instance is, for the gateways that choose among instances.

A gateway gets a whole report after `Welcome`, all known prefix keys included, and then what has changed, at
most once in `interval_s` and only if something has.  What it costs to look is paid once an interval, and only
when something has happened since (`touch`).

Speeds are exponential averages over steps: prefill from the tokens of steps that prefilled, decoding from the
time of steps that did nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from baton.engine.scheduling.prefix import PrefixIndex
from baton.protocol.codec import pack_int64
from baton.protocol.messages.requests import Load
from baton.protocol.rules.prefix_keys import short_key

_WEIGHT = 0.1
"""Of the newest step."""
_TURNOVER_S = 30.0
"""What is so old counts a third in the speed of the line."""


class Speeds:
    """What steps took lately."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0

    def step(self, prefill_tokens: int, seconds: float) -> None:
        if seconds <= 0:
            return
        if prefill_tokens:
            speed = prefill_tokens / seconds
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, speed)
        else:
            self.decode_step_s = _average(self.decode_step_s, seconds)


class Turnover:
    """How fast the line of newcomers moves, measured while requests wait; older times count less."""

    def __init__(self) -> None:
        self._admitted = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        """When `decided` was called last, if a request waited then."""

    def decided(self, admitted: int, waiting: int, now: float) -> None:
        """So many newcomers were admitted, and so many wait now."""
        if self._since is not None:
            passed = max(now - self._since, 0.0)
            kept = math.exp(-passed / _TURNOVER_S)
            self._seconds = self._seconds * kept + passed
            self._admitted = self._admitted * kept + admitted
        self._since = now if waiting else None

    def wait_s(self, waiting: int, now: float) -> float:
        """How long it takes until so many have been admitted; 0: not known."""
        seconds = self._seconds + (0.0 if self._since is None else max(now - self._since, 0.0))
        return waiting * seconds / max(self._admitted, 1.0)


def _average(before: float, newest: float) -> float:
    return before + _WEIGHT * (newest - before) if before else newest


class Loads:
    """`measure()` returns the numbers of now, without keys; `steps()` the steps that were not told yet, which
    go with a report that goes anyway, or `at_once`."""

    def __init__(
        self,
        interval_s: float,
        prefix: PrefixIndex | None,
        measure: Callable[[], Load],
        steps: Callable[[], bytes] = bytes,
    ) -> None:
        self._interval_s = interval_s
        self._prefix = prefix
        self._measure = measure
        self._steps = steps
        self._touched = False
        self._sent_at: float | None = None
        self._last: Load | None = None

    @property
    def next_deadline(self) -> float | None:
        if not self._touched or self._sent_at is None:
            return None
        return self._sent_at + self._interval_s

    def touch(self) -> None:
        """Something happened that may have changed the load."""
        self._touched = self._interval_s > 0

    def whole(self, now: float) -> Load | None:
        """For a gateway that is new.  The others must have been told the `changes` up to now before."""
        if self._interval_s <= 0:
            return None
        keys: Iterable[bytes] = ()
        if self._prefix:
            self._prefix.take_changes()
            keys = self._prefix.keys()
        self._sent_at, self._last = now, self._measure()
        return msgspec.structs.replace(self._last, reset=True, added=_pack(keys))

    def changes(self, now: float, *, at_once: bool = False) -> Load | None:
        """What has changed since the last call that returned something, if it is time for it."""
        if not self._touched:
            return None
        if not at_once and self._sent_at is not None and now < self._sent_at + self._interval_s:
            return None
        self._touched = False
        load = self._measure()
        added, removed = self._prefix.take_changes() if self._prefix else ((), ())
        changed = bool(load != self._last or added or removed)
        steps = self._steps() if changed or at_once else b""
        if not changed and not steps:
            return None
        self._sent_at, self._last = now, load
        more = {"steps": steps, "written": now} if steps else {}
        return msgspec.structs.replace(load, added=_pack(added), removed=_pack(removed), **more)


def _pack(keys: Iterable[bytes]) -> bytes:
    return pack_int64(short_key(key) for key in keys)
