"""Hand-overs of one engine, in both directions: `departures.py` and `arrivals.py` behind one door.

An engine is P of some requests and D of others, also towards the same peer.  A message says by its kind which
side of the receiver it is for; only `Cancel` and `Cancelled` go both ways, and say so themselves (`by_p`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from baton.engine.counters import Counters
from baton.engine.handover.arrivals import Arrivals
from baton.engine.handover.courier import Courier, earliest
from baton.engine.handover.departures import Departures
from baton.engine.outbox import Outboxes
from baton.engine.scheduling.ledger import Key
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.validation import Limits
from baton.protocol.codec import MalformedMessage, unpack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.commands import Grants
from baton.protocol.messages.handover import (
    Cancel,
    Cancelled,
    Credit,
    Handoff,
    InstanceSource,
    PeerMessage,
    Progress,
    Refused,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Routed,
    Taken,
)
from baton.protocol.messages.reports import LayersDone


class Handovers:
    """Exists once the workers are ready.  `source` is None if nobody can fetch this instance's pages."""

    def __init__(
        self,
        config: InstanceConfig,
        num_ranks: int,
        limits: Limits,
        courier: Courier,
        scheduler: Scheduler,
        outboxes: Outboxes,
        counters: Counters,
        source: InstanceSource | None,
        number: Callable[[], int],
        violation: Callable[[str, str], None],
        secret: bytes,
    ) -> None:
        self.source = source
        self._scheduler = scheduler
        self._violation = violation
        self.departures = Departures(
            config, courier, scheduler, outboxes, counters, lambda: self.source, violation, secret
        )
        self.arrivals = Arrivals(
            config,
            num_ranks,
            limits,
            courier,
            scheduler,
            outboxes,
            counters,
            lambda: self.source,
            number,
            violation,
            secret,
        )

    @property
    def next_deadline(self) -> float | None:
        return earliest(self.departures.next_deadline, self.arrivals.next_deadline)

    def on_clock(self, now: float) -> str | None:
        """Returns why the instance cannot go on, if so."""
        self.departures.on_clock(now)
        return self.arrivals.on_clock(now)

    def on_peer(self, peer: str, message: PeerMessage, now: float) -> None:
        departures, arrivals = self.departures, self.arrivals
        match message:
            case Reserve():
                arrivals.reserve(peer, message, now)
            case Reserved():
                departures.reserved(peer, message, now)
            case Refused():
                departures.refused(peer, message, now)
            case Credit():
                departures.credit(peer, message, now)
            case Progress():
                arrivals.progress(peer, message, now)
            case Routed():
                arrivals.routed(peer, message)
            case Handoff():
                arrivals.handoff(peer, message, now)
            case Taken():
                departures.taken(peer, message, now)
            case Cancel():
                (arrivals if message.by_p else departures).cancel(peer, message, now)
            case Cancelled():
                if message.by_p:
                    departures.cancelled(peer, message)
            case Renew():
                departures.renew(peer, message, now)
            case Renewed():
                arrivals.renewed(peer, message, now)

    def peer_lost(self, peer: str, now: float, dead: bool) -> None:
        self.departures.peer_lost(peer, now, dead)
        self.arrivals.peer_lost(peer, now)

    def layers_done(self, report: LayersDone) -> None:
        """Raises `MalformedMessage`."""
        slots, epochs = unpack_int32(report.slots), unpack_int32(report.epochs)
        if len(slots) != len(epochs):
            raise MalformedMessage(f"{len(slots)} slots and {len(epochs)} epochs")
        occupants = self._scheduler.slots
        for slot, epoch in zip(slots, epochs, strict=True):
            request = occupants[slot] if 0 <= slot < len(occupants) else None
            if request is None or request.epoch != epoch:
                self._violation("worker rank 0", f"LayersDone of slot {slot}, epoch {epoch}, not open")
            else:
                self.departures.layers_computed(request, report.layers)

    def take_grants(self) -> list[Grants]:
        """What the workers are to be told of who may fetch pages of this instance."""
        return self.departures.attempts.take_grants()

    def end_all(self, why: str, now: float) -> None:
        """No page of before can be used after this."""
        self.departures.stay_all(why)
        self.arrivals.end_all(why, now)

    def new_weights(self, name: str) -> None:
        """From now on pages are of these weights."""
        if self.source is not None:
            self.source = msgspec.structs.replace(self.source, weights=name)

    def describe(self, key: Key, now: float) -> str:
        """Of a hand-over that owns blocks."""
        assert isinstance(key, tuple)
        return (self.departures.attempts if key[0] == "to" else self.arrivals).describe(key, now)

    def waits(self, now: float) -> dict[str, Any]:
        return {
            "queued": self.departures.num_queued,
            "departures": self.departures.attempts.waits(now),
            "arrivals": self.arrivals.waits(now),
        }

    def gauges(self) -> dict[str, Any]:
        departures = self.departures.attempts.gauges() | {"queued": self.departures.num_queued}
        return {"departures": departures, "arrivals": self.arrivals.gauges()}
