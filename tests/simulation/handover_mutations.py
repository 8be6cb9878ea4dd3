"""Deliberate defects of the hand-over, one at a time; see `mutations.py`."""

from __future__ import annotations

from types import SimpleNamespace

from baton.engine.core import EngineCore
from baton.engine.handover import departures as engine_departures
from baton.engine.handover.arrivals import Arrivals
from baton.engine.handover.attempts import Attempts
from baton.engine.handover.credits import Credits
from baton.engine.handover.departures import Departures
from baton.engine.handover.fetches import Fetches
from baton.engine.handover.records import Arrival, Phase
from baton.engine.states import Event, State
from baton.gateway.cluster.table import RequestTable
from tests.simulation.mutations import Patch, mutation


@mutation("the lease is not checked after the copy", "lease", scenario="leases", start=395)
def lease_unchecked(patch: Patch) -> None:
    patch.setattr(Arrival, "holds_lease", lambda self, now: True)
    patch.setattr(EngineCore, "_hand_over_clock", lambda self, now: None)
    on_clock = EngineCore.on_clock

    def late(self, now):  # (the clock is looked at after everything was read, but no later)
        on_clock(self, now)
        if self._handovers is not None and self.failure is None and not self.closing:
            self._handovers.on_clock(now)

    patch.setattr(EngineCore, "on_clock", late)


@mutation("the lease is counted from when P is heard", "lease", scenario="leases", start=144)
def lease_from_hearing(patch: Patch) -> None:
    renewed, received = Arrivals.renewed, Arrivals._received

    def wrong(self, peer, message, now):
        renewed(self, peer, message, now)
        for arrival in self._arrivals.values():
            named = arrival.listed is not None and arrival.listed <= message.stamp
            if arrival.peer.incarnation == peer and named:
                arrival.lease_from = now

    def wrong_at_first(self, arrival, now):
        first = arrival.lease_from is None
        received(self, arrival, now)
        if first:
            arrival.lease_from = now

    patch.setattr(Arrivals, "renewed", wrong)
    patch.setattr(Arrivals, "_received", wrong_at_first)


@mutation(
    "P frees on cancel while its lease runs, and uses the page again", "exported", scenario="1p1d", start=42
)
def freed_on_cancel(patch: Patch) -> None:
    end = Attempts.end

    def wrong(self, attempt, reason):
        end(self, attempt, reason)
        if attempt.phase is Phase.ENDING and self.alive(attempt):
            self.release(attempt)

    patch.setattr(Attempts, "end", wrong)


@mutation("P frees when the connection is lost", "exported", scenario="partition")
def freed_on_loss(patch: Patch) -> None:
    lost = Departures.peer_lost
    patch.setattr(Departures, "peer_lost", lambda self, peer, now, dead: lost(self, peer, now, True))


@mutation("D frees before its fetch is closed", "reserved", "coming", scenario="1p1d")
def freed_under_a_fetch(patch: Patch) -> None:
    close = Arrivals._close

    def wrong(self, arrival, reply, now):
        close(self, arrival, reply, now)
        self._scheduler.ledger.give_up(arrival.key)

    patch.setattr(Arrivals, "_close", wrong)


@mutation("D says that it is over before its fetch is closed", "reserved", scenario="1p1d")
def told_before_closed(patch: Patch) -> None:
    close = Arrivals._close

    def wrong(self, arrival, reply, now):
        fetches, arrival.fetches = arrival.fetches, {}
        give_up, self._scheduler.give_up = self._scheduler.give_up, lambda key: None
        try:
            close(self, arrival, reply, now)
        finally:
            arrival.fetches, self._scheduler.give_up = fetches, give_up

    patch.setattr(Arrivals, "_close", wrong)


@mutation("a fetch counts as complete when one rank of two has it", "reserved", "pages", scenario="1p1d")
def one_rank_of_two(patch: Patch) -> None:
    ended = Fetches.ended

    def wrong(self, rank, report, now):
        arrival = self._under_way.get(report.id)
        if arrival is None:
            # One of which something is still under way, so that nothing follows from it.
            return SimpleNamespace(stage=None, fetches=(1,), holds_lease=lambda now: True, handed=False)
        arrival.fetches[report.id] = {rank}
        return ended(self, rank, report, now)

    patch.setattr(Fetches, "ended", wrong)


