"""What processes hold over time, and whether that grows.

Theory.  A process that has come to its working size still goes up and down: buffers, garbage that waits for
its collection, arenas that malloc keeps; and it takes a step up when it does something for the first time.
So growth is not "more at the end than at the beginning" but a trend: after a warm-up the time is cut into
parts, and a process grows if the least that it held in a part never falls from one part to the next, and
has risen by more than is allowed even without the largest single rise.  (The least, since what waits to be
freed only adds.) What is shared, the KV pool, grows until all of it was touched; who calls `growth` leaves
that out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

MIB = 1 << 20
PARTS = 4
SLACK = 0.25
"""Of what is allowed: by so much the least of a part may be below that of the part before it."""


@dataclass(frozen=True)
class Usage:
    """What one process holds.  Bytes, and numbers of things."""

    resident: int
    """Pages in memory, shared ones included."""
    anonymous: int
    """Its own: heap and stacks."""
    proportional: int
    """`resident`, with each shared page divided by the number of those who share it."""
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Growth:
    """How much more at the end of the judged time than at its beginning, and whether that is a trend."""

    amount: float
    steady: bool
    """It never fell, and rose by more than is allowed, also without its largest step."""


def usage(pid: int) -> Usage | None:
    """None if the process is gone.  `proportional` is 0 where the kernel does not say it."""
    root = Path(f"/proc/{pid}")
    try:
        status = _numbers((root / "status").read_text())
        descriptors = len(os.listdir(root / "fd"))
    except OSError:
        return None
    if "VmRSS" not in status:  # a zombie
        return None
    try:
        shares = _numbers((root / "smaps_rollup").read_text())
    except OSError:
        shares = {}
    return Usage(
        resident=status["VmRSS"] * 1024,
        anonymous=status.get("RssAnon", 0) * 1024,
        proportional=shares.get("Pss", 0) * 1024,
        descriptors=descriptors,
        threads=status.get("Threads", 0),
    )


def _numbers(text: str) -> dict[str, int]:
    """The lines `name: number …` of a file of /proc."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0])
    return found


def growth(values: Sequence[float], allowed: float) -> Growth | None:
    """Judges values that were taken at equal intervals, the warm-up left out.

    `allowed`: what they may rise by without being called growing.  None: fewer than two values a part."""
    if len(values) < 2 * PARTS:
        return None
    edges = [len(values) * part // PARTS for part in range(PARTS + 1)]
    least = [min(values[first:last]) for first, last in pairwise(edges)]
    rises = [after - before for before, after in pairwise(least)]
    amount = sum(rises)
    return Growth(amount, min(rises) >= -SLACK * allowed and amount - max(rises) > allowed)
