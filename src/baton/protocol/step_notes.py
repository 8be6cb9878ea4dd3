"""Step notes: when each rank of an instance ran the model, and what that step computed.

Theory.  What is true of requests (`notes.py`) is true of steps: the engine knows them, and whoever looks at
a timeline wants them beside the requests.  A step is noted once, whatever the number of its tokens.  Rank 0
says in its `StepReport` when it began; the other ranks collect theirs and tell the engine some twenty times a
second (`StepsRan`).  The engine puts all of them on its own clock, keeps the last few thousand, and gives
them to its gateways with the next `Load`, a message that goes anyway.  There they stay as the bytes that they
are until somebody looks.
"""

from __future__ import annotations

import msgspec

from baton.protocol.codec import Codec

MAX_STEPS = 4096
"""That an engine keeps until its next `Load`, and a rank until its next report; older ones are forgotten."""


class StepNote(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One step of one rank."""

    rank: int
    step: int
    """Counts from 1, the same on every rank."""
    began: float
    """Seconds, on the clock of who tells it."""
    seconds: float
    error: float = 0.0
    """By so many seconds `began` can be wrong: the rank is on another host; -1: it is not known."""
    # What the step computed, of rank 0 alone, as it is the same for all:
    decode_rows: int = 0
    """Requests that decoded."""
    prompts: int = 0
    """Requests of whose prompt a piece was computed."""
    prefill_tokens: int = 0
    tokens: int = 0
    """That requests got."""
    drafted: int = 0
    accepted: int = 0
    """Drafts that were right."""


STEP_NOTES: Codec[list[StepNote]] = Codec(list[StepNote])
