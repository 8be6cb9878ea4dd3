"""Deliberate defects of what is reckoned, promised, ordered, refused and given up; see `mutations.py`.

The rules `room`, `promise`, `order`, `queue` and `retired` were made for these.  In each of them the client
gets its right answer, a little later or at somebody else's cost; so no other rule sees them.
"""

from __future__ import annotations

import math

import msgspec

from baton.engine.handover import records as engine_arrival
from baton.engine.handover.arrivals import Arrivals
from baton.engine.handover.attempts import Attempts
from baton.engine.handover.courier import Courier
from baton.engine.handover.credits import Credits
from baton.engine.handover.records import Phase
from baton.engine.handover.reservation import Checker, Refusal
from baton.engine.intake import Intake
from baton.engine.scheduling.admission import Admissions
from baton.engine.scheduling.backlog import Backlog
from baton.engine.scheduling.room import Room
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.workers.steps import StepReader
from baton.gateway.cluster.member import Member
from baton.gateway.cluster.table import RequestTable
from baton.protocol.messages.handover import Cancelled, Reserve
from baton.protocol.messages.reports import CloseReason
from baton.protocol.rules.silence import Silence
from tests.simulation.mutations import Patch, mutation

# -- room that is promised


@mutation("a promise of credit never ends", "promise", scenario="credits")
def promise_without_end(patch: Patch) -> None:
    promise = Credits.promise

    def wrong(self, now):
        entry = promise(self, now)
        entry.until = math.inf
        self._alarm.at = None
        return entry

    patch.setattr(Credits, "promise", wrong)


@mutation("a `Cancel` is lost while a credit stands", "promise", scenario="credits")
def cancel_lost_under_credit(patch: Patch) -> None:
    cancel = Arrivals.cancel

    def wrong(self, peer, message, now):
        if (peer, message.id) in self.credits._promised:
            self._courier.answer(peer, Cancelled(message.id, message.attempt, by_p=True))
        else:
            cancel(self, peer, message, now)

    patch.setattr(Arrivals, "cancel", wrong)


@mutation("P does not say that it waits for credit no more", "promise", scenario="credits")
def credit_not_given_back(patch: Patch) -> None:
    end = Attempts.end

    def wrong(self, attempt, reason):
        if attempt.phase is Phase.CREDIT:
            self.forget(attempt)
        else:
            end(self, attempt, reason)

    patch.setattr(Attempts, "end", wrong)


@mutation("a credit that is refused for good stays promised", "promise", scenario="credits", start=28)
def refused_for_good_and_promised(patch: Patch) -> None:
    check, drop, reserve = Checker.check, Credits.drop, Arrivals.reserve
    refused: list[bool] = []

    def wrong_check(self, *args):
        try:
            return check(self, *args)
        except Refusal:
            refused.append(True)
            raise

    def wrong_reserve(self, *args):
        reserve(self, *args)
        refused.clear()

    patch.setattr(Checker, "check", wrong_check)
    patch.setattr(Arrivals, "reserve", wrong_reserve)
    patch.setattr(Credits, "drop", lambda self, peer, id: not refused and drop(self, peer, id))


@mutation("the slot of a promise is not kept", "promise", scenario="credits")
def promised_slot_not_kept(patch: Patch) -> None:
    patch.setattr(Credits, "promised_slots", property(lambda self: 0))


@mutation(
    "a reservation that its client gave up is kept until P says so", "cancel", scenario="1p1d", new=True
)
def reservation_of_a_cancelled(patch: Patch) -> None:
    patch.setattr(Arrivals, "cancel_request", lambda self, outbox, id, now: None)


# -- room that is reckoned


@mutation("what arrives is not reckoned to grow", "room", scenario="alike", start=48)
def arriving_do_not_grow(patch: Patch) -> None:
    growth = Room.growth

    def wrong(self):
        arriving, self.arriving = self.arriving, {}
        try:
            return growth(self)
        finally:
            self.arriving = arriving

    patch.setattr(Room, "growth", wrong)


@mutation("one block too many is reckoned where all that wait are alike", "room", scenario="alike")
def a_block_too_many(patch: Patch) -> None:
    made, available = Admissions.__init__, Room.available

    def knowing(self, room, *others):
        made(self, room, *others)
        room.line = self.line

    def wrong(self, shared):
        waiting = list(self.line)
        alike = len(waiting) > 1 and len({(r.rank[0], len(r.tokens), r.tokens[0]) for r in waiting}) == 1
        return available(self, shared) + (1 if alike and shared else 0)

    patch.setattr(Admissions, "__init__", knowing)
    patch.setattr(Room, "available", wrong)


@mutation("the growth of a newcomer is not added for the next one", "room", scenario="alike")
def growth_not_added(patch: Patch) -> None:
    cost = Room.cost
    patch.setattr(Room, "cost", lambda self, request, shared: (cost(self, request, shared)[0], 0))


# -- order


@mutation("a hand-over loses its priority", "order", scenario="order")
def handed_over_without_priority(patch: Patch) -> None:
    send = Courier.send

    def wrong(self, to, message):
        if isinstance(message, Reserve):
            message = msgspec.structs.replace(message, priority=0)
        send(self, to, message)

    patch.setattr(Courier, "send", wrong)


