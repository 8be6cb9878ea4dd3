"""Deliberate defects of what several gateways share; see `mutations.py`."""

from __future__ import annotations

from baton.engine import standing as engine_standing
from baton.engine.core import EngineCore
from baton.engine.standing import Announcements
from baton.gateway.cluster.member import Member
from baton.protocol.standing import Standing, changed
from baton.simulation.parties.instance import EngineProcess
from tests.simulation.mutations import Patch, mutation


@mutation("a change is told to the first gateway alone", "standing", "liveness", scenario="multi-gateway")
def told_to_one(patch: Patch) -> None:
    def wrong(self):
        for outbox in self._outboxes.all_named()[:1]:
            self._tell(outbox, self._welcome)

    patch.setattr(Announcements, "_tell_all", wrong)


@mutation("an order does not get a number of its own", "standing", scenario="multi-gateway")
def unnumbered(patch: Patch) -> None:
    def wrong(standing, stand):
        after = changed(standing, stand)
        return Standing(standing.generation, after.label, after.draining, after.move_after_s)

    patch.setattr(engine_standing, "changed", wrong)


@mutation("what a gateway gives back is an order", "standing", scenario="multi-gateway", start=20)
def given_back_anew(patch: Patch) -> None:
    """Older knowledge undoes what was ordered since."""

    def wrong(standing, stand):
        if stand.how == "again":
            return Standing(stand.generation, stand.label or "", bool(stand.draining), stand.move_after_s)
        return changed(standing, stand)

    patch.setattr(engine_standing, "changed", wrong)


@mutation("a new incarnation is not told what was ordered", "standing", scenario="multi-gateway")
def not_given_back(patch: Patch) -> None:
    hear = Member.hear_standing

    def wrong(self, theirs, number, now):
        if theirs.generation >= self.standing.generation:
            hear(self, theirs, number, now)

    patch.setattr(Member, "hear_standing", wrong)


@mutation("nobody becomes the first when the first leaves", "standing", scenario="multi-gateway")
def no_heir(patch: Patch) -> None:
    patch.setattr(Announcements, "left", lambda self, outbox: self._line.pop(outbox, None))


@mutation("of a gateway that is gone what waits is not cancelled", "cancel", "gone", scenario="multi-gateway")
def waits_for_nobody(patch: Patch) -> None:
    lost = EngineCore.gateway_lost

    def wrong(self, identity):
        outbox = self._outboxes._of.get(identity)
        waiting = [] if outbox is None else [one for one in outbox.requests.values() if one.slot < 0]
        for request in waiting:
            del outbox.requests[request.id]
        lost(self, identity)

    patch.setattr(EngineCore, "gateway_lost", wrong)


@mutation(
    "an engine misses a gateway when it has something to tell it",
    "gone",
    "standing",
    scenario="multi-gateway",
    start=26,
)
def missed_late(patch: Patch) -> None:
    """As if nobody read the monitor of its socket."""
    patch.setattr(EngineProcess, "connection_ended", lambda self, connection: None)
