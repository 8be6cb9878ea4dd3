"""What the scheduler has decided, for the dispatcher (`engine/dispatch.py`), which tells the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.request import Request


@dataclass(slots=True)
class Admission:
    request: Request
    blocks: list[int]
    num_computed: int
    """Leading tokens that came from the prefix cache."""
    num_followed: int = 0
    """Of those, the ones that another request was computing when this one got its slot."""


@dataclass(slots=True)
class Decisions:
    """What to tell the worker, in this order."""

    grown: list[tuple[Request, list[int]]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    following: list[Request] = field(default_factory=list)
    """They have slots and blocks; the engine sends their `Admit` when the shared blocks are computed."""
    gave_up: list[Request] = field(default_factory=list)
    """Of those that followed: they gave way, and wait again."""
    lent: list[Request] = field(default_factory=list)
    """They run, and are more urgent than before, or less, by those that wait for their blocks."""