@mutation(
    "what must be computed again after a hand-over waits behind all others",
    "order",
    scenario="order",
    start=46,
)
def recomputed_last(patch: Patch) -> None:
    fail = Arrivals._fail

    def wrong(self, arrival, why, now, **options):
        if arrival.handed:
            priority, place = arrival.request.rank
            arrival.request.rank = (priority, place + 1000.0)
        fail(self, arrival, why, now, **options)

    patch.setattr(Arrivals, "_fail", wrong)


@mutation("who was preempted is put behind all others", "order", scenario="order")
def preempted_last(patch: Patch) -> None:
    close = StepReader._close

    def wrong(self, request, closed, now):
        if closed.reason is CloseReason.PREEMPTED:
            priority, place = request.rank
            request.rank = (priority, place + 1000.0)
        close(self, request, closed, now)

    patch.setattr(StepReader, "_close", wrong)


@mutation("the oldest of the lowest priority gives way", "order", scenario="tiny-pool")
def oldest_gives_way(patch: Patch) -> None:
    give_way = Scheduler._give_way

    def wrong(self, decisions):
        urgencies = {request: request.urgency for request in self.slots if request}
        for request, (priority, place) in urgencies.items():
            request.urgency = (priority, -place)
        try:
            give_way(self, decisions)
        finally:
            for request, urgency in urgencies.items():
                request.urgency = urgency

    patch.setattr(Scheduler, "_give_way", wrong)


@mutation("credit goes to who came last", "order", scenario="credits")
def credit_to_the_last(patch: Patch) -> None:
    def wrong(self):
        return max(self._waiting.values(), key=lambda entry: entry.number, default=None)

    patch.setattr(Credits, "head", property(wrong))


@mutation("who comes anew gets room before those in line", "order", scenario="order")
def line_overtaken(patch: Patch) -> None:
    patch.setattr(Credits, "must_wait", lambda self, peer, id, priority: False)


# -- who is refused


@mutation("the queue is full one place too early", "queue", scenario="refused")
def full_too_early(patch: Patch) -> None:
    num_waiting = Intake.num_waiting.fget
    patch.setattr(Intake, "num_waiting", property(lambda self: num_waiting(self) + (num_waiting(self) > 0)))


@mutation("a full queue refuses newcomers, however urgent", "queue", scenario="refused")
def newcomers_refused(patch: Patch) -> None:
    patch.setattr(Backlog, "place_for", lambda self, priority, flow, continued=False: None)


@mutation("the first of a flow makes place in a full queue, not the last", "queue", scenario="refused")
def first_makes_place(patch: Patch) -> None:
    place_for = Backlog.place_for

    def wrong(self, priority, flow, *, continued=False):
        worst = place_for(self, priority, flow, continued=continued)
        if worst is not None:
            users = self._classes[worst.rank[0]].keys[worst.flow.key].users
            requests = users[worst.flow.user].gateways[worst.flow.gateway]
            worst = next(iter(requests.values()))
        return worst

    patch.setattr(Backlog, "place_for", wrong)


@mutation("who finds one queue full is not sent to another instance", "queue", scenario="refused")
def not_sent_elsewhere(patch: Patch) -> None:
    goes = RequestTable._goes_elsewhere

    def wrong(self, request, sender, finished, now):
        return finished.code != "queue_full" and goes(self, request, sender, finished, now)

    patch.setattr(RequestTable, "_goes_elsewhere", wrong)


# -- ids that were given up


@mutation("only the instance that has it is told that an id is given up", "retired", scenario="retired")
def decoders_not_told(patch: Patch) -> None:
    retire = RequestTable._retire

    def wrong(self, request):
        request.plan = (request.at,)
        retire(self, request)

    patch.setattr(RequestTable, "_retire", wrong)


@mutation("what is moved from a draining instance runs on there", "retired", scenario="retired")
def moved_and_running(patch: Patch) -> None:
    move = RequestTable.move

    def wrong(self, name, now):
        member = self._members[name]
        cancel, member.cancel = member.cancel, lambda *args, **options: None
        try:
            return move(self, name, now)
        finally:
            member.cancel = cancel

    patch.setattr(RequestTable, "move", wrong)


@mutation(
    "tokens of an id that was given up are dropped without a word", "retired", scenario="early", start=215
)
def dropped_without_a_word(patch: Patch) -> None:
    owner = RequestTable._owner

    def wrong(self, sender, *args):
        cancel, sender.cancel = sender.cancel, lambda *args, **options: None
        try:
            return owner(self, sender, *args)
        finally:
            sender.cancel = cancel

    patch.setattr(RequestTable, "_owner", wrong)


@mutation("one cancellation is enough, also if it came too early", "retired", scenario="early", start=215)
def cancelled_too_early(patch: Patch) -> None:
    cancel = Member.cancel
    patch.setattr(Member, "cancel", lambda self, number, has_it: cancel(self, number, has_it=True))


# -- the end of a lease


@mutation("D trusts a lease to its end", "lease", scenario="lease-end")
def trusted_to_the_end(patch: Patch) -> None:
    patch.setattr(engine_arrival, "TRUST", 1.0)


@mutation("P ends a lease by a fiftieth too early", "lease", "exported", scenario="lease-end")
def ended_too_early(patch: Patch) -> None:
    renew = Attempts.renew

    def wrong(self, attempt, now):
        if attempt.lease is None:
            attempt.lease = Silence(0.98 * self._config.lease_s, now)
        renew(self, attempt, now)

    patch.setattr(Attempts, "renew", wrong)
