"""Deliberate defects of passes, of connections between engines, and of grants of pages; see `mutations.py`.

The rules `pass`, `link` and `grant` were made for these: honest parties get the same with and without them.
"""

from __future__ import annotations

import msgspec

from baton.engine.handover import reservation as engine_reservation
from baton.engine.handover.attempts import Attempts
from baton.engine.handover.callers import Callers, Heard, Identity
from baton.engine.handover.records import Phase
from baton.gateway.cluster import member as gateway_member
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Grant
from baton.transfer.grants import GrantBook
from tests.simulation.mutations import Patch, mutation

# -- passes


@mutation("D does not look at the pass", "pass", scenario="strangers")
def pass_unchecked(patch: Patch) -> None:
    patch.setattr(engine_reservation, "compare_digest", lambda one, other: True)


@mutation("a pass is not bound to the engine that it names", "pass", scenario="strangers")
def pass_of_another_engine(patch: Patch) -> None:
    plan_pass = engine_reservation.plan_pass

    def wrong(key, gateway, request, prefiller):
        return plan_pass(key, gateway, request, "")

    for module in (engine_reservation, gateway_member):
        patch.setattr(module, "plan_pass", wrong)


@mutation("a pass is not bound to its request", "pass", scenario="strangers")
def pass_of_another_request(patch: Patch) -> None:
    plan_pass = engine_reservation.plan_pass
    check = engine_reservation.Checker.check

    def wrong(self, peer, message, mine, now):
        for request in (message.request, message.request + 1):
            if plan_pass(self._key, message.gateway, request, peer) == message.plan_pass:
                right = plan_pass(self._key, message.gateway, message.request, peer)
                message = msgspec.structs.replace(message, plan_pass=right)
        return check(self, peer, message, mine, now)

    patch.setattr(engine_reservation.Checker, "check", wrong)


@mutation("P shows the pass of the plan before", "pass", scenario="strangers")
def pass_of_the_plan_before(patch: Patch) -> None:
    begin = Attempts.begin
    before: dict[tuple[int, str], bytes] = {}

    def wrong(self, departure, target, source, now):
        shown = before.get((id(self), target.incarnation), target.plan_pass)
        before[id(self), target.incarnation] = target.plan_pass
        return begin(self, departure, msgspec.structs.replace(target, plan_pass=shown), source, now)

    patch.setattr(Attempts, "begin", wrong)


# -- connections


def _hear(patch: Patch, wrong) -> None:
    """Has `wrong(self, hear, routing_id)` say whose a message is."""
    hear = Callers.hear
    patch.setattr(Callers, "hear", lambda self, routing_id: wrong(self, hear, routing_id))


@mutation("a stale connection takes the place of a newer one", "link", scenario="strangers")
def stale_replaces(patch: Patch) -> None:
    def wrong(self, hear, routing_id):
        identity = Identity.parse(routing_id)
        known = self._latest.get(identity.peer) if identity else None
        if known is not None and known[1] != routing_id and known[0].session == identity.session:
            self._latest[identity.peer] = (identity, routing_id)
            return Heard(identity.peer, reconnected=True)
        return hear(self, routing_id)

    _hear(patch, wrong)


@mutation("what comes on a stale connection is dropped without a word", "link", scenario="strangers")
def stale_swallowed(patch: Patch) -> None:
    def wrong(self, hear, routing_id):
        heard = hear(self, routing_id)
        return Heard() if heard.refusal and not heard.stranger else heard

    _hear(patch, wrong)


@mutation("nobody hears that a connection took the place of another one", "link", scenario="strangers")
def reconnected_unnoticed(patch: Patch) -> None:
    _hear(patch, lambda self, hear, routing_id: hear(self, routing_id)._replace(reconnected=False))


@mutation("a peer's next connection is taken for a stale one", "link", scenario="strangers")
def next_is_stale(patch: Patch) -> None:
    def wrong(self, hear, routing_id):
        identity = Identity.parse(routing_id)
        known = self._latest.get(identity.peer) if identity else None
        if known is not None and known[1] != routing_id and identity.number == known[0].number + 1:
            return self.refuse(routing_id, "the peer has made another connection since")
        return hear(self, routing_id)

    _hear(patch, wrong)


@mutation("a proof counts wherever it was seen", "link", scenario="strangers")
def proof_replayed(patch: Patch) -> None:
    patch.setattr(Callers, "_proven", lambda self, identity: True)


@mutation("who has a peer's proof need not know its session", "link", scenario="strangers")
def session_unchecked(patch: Patch) -> None:
    def wrong(self, hear, routing_id):
        identity = Identity.parse(routing_id)
        known = self._latest.get(identity.peer) if identity else None
        if known is not None and identity.proof == known[0].proof and identity.number > known[0].number:
            self._latest[identity.peer] = (identity, routing_id)
            return Heard(identity.peer, reconnected=True)
        return hear(self, routing_id)

    _hear(patch, wrong)


@mutation("a session counts without a proof", "link", scenario="strangers")
def session_is_enough(patch: Patch) -> None:
    def wrong(self, hear, routing_id):
        identity = Identity.parse(routing_id)
        known = self._latest.get(identity.peer) if identity else None
        if known is not None and identity.session == known[0].session and identity.number > known[0].number:
            self._latest[identity.peer] = (identity, routing_id)
            return Heard(identity.peer, reconnected=True)
        return hear(self, routing_id)

    _hear(patch, wrong)


