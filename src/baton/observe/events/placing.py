"""By how much the clock of each engine that told of a sequence is put back, so that what follows from one
another stands in that order.

Theory.  A clock is known up to an error (`clocks.py`), and two engines may be wrong in opposite directions: D
then seems to run a request before P has handed it over.  But messages between the two bound the difference of
their clocks, as those with the gateway bound each of them:

| at P | | at D |
| --- | --- | --- |
| `asks` | before | `reserved`, of the same attempt |
| `room`, of the same attempt | after | `reserved` |
| `handed` | before | `received` |
| `taken` | after | `received` |

If the difference is outside of these bounds, both clocks are moved until it is not, each in proportion to its
error.  The true difference is inside, so neither is moved by more than its error; and what its own
messages with the gateway say of it, holds within all of its error.
"""

from __future__ import annotations

import math

from baton.observe.events.trail import Told

_APART_S = 1e-6
"""What comes first is shown so much earlier, at least."""


def offsets(told: list[Told]) -> list[float]:
    """Of each, its clock minus the gateway's."""
    known = [one.moment.offset() for one in told]
    found = [offset for offset, _ in known]
    if not any(error != 0 for _, error in known):
        return found  # (one host, one clock)
    for d, at_d in enumerate(told):
        for p, at_p in enumerate(told):
            if p == d or at_p.id != at_d.id:
                continue
            lower, upper = _bounds(at_p, at_d)
            apart = found[d] - found[p]
            move = min(max(apart, lower), upper) - apart
            if move:
                share = _share(known[p][1], known[d][1])
                found[d] += move * share
                found[p] -= move * (1 - share)
    return found


def _share(p: float | None, d: float | None) -> float:
    """How much of a move is D's: as much as is its part of the errors of both."""
    if d is None or p is None:
        return 0.5 if d == p else float(d is None)
    return d / (p + d) if p + d else 1.0


def _bounds(at_p: Told, at_d: Told) -> tuple[float, float]:
    """Of D's clock minus P's."""
    lower, upper = -math.inf, math.inf
    asked: dict[int, float] = {}
    room: dict[int, float] = {}
    handed = taken = None
    for note in at_p.notes:
        if note.what == "asks":
            asked[note.a] = note.at
        elif note.what == "room":
            room[note.a] = note.at
        elif note.what == "handed" and handed is None:
            handed = note.at
        elif note.what == "taken":
            taken = note.at
    for note in at_d.notes:
        if note.what == "reserved":
            first, last = asked.get(note.a), room.get(note.a)
        elif note.what == "received":
            first, last = handed, taken
        else:
            continue
        if first is not None:
            upper = min(upper, note.at - first - _APART_S)
        if last is not None:
            lower = max(lower, note.at - last + _APART_S)
    return (lower, upper) if lower <= upper else (-math.inf, upper)


def errors(told: list[Told]) -> dict[str, float | None]:
    """By how much the times of each instance can be wrong, in seconds; None: it is not known."""
    found: dict[str, float | None] = {}
    for one in told:
        _, error = one.moment.offset()
        before = found.get(one.instance, 0.0)
        found[one.instance] = None if error is None or before is None else max(error, before)
    return found