@mutation("a `Reserved` of attempt 1 is accepted by attempt 2", "attempt", scenario="slow")
def reserved_of_another_attempt(patch: Patch) -> None:
    reserved = Departures.reserved

    def wrong(self, peer, message, now):
        attempts, departure = self.attempts, self._live.get(message.id)
        find, current = attempts.find, departure.current if departure else None
        if peer in attempts._windows:
            attempts.find = lambda *which: find(*which) or current
        try:
            reserved(self, peer, message, now)
        finally:
            attempts.__dict__.pop("find", None)

    patch.setattr(Departures, "reserved", wrong)


@mutation("P goes on by itself when D dies after the hand-over", "stream", scenario="restart")
def first_token_sent_twice(patch: Patch) -> None:
    def wrong(self, attempt, why):
        departure = attempt.departure
        departure.request.advance(Event.RETURNED)
        self._scheduler.enqueue(departure.request)
        self._stay(departure, "lost")

    patch.setattr(Departures, "_lose", wrong)


@mutation("a token that was handed over is sent by P too", "stream", scenario="1p1d")
def first_token_of_both(patch: Patch) -> None:
    hand_over = Departures._hand_over

    def wrong(self, departure, now):
        hand_over(self, departure, now)
        if departure.request.state is State.HANDED:
            self._pour(departure)

    patch.setattr(Departures, "_hand_over", wrong)


@mutation("who is refused is not remembered for credit", "credit", scenario="1p1d")
def credit_forgotten(patch: Patch) -> None:
    patch.setattr(Credits, "join", lambda self, *_: True)


@mutation("a credit is promised and never sent", "credit", scenario="1p1d")
def credit_lost(patch: Patch) -> None:
    promise = Credits.promise

    def wrong(self, now):
        entry = promise(self, now)
        entry.target = type(entry.target)("nobody", "sim://nobody")
        del self._promised[next(reversed(self._promised))]
        return entry

    patch.setattr(Credits, "promise", wrong)


@mutation("a page is announced before it is computed", "progress", scenario="1p1d")
def announced_at_admission(patch: Patch) -> None:
    admitted = Departures.admitted

    def wrong(self, request, num_computed):
        admitted(self, request, len(request.tokens) - 1)

    patch.setattr(Departures, "admitted", wrong)


@mutation("a layer is announced one too early", "pages", "tokens", "closing-5", scenario="1p1d")
def layer_too_early(patch: Patch) -> None:
    computed = Departures.layers_computed
    patch.setattr(
        Departures, "layers_computed", lambda self, request, layers: computed(self, request, layers + 1)
    )


@mutation("the last layers are not fetched", "pages", "tokens", "closing-5", scenario="1p1d")
def last_layers_missing(patch: Patch) -> None:
    ask = Fetches.ask

    def wrong(self, arrival, complete, layers):
        if arrival.layers:
            arrival.asked = max(arrival.asked, complete)
        ask(self, arrival, complete, layers)

    patch.setattr(Fetches, "ask", wrong)


@mutation("a preempted prefill goes on in the same attempt", "exported", "grant", scenario="tight", start=141)
def named_anew(patch: Patch) -> None:
    patch.setattr(Departures, "_preempted", lambda self, departure, now: None)


@mutation("P does not say where a request went", "liveness", "end", scenario="2p3d")
def handed_over_untold(patch: Patch) -> None:
    finish = engine_departures.finish

    def wrong(outboxes, counters, request, reason, message=""):
        if reason == "handed_over":
            request.gateway.requests.pop(request.id, None)
        else:
            finish(outboxes, counters, request, reason, message)

    patch.setattr(engine_departures, "finish", wrong)


@mutation("the gateway forgets that a connection of the plan broke", "liveness", "end", scenario="2p3d")
def broken_connection_forgotten(patch: Patch) -> None:
    lost = RequestTable.lost

    def wrong(self, name, reason, now):
        lost(self, name, reason, now)
        for request in self.running.values():
            request.gone.discard(name)

    patch.setattr(RequestTable, "lost", wrong)


@mutation("a handed request is recomputed without its first token", "tokens", "answer", scenario="1p1d")
def recomputed_without_first_token(patch: Patch) -> None:
    fail = Arrivals._fail

    def wrong(self, arrival, why, now, **options):
        if arrival.handed:
            arrival.request.tokens.pop()
        fail(self, arrival, why, now, **options)

    patch.setattr(Arrivals, "_fail", wrong)


@mutation("a reservation that P cancels is kept", "cancel", scenario="1p1d")
def reservation_kept(patch: Patch) -> None:
    cancel = Arrivals.cancel

    def wrong(self, peer, message, now):
        arrival = self._arrivals.get((peer, message.id, message.attempt))
        if arrival is None or arrival.handed:
            cancel(self, peer, message, now)

    patch.setattr(Arrivals, "cancel", wrong)
