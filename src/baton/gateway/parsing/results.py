"""What became of the attempt to read a call."""

from __future__ import annotations

from enum import Enum

MAX_HELD = 1 << 14
"""Characters in which a call must say its name and begin its arguments; also of text that is held back until
it is known what it is."""

MAX_ARGUMENTS = 1 << 20
"""Characters of arguments that may be held back until their name comes."""


class Result(Enum):
    NOT = 0
    BROKEN = 1
    DONE = 2


NOT, BROKEN, DONE = Result.NOT, Result.BROKEN, Result.DONE
