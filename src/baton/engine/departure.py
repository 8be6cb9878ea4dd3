"""What is known of a request on its way out, and of each attempt to hand it over.

`departures.py` says how these change."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.engine.outbox import Outbox
from baton.engine.request import Request
from baton.protocol.requests import Target
from baton.protocol.silence import Silence


class Phase(Enum):
    ASKING = "asking"
    CREDIT = "credit"
    RESERVED = "reserved"
    HANDED = "handed"
    ENDING = "ending"


@dataclass(slots=True, eq=False)
class Departure:
    """A request on its way out."""

    id: int
    request: Request
    decoders: tuple[Target, ...]
    aside: Outbox = field(default_factory=lambda: Outbox(b"", aside=True))
    """What was sampled and sent to nobody yet."""
    following: int = 0
    """Index of the decoder to ask next."""
    number: int = 0
    """Of the last attempt."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    current: Attempt | None = None
    """The one that asks, has a reservation or was handed over to."""
    credit_until: float | None = None
    placed: bool = False
    """Whether it counts towards `max_preparing`."""
    over: bool = False
    """It stays, or is gone; attempts may still be ending."""
    complete: int = 0
    """Leading pages that are computed in the current epoch."""
    layers: int = 0
    """Of all other pages: so many layers are computed."""


@dataclass(slots=True, eq=False)
class Attempt:
    departure: Departure
    number: int
    target: Target
    since: float
    """When the phase began."""
    phase: Phase = Phase.ASKING
    lease: Silence | None = None
    """Since this engine last heard that D counts on the pages; None before D has reserved."""
    named: int = 0
    """Leading pages that D may be reading."""
    kept: list[int] = field(default_factory=list)
    """The blocks of these pages, once they are exported."""
    window: Window | None = None
    """That of the decoder when it was asked, while it is asked."""
    grant: bytes = b""
    """With which D fetches pages of this attempt."""
    granted: int = 0
    """Leading pages of the request that were granted."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Its name in the ledger."""
        return ("to", self.departure.id, self.number)


@dataclass(slots=True)
class Window:
    """How many requests may be asking one decoder."""

    size: int
    asking: int = 0
