"""What clients are promised: `--slo "ttft:500 itl:50"`."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_PART = re.compile(r"(ttft|itl|tpot):([0-9.eE+]+)(ms|s)?\Z")
_EXAMPLE = 'give milliseconds such as "ttft:500 itl:50"'
_MOST_MS = 3_600_000.0


class Slo(NamedTuple):
    """Seconds that are promised; infinity: nothing is."""

    ttft_s: float = math.inf
    """From a request to its first token."""
    itl_s: float = math.inf
    """Between two tokens, the mean over an answer."""

    def __str__(self) -> str:
        named = (("ttft", self.ttft_s), ("itl", self.itl_s))
        return " ".join(f"{name}:{1000 * value:g}" for name, value in named if value < math.inf)


def read_slo(text: str) -> Slo:
    """Raises `ValueError` that says what is wrong and what to give."""
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        match = _PART.match(part)
        if match is None:
            raise ValueError(f"{part[:40]!r} is no objective; {_EXAMPLE}")
        name = "itl" if match[1] == "tpot" else match[1]
        if name in found:
            raise ValueError(f"{name} is there twice; {_EXAMPLE}")
        try:
            value = float(match[2])
        except ValueError:
            raise ValueError(f"{part[:40]!r}: {match[2][:20]!r} is no number; {_EXAMPLE}") from None
        milliseconds = 1000 * value if match[3] == "s" else value
        if not 0 < milliseconds <= _MOST_MS:
            raise ValueError(f"{part[:40]!r}: give more than 0 and at most an hour; {_EXAMPLE}")
        found[name] = milliseconds / 1000
    if not found:
        raise ValueError(f"it is empty; {_EXAMPLE}")
    return Slo(found.get("ttft", math.inf), found.get("itl", math.inf))


def read_bounds(text: str) -> tuple[int, int]:
    """`MIN:MAX` instances.  Raises `ValueError` that says what to give."""
    match = re.match(r"([0-9]{1,4}):([0-9]{1,4})\Z", text.strip())
    if match is None:
        raise ValueError(f"{text[:40]!r}: give the fewest and the most instances, such as 2:8")
    least, most = int(match[1]), int(match[2])
    if not 1 <= least <= most:
        raise ValueError(f"{text[:40]!r}: give at least 1, and no more than the second number")
    return least, most