# -- grants


@mutation("pages are granted when a decoder is asked, before it has room", "grant", scenario="strangers")
def granted_too_early(patch: Patch) -> None:
    begin = Attempts.begin

    def wrong(self, departure, target, source, now):
        attempt = begin(self, departure, target, source, now)
        request = departure.request
        blocks = self._scheduler.ledger.table(request.slot) if request.slot >= 0 else ()
        self._grants.append(
            Grant(attempt.grant, target.incarnation, [], pack_int32(blocks), self._config.lease_s)
        )
        return attempt

    patch.setattr(Attempts, "begin", wrong)


@mutation("the pages of all that is handed over are granted", "grant", scenario="strangers")
def granted_of_others(patch: Patch) -> None:
    grant = Attempts.grant

    def wrong(self, attempt, blocks):
        others = [block for other in self._attempts.values() for block in other.kept if other is not attempt]
        grant(self, attempt, [*blocks, *others])

    patch.setattr(Attempts, "grant", wrong)


@mutation(
    "pages are granted to the first decoder of the plan, whoever takes the request", "grant", scenario="2p3d"
)
def granted_to_another(patch: Patch) -> None:
    take_grants = Attempts.take_grants

    def wrong(self):
        found = take_grants(self)
        first = {a.grant: a.departure.decoders[0].incarnation for a in self._attempts.values()}
        return [
            msgspec.structs.replace(one, reader=first.get(one.token, one.reader))
            if isinstance(one, Grant)
            else one
            for one in found
        ]

    patch.setattr(Attempts, "take_grants", wrong)


@mutation("a grant is never revoked", "grant", scenario="strangers")
def never_revoked(patch: Patch) -> None:
    take_grants = Attempts.take_grants

    def wrong(self):
        self._revoked = []
        return take_grants(self)

    patch.setattr(Attempts, "take_grants", wrong)


@mutation(
    "what was granted and not named stays granted when its blocks are free",
    "grant",
    scenario="strangers",
    start=24,
)
def granted_beyond_the_slot(patch: Patch) -> None:
    """The engine did that until this rule looked."""
    export = Attempts.export

    def wrong(self, attempt, count):
        granted, attempt.granted = attempt.granted, 0
        export(self, attempt, count)
        attempt.granted = granted

    patch.setattr(Attempts, "export", wrong)


@mutation("a `Renew` extends all grants of its sender", "grant", scenario="strangers")
def extended_all(patch: Patch) -> None:
    extend = Attempts.extend

    def wrong(self, attempts):
        peers = {attempt.target.incarnation for attempt in attempts}
        extend(self, [one for one in self._attempts.values() if one.target.incarnation in peers])

    patch.setattr(Attempts, "extend", wrong)


@mutation("what P has ended is extended as long as D renews it", "grant", scenario="strangers", start=110)
def extended_after_the_end(patch: Patch) -> None:
    """Longer than the lease, which such a `Renew` does not renew."""
    extend, find = Attempts.extend, Attempts.find
    asked: list = []

    def noting(self, peer, number, attempt):
        found = find(self, peer, number, attempt)
        if found is not None and found.phase is Phase.ENDING:
            asked.append(found)
        return found

    def wrong(self, attempts):
        extend(self, [*attempts, *(one for one in asked if self.alive(one))])
        asked.clear()

    patch.setattr(Attempts, "find", noting)
    patch.setattr(Attempts, "extend", wrong)


@mutation("a page server does not look which pages were granted", "grant", scenario="strangers")
def pages_unchecked(patch: Patch) -> None:
    why_not = GrantBook.why_not
    patch.setattr(
        GrantBook, "why_not", lambda self, token, key, now, pages=(): why_not(self, token, key, now)
    )


@mutation("a grant does not end by itself", "grant", scenario="strangers", start=145)
def grant_without_end(patch: Patch) -> None:
    why_not = GrantBook.why_not

    def wrong(self, token, key, now, pages=()):
        return why_not(self, token, key, 0.0, pages)

    patch.setattr(GrantBook, "why_not", wrong)


@mutation("a page server serves a grant to whichever member shows it", "grant", scenario="strangers")
def grant_of_the_bearer(patch: Patch) -> None:
    why_not = GrantBook.why_not

    def wrong(self, token, key, now, pages=()):
        granted = self._of.get(token)
        named = next(iter(granted.keys), key) if granted is not None else key
        return why_not(self, token, named, now, pages)

    patch.setattr(GrantBook, "why_not", wrong)


@mutation("a grant names the keys of the reader before it", "grant", scenario="2p3d")
def keys_of_another_reader(patch: Patch) -> None:
    reserved = Attempts.reserved
    before: dict[int, list[bytes]] = {}

    def wrong(self, attempt, message, now):
        problem = reserved(self, attempt, message, now)
        said = attempt.reader_keys
        attempt.reader_keys = before.get(id(self), said)
        before[id(self)] = said
        return problem

    patch.setattr(Attempts, "reserved", wrong)


@mutation("a grant that was revoked is served", "grant", scenario="strangers")
def revoked_and_served(patch: Patch) -> None:
    patch.setattr(GrantBook, "_end", lambda self, token: None)
