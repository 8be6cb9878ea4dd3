"""What is known of requests on their way between two engines: the records that the state machines change.

A `Departure` is a request that this engine prefills for another one, with an `Attempt` for each decoder that
it asks (`departures.py`, `attempts.py`); an `Arrival` is one that another engine prefills for this one
(`arrivals.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from baton.engine.request import Outbox, Request
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.requests import Target
from baton.protocol.routes import Routes
from baton.protocol.rules.silence import Silence

TRUST = 0.95
"""Of a lease: clocks need not run equally fast."""


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


def departure_of(request: Request) -> Departure | None:
    """How the request is to be handed over to another instance; None: it stays."""
    departure = request.departure
    assert departure is None or isinstance(departure, Departure)
    return departure


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
    reader_keys: list[bytes] = field(default_factory=list)
    """By which page servers know D's ranks (`Grant.keys`)."""
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


class Stage(Enum):
    RESERVED = "reserved"
    FETCHING = "fetching"
    READY = "ready"
    CLOSING = "closing"


class Reply(Enum):
    """What this engine sends to P when an arrival is over."""

    NOTHING = "nothing"
    CANCEL = "cancel"
    CANCELLED = "cancelled"
    TAKEN = "taken"


@dataclass(slots=True, eq=False)
class Arrival:
    peer: Target
    id: int
    attempt: int
    request: Request
    source: InstanceSource
    lease_s: float
    num_cached: int
    """Leading pages that are here: from the beginning, or as all that was asked for has come."""
    num_pages: int
    since: float
    """When the stage began."""
    stage: Stage = Stage.RESERVED
    lease_from: float | None = None
    """When the last message was sent that P is known to have received and that renews the lease."""
    reserved_at: float = 0.0
    listed: float | None = None
    """Stamp of the first `Renew` that named it."""
    pages: list[int] = field(default_factory=list)
    """P's blocks, as far as they were named."""
    asked: int = 0
    """Leading pages that were asked for here or by the fetcher that it awaits, or are here."""
    complete: int = 0
    """Leading pages that P has said are final."""
    awaits: Arrival | None = None
    """The arrival that fetches a part of its pages (`on_the_way.py`)."""
    shared: int = 0
    """So many leading pages are in the same blocks there."""
    owes: bool = False
    """The fetcher is gone, and it has to fetch the pages [num_cached, shared) itself."""
    layers: int = 0
    """Of all other pages: so many layers were asked for."""
    fetches: dict[int, set[int]] = field(default_factory=dict)
    """Fetch → ranks that have not ended it."""
    handed: bool = False
    handed_at: float = 0.0
    moved: float = 0.0
    """When a page came last."""
    closing: Silence | None = None
    """With the ranks, once they were told to end its fetches."""
    grant: bytes = b""
    """What is shown to P's page servers."""
    routes: list[Routes] = field(default_factory=list)
    """What P has said of the experts that its tokens went to, for the gateway; contiguous."""
    reply: Reply = Reply.NOTHING
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Its name in the ledger."""
        return ("from", self.peer.incarnation, self.id, self.attempt)

    def add_routes(self, routes: Routes) -> str:
        """Rows from P.  Returns why they cannot be right, or "": they are kept then."""
        expected = self.routes[-1].stop if self.routes else self.request.sampling.routes_from
        if routes.first != expected or routes.stop > len(self.request.tokens):
            return f"experts of tokens {routes.first} to {routes.stop}, expected from {expected} on"
        self.routes.append(routes)
        return ""

    def pass_routes_on(self) -> None:
        """The request is ours: its gateway is told what P has said, and the rest follows from here."""
        request = self.request
        if request.sampling.routes_from is not None:
            request.routes_sent = self.routes[-1].stop if self.routes else request.sampling.routes_from
            request.gateway.routes += [(request.id, routes) for routes in self.routes]

    def holds_lease(self, now: float) -> bool:
        return self.lease_from is not None and now < self.lease_from + TRUST * self.lease_s

    @property
    def deadline(self) -> float:
        """When it, or the ranks that are to end its fetches, must have gone on."""
        if self.closing is not None:
            return self.closing.deadline
        if self.stage is Stage.READY:
            return float("inf")
        if self.lease_from is None:
            return self.reserved_at + self.lease_s
        lease = self.lease_from + TRUST * self.lease_s
        moved = self.moved if self.awaits is None else max(self.moved, self.awaits.moved)
        return min(lease, moved + self.lease_s) if self.handed else lease

    def overdue(self, now: float) -> str:
        """Why it ends at its deadline."""
        return "fetch stalled" if self.holds_lease(now) else "lease over"

    def stuck(self, seconds: float) -> str:
        """Why the instance cannot go on: ranks were told so long ago to end its fetches."""
        ranks = sorted({rank for ranks in self.fetches.values() for rank in ranks})
        return (
            f"worker ranks {ranks} have not ended fetches from {self.peer.incarnation} for "
            f"{seconds:g} s after they were told to (step_timeout_s): they hang"
        )

    def waits(self, now: float) -> dict[str, Any]:
        """What it waits for, and how long at most."""
        return {
            "request": self.request.name or str(self.request.id),
            "attempt": self.attempt,
            "state": self.stage.value,
            "handed": self.handed,
            "peer": self.peer.incarnation,
            "pages": self.num_pages,
            "pages_asked": self.asked,
            "fetches": len(self.fetches),
            "awaits": None if self.awaits is None else self.awaits.request.name,
            "seconds": round(now - self.since, 3),
            "seconds_left": None if self.stage is Stage.READY else round(self.deadline - now, 3),
        }
