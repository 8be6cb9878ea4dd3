"""What is known of a request on its way into this instance; `arrivals.py` says how it changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.engine.request import Request
from baton.protocol.handover import InstanceSource
from baton.protocol.requests import Target
from baton.protocol.silence import Silence

TRUST = 0.95
"""Of a lease: clocks need not run equally fast."""


class Stage(Enum):
    RESERVED = "reserved"
    FETCHING = "fetching"
    READY = "ready"
    CLOSING = "closing"


class Reply(Enum):
    """What P is told when an arrival is over."""

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
    """Leading pages that were here already."""
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
    """Leading pages that were asked for, or are here."""
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
    reply: Reply = Reply.NOTHING
    reason: str = ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Its name in the ledger."""
        return ("from", self.peer.incarnation, self.id, self.attempt)

    def holds_lease(self, now: float) -> bool:
        return self.lease_from is not None and now < self.lease_from + TRUST * self.lease_s
