"""Arrivals: requests that another engine prefills and hands over to this one to decode (its side is D).

Theory.  `Reserve` is answered at once.  A request that would be admitted if it waited here gets blocks
(`reserved` in the ledger) and the promise of a slot; any other one is refused, and may come to the line for
credit (`credits.py`).  While P computes, this engine's workers fetch what P says is final, each rank for
itself; a fetch is over when every rank has said so.

| stage | holds | waits for | leaves by |
| --- | --- | --- | --- |
| reserved | blocks, a slot to come | `Progress` | `Progress`, `Handoff` → fetching; given up → closing |
| fetching | blocks, a slot to come | pages, and `Handoff` | all there → ready; failed → closing |
| ready | blocks, a slot to come | that the instance is not paused | seated: a request that runs |
| closing | blocks | that its fetches are over | the last `Fetched` of every rank → over |

Before `Handoff` the request is P's: this engine tells P by `Cancel` what went wrong.  From `Handoff` on it
is this engine's: the first token is streamed at once, and if the pages cannot be had the request is computed
again here, like one that was preempted.  `Taken` says in both cases that P may free the pages.

*Nothing is freed under a fetch.*  `Cancel`, `Cancelled` and `Taken` leave, and blocks are given up, only when
every fetch of the arrival is over on every rank.

*Nothing is believed without a lease.*  When the completion of a fetch is read, the lease must still hold: it
counts from when the last `Renew` was sent that P is known to have received (at first: `Reserved`), and only
`TRUST` of it is used, for clocks that do not run equally fast.  So the pages were P's true pages all the time
that the copying took.  Pages that were fetched enter the prefix index when the request is seated, not before.

*What several share is fetched once.*  An arrival may await pages that are fetched for another one
(`on_the_way.py`).

Deadlines: the lease, renewed at each third of it; after `Handoff` also `lease_s` from the last page that
came; a reservation that P has not begun to fill within `lease_s` is given up if somebody here waits for
blocks (two instances that wait for each other's blocks would do so for ever); and the ranks must end a fetch
that was dropped within `step_timeout_s`, or the instance fails.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import Any

from baton.engine.counters import Counters
from baton.engine.handover.courier import Alarm, Courier, earliest
from baton.engine.handover.credits import Credits
from baton.engine.handover.fetches import Fetches
from baton.engine.handover.on_the_way import OnTheWay
from baton.engine.handover.records import Arrival, Reply, Stage
from baton.engine.handover.reservation import Checker, Refusal
from baton.engine.noting import note
from baton.engine.outbox import Outboxes
from baton.engine.request import Outbox, Request
from baton.engine.scheduling.decisions import Admission
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.states import Event
from baton.engine.validation import Limits
from baton.protocol.codec import MalformedMessage, unpack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.handover import (
    Cancel,
    Cancelled,
    Credit,
    Handoff,
    InstanceSource,
    Progress,
    RefusalCode,
    Refused,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Routed,
    Taken,
)
from baton.protocol.messages.reports import Fetched
from baton.protocol.messages.requests import Target
from baton.protocol.rules.passes import gateway_key, pair_key
from baton.protocol.rules.silence import Silence

log = logging.getLogger(__name__)


class Arrivals:
    """Those of one engine with `num_ranks` ranks.  `number()` counts requests of the engine; `source()` says
    where its own pages are; `violation(sender, what)` counts and logs what no correct sender would send."""

    def __init__(
        self,
        config: InstanceConfig,
        num_ranks: int,
        limits: Limits,
        courier: Courier,
        scheduler: Scheduler,
        outboxes: Outboxes,
        counters: Counters,
        source: Callable[[], InstanceSource | None],
        number: Callable[[], int],
        violation: Callable[[str, str], None],
        secret: bytes,
    ) -> None:
        self._config = config
        self._limits = limits
        self._courier = courier
        self._scheduler = scheduler
        self._outboxes = outboxes
        self._counters = counters.handovers
        self._source = source
        self._key = gateway_key(secret)
        self._checker = Checker(limits, outboxes, number, self._key, caching=scheduler.prefix is not None)
        self._violation = violation
        self.credits = Credits()
        self.fetches = Fetches(num_ranks, scheduler.ledger, self._counters)
        caching = scheduler.prefix is not None
        self._on_the_way = OnTheWay(scheduler.ledger, self.fetches, config.block_size, caching=caching)
        self._arrivals: dict[tuple[str, int, int], Arrival] = {}
        self._renew_at: dict[str, float] = {}
        self._alarm = Alarm()

    # -- what the core needs

    @property
    def next_deadline(self) -> float | None:
        deadline = earliest(self._alarm.at, self.credits.next_deadline)
        return earliest(deadline, min(self._renew_at.values())) if self._renew_at else deadline

    def on_clock(self, now: float) -> str | None:
        """Returns why the instance cannot go on, if so."""
        if self.credits.expire(now):
            self._promise()
        if self._renew_at:
            for peer in [peer for peer, at in self._renew_at.items() if now >= at]:
                self._renew(peer, now)
        if not self._alarm.due(now):
            return None
        for arrival in list(self._arrivals.values()):
            if now >= arrival.deadline:
                if arrival.closing is not None:
                    if arrival.closing.look(now):
                        return arrival.stuck(self._config.step_timeout_s)
                    continue
                self._fail(arrival, arrival.overdue(now), now)
        self._alarm.at = None
        for arrival in self._arrivals.values():
            self._alarm.note(arrival.deadline)
        return None

    def settle(self, now: float) -> None:
        """Who awaited pages of a request that is gone fetches them itself; before the fetches are sent."""
        for arrival in self._on_the_way.settle(now):
            self._fail(arrival, "shared pages lost", now)

    def grant(self, now: float) -> None:
        """Sends credits for the room that there is."""
        while (head := self.credits.head) is not None and self._scheduler.has_room(head.blocks):
            entry = self.credits.promise(now)
            self._promise()
            self._counters.credits_given += 1
            self._courier.send(entry.target, Credit(entry.id, entry.attempt))

    def seat(self, now: float) -> list[Admission]:
        """Requests whose pages are all here, and that run from now on."""
        if self._scheduler.paused or self._scheduler.draining:
            return []
        admissions = []
        for arrival in [arrival for arrival in self._arrivals.values() if arrival.stage is Stage.READY]:
            admissions.append(self._scheduler.seat(arrival.key))
            self._counters.seated += 1
            self._forget(arrival)
        return admissions

    def end_all(self, why: str, now: float) -> None:
        """No page that is fetched or was fetched can be used."""
        for arrival in list(self._arrivals.values()):
            if arrival.stage is not Stage.CLOSING:
                self._fail(arrival, why, now)

    def cancel_request(self, outbox: Outbox, id: int, now: float) -> None:
        """Its gateway cancels a request that may be on its way here."""
        for arrival in list(self._arrivals.values()):
            if arrival.request.gateway is outbox and arrival.request.id == id and not arrival.handed:
                self._give_up(arrival, "the gateway cancelled it", now)

    def gateway_lost(self, outbox: Outbox, now: float) -> None:
        for arrival in list(self._arrivals.values()):
            if arrival.request.gateway is outbox and not arrival.handed:
                self._give_up(arrival, "the gateway is gone", now)

    def withdrawn(self, request: Request, now: float) -> None:
        """A request that was handed over to this engine, and has not run yet, is gone."""
        for arrival in list(self._arrivals.values()):
            if arrival.request is request and arrival.stage is not Stage.CLOSING:
                self._close(arrival, Reply.TAKEN if arrival.stage is not Stage.READY else Reply.NOTHING, now)

    def waits(self, now: float) -> list[dict[str, Any]]:
        """Who waits for what, and how long at most."""
        return [arrival.waits(now) for arrival in self._arrivals.values()]

    def describe(self, key: tuple[str, str, int, int], now: float) -> str:
        """Of the blocks that are reserved under this key."""
        arrival = self._arrivals[key[1:]]
        return (
            f"{arrival.request.name or arrival.request.id} from {arrival.peer.incarnation}, "
            f"attempt {arrival.attempt}, {arrival.stage.value}, {arrival.deadline - now:.1f} s left"
        )

    def gauges(self) -> dict[str, int]:
        """Arrivals by stage."""
        counts = dict.fromkeys((stage.value for stage in Stage), 0)
        for arrival in self._arrivals.values():
            counts[arrival.stage.value] += 1
        return counts | {"waiting_for_credit": len(self.credits), "promised": self.credits.promised_slots}

    # -- what P says

    def reserve(self, peer: str, message: Reserve, now: float) -> None:
        target = Target(peer, message.endpoint, pair_key(self._key, peer))
        self._courier.know(target)
        for other in [a for a in self._arrivals.values() if (a.peer.incarnation, a.id) == (peer, message.id)]:
            if other.attempt == message.attempt:
                if other.stage is not Stage.CLOSING:
                    self._courier.send(target, self._reserved(message, other))
                return
            if other.stage is not Stage.CLOSING:
                self._fail(other, "a later attempt has begun", now)
        try:
            request = self._checker.check(peer, message, self._source(), now)
        except Refusal as refusal:
            self.credits.drop(peer, message.id)  # what was promised to it is nobody's now
            self._promise()
            self._refuse(target, message, refusal.code, refusal.message)
            return
        waits = self.credits.must_wait(peer, message.id, message.priority)
        promised = self.credits.drop(peer, message.id)
        self._promise()
        key = ("from", peer, message.id, message.attempt)
        fetcher, coming = self._on_the_way.find(peer, request)
        num_cached = None if waits else self._scheduler.try_reserve(key, request, coming, promised=promised)
        if num_cached is None:
            blocks = self._scheduler.estimate(request)
            credit = self.credits.join(
                target, message.id, message.attempt, message.priority, message.flow, blocks, now
            )
            self._refuse(target, message, "no_room", "no room for it now", credit=credit)
            return
        num_pages = -(-len(request.tokens) // self._config.block_size)
        arrival = Arrival(
            target,
            message.id,
            message.attempt,
            request,
            message.source,
            message.lease_s,
            num_cached,
            num_pages,
            since=now,
            reserved_at=now,
            asked=num_cached,
            moved=now,
            grant=message.grant,
        )
        self._on_the_way.add(arrival, fetcher, len(coming))
        if arrival.awaits is not None:
            self._counters.pages_shared += arrival.shared - arrival.num_cached
        self._arrivals[key[1:]] = arrival
        self._renew_at.setdefault(peer, now + message.lease_s / 3)
        self._alarm.note(arrival.deadline)
        self._counters.arrivals += 1
        self._courier.send(target, self._reserved(message, arrival))

    def _reserved(self, message: Reserve, arrival: Arrival) -> Reserved:
        source = self._source()
        keys = {rank.reader_key for rank in source.ranks} if source is not None else ()
        return Reserved(message.id, message.attempt, arrival.num_cached, sorted(keys))

    def progress(self, peer: str, message: Progress, now: float) -> None:
        arrival = self._find(peer, message)
        if arrival is None or arrival.handed:
            return
        self._received(arrival, now)
        if self._name_pages(arrival, message.first, message.blocks, now):
            if message.complete > len(arrival.pages) or (message.layers and not self._all_named(arrival)):
                self._cannot_be(arrival, "Progress of pages that were not named", now)
            else:
                self.fetches.ask(arrival, message.complete, message.layers)
                self._advance(arrival, now)  # (what is final now may have come before, layer by layer)

    def routed(self, peer: str, message: Routed) -> None:
        """Rows are kept until the request is ours.  Of one that is not known here `Handoff` tells P."""
        arrival = self._arrivals.get((peer, message.id, message.attempt))
        if arrival is None or arrival.handed or arrival.stage is Stage.CLOSING:
            return
        if wrong := arrival.add_routes(message.routes):
            self._violation(f"peer {peer}", wrong)

    def handoff(self, peer: str, message: Handoff, now: float) -> None:
        arrival = self._find(peer, message)
        if arrival is None or arrival.handed:
            return
        self._received(arrival, now)
        request, outbox = arrival.request, arrival.request.gateway
        tokens = self._tokens(message.tokens)
        goes_on = 0 < len(tokens) < request.stopping.max_tokens - request.num_generated
        if not goes_on or len(message.logprobs) not in (0, len(tokens)) or request.id in outbox.requests:
            what = f"Handoff with {len(tokens)} tokens and {len(message.logprobs)} log-probabilities"
            self._cannot_be(arrival, f"{what} of request {request.id}", now)
            return
        if not self._name_pages(arrival, message.first, message.blocks, now):
            return
        if not self._all_named(arrival):
            self._cannot_be(arrival, "Handoff without all pages", now)
            return
        arrival.handed, arrival.handed_at, arrival.moved = True, now, now
        self._alarm.note(arrival.deadline)
        self._counters.arrived += 1
        request.num_cached = message.num_cached
        request.first_admitted, request.arrived = now, now - message.queued_s  # as it was at P
        request.begun = True
        note(request, now, "received", arrival.num_pages, len(tokens), text=peer)
        arrival.pass_routes_on()
        for index, logprobs in enumerate(message.logprobs):
            outbox.logprobs.append((len(outbox.ids) + index, logprobs))
        outbox.ids.extend([request.id] * len(tokens))
        outbox.tokens += tokens
        outbox.requests[request.id] = request
        self._outboxes.touch(outbox)
        request.tokens += tokens
        self.fetches.ask(arrival, arrival.num_pages, 0)
        self._advance(arrival, now)

    def cancel(self, peer: str, message: Cancel, now: float) -> None:
        arrival = self._arrivals.get((peer, message.id, message.attempt))
        if arrival is None:
            self.credits.drop(peer, message.id)
            self._promise()
            self._courier.answer(peer, Cancelled(message.id, message.attempt, by_p=True))
        elif arrival.stage is Stage.CLOSING:
            arrival.reply = Reply.CANCELLED
        elif arrival.stage is Stage.READY:
            self._courier.send(arrival.peer, Cancelled(message.id, message.attempt, by_p=True))
        else:
            # (One that was handed over is ours, whatever became of P's side; its gateway cancels it here.)
            self._fail(arrival, "cancelled by P", now, reply=Reply.CANCELLED)

    def renewed(self, peer: str, message: Renewed, now: float) -> None:
        unknown = set(message.unknown)
        for arrival in list(self._arrivals.values()):
            if arrival.peer.incarnation != peer or arrival.stage not in (Stage.RESERVED, Stage.FETCHING):
                continue
            if (arrival.id, arrival.attempt) in unknown:
                self._fail(arrival, "P does not hold it", now)
            elif arrival.listed is not None and arrival.listed <= message.stamp:
                arrival.lease_from = max(message.stamp, arrival.lease_from or message.stamp)

    def peer_lost(self, peer: str, now: float) -> None:
        self.credits.drop_peer(peer)
        self._promise()
        self._renew_at.pop(peer, None)
        for arrival in list(self._arrivals.values()):
            if arrival.peer.incarnation != peer:
                continue
            if arrival.stage in (Stage.RESERVED, Stage.FETCHING):
                self._fail(arrival, "peer lost", now, reply=Reply.NOTHING)
            elif arrival.stage is Stage.CLOSING:
                arrival.reply = Reply.NOTHING

    # -- what the workers say

    def fetched(self, rank: int, report: Fetched, now: float) -> None:
        arrival = self.fetches.ended(rank, report, now)
        if arrival is None:
            self._violation(f"worker rank {rank}", f"Fetched of {report.id}, which is not under way there")
        elif arrival.stage is Stage.CLOSING:
            if not arrival.fetches:
                self._closed(arrival)
        elif report.error or report.dropped:
            self._counters.fetch_errors += 1
            log.warning("rank %d cannot fetch from %s: %s", rank, arrival.peer.incarnation, report.error)
            self._fail(arrival, "fetch failed", now)
        elif not arrival.holds_lease(now):
            self._fail(arrival, "lease over", now)
        else:
            arrival.moved = now
            self._advance(arrival, now)

    # -- inside

    def _refuse(
        self, target: Target, message: Reserve, code: RefusalCode, text: str, *, credit: bool = False
    ) -> None:
        self._counters.refusals[code] += 1
        self._courier.send(target, Refused(message.id, message.attempt, code, text, credit))

    def _find(self, peer: str, message: Progress | Handoff) -> Arrival | None:
        """Nothing for one that is being closed: P will be told.  P is told at once of one that is unknown."""
        arrival = self._arrivals.get((peer, message.id, message.attempt))
        if arrival is None:
            self._courier.answer(peer, Cancel(message.id, message.attempt, by_p=False, reason="unknown here"))
        elif arrival.stage is Stage.CLOSING:
            return None
        return arrival

    def _received(self, arrival: Arrival, now: float) -> None:
        """P says something of it: so it has received `Reserved`."""
        if arrival.lease_from is None:
            arrival.lease_from = arrival.reserved_at
        if arrival.stage is Stage.RESERVED:
            self._on_the_way.begins(arrival, now)
            arrival.stage, arrival.since = Stage.FETCHING, now

    def _name_pages(self, arrival: Arrival, first: int, blocks: bytes, now: float) -> bool:
        named = self._tokens(blocks, bound=1 << 31)
        if first > len(arrival.pages) or first < 0 or first + len(named) > arrival.num_pages:
            self._cannot_be(arrival, f"pages {first} to {first + len(named)} of {arrival.num_pages}", now)
            return False
        arrival.pages[first:] = named
        return True

    def _tokens(self, data: bytes, bound: int | None = None) -> array[int]:
        """Non-negative numbers below `bound` (the vocabulary), or nothing."""
        try:
            numbers = unpack_int32(data)
        except MalformedMessage:
            return array("i")
        valid = all(0 <= number < (bound or self._limits.vocab_size) for number in numbers)
        return numbers if valid else array("i")

    def _all_named(self, arrival: Arrival) -> bool:
        return len(arrival.pages) == arrival.num_pages

    def _advance(self, arrival: Arrival, now: float) -> None:
        """Pages of it came, or P said more of them: who awaited these goes on, and it may be ready itself."""
        for other in self._on_the_way.came(arrival):
            other.moved = now
            self._advance(other, now)
        all_here = not (arrival.fetches or arrival.awaits or arrival.owes)
        if arrival.handed and all_here and arrival.stage is Stage.FETCHING:
            arrival.stage, arrival.since = Stage.READY, now
            self._counters.fetch_tail_seconds += now - arrival.handed_at
            self._counters.tails.add(now - arrival.handed_at)
            self._courier.send(arrival.peer, Taken(arrival.id, arrival.attempt))
            self._on_the_way.leave(arrival)

    def _fail(self, arrival: Arrival, why: str, now: float, *, reply: Reply | None = None) -> None:
        """Its pages cannot be had.  `reply`: what P is told if it is not the usual."""
        if not arrival.handed:
            self._give_up(arrival, why, now, reply=reply or Reply.CANCEL)
            return
        request = arrival.request
        about = {"request_id": request.name or request.id}
        log.info("computing request %s again: %s", about["request_id"], why, extra=about)
        self._counters.recomputed[why] += 1
        note(request, now, "recompute", text=why)
        usual = Reply.TAKEN if arrival.stage is Stage.FETCHING else Reply.NOTHING
        self._close(arrival, reply or usual, now)
        request.advance(Event.RECOMPUTE)
        self._scheduler.enqueue(request)

    def _give_up(self, arrival: Arrival, why: str, now: float, *, reply: Reply = Reply.CANCEL) -> None:
        """Before the request is ours: P does something else."""
        if arrival.stage is not Stage.CLOSING:
            self._counters.given_up[why] += 1
            arrival.reason = why
            self._close(arrival, reply, now)

    def _cannot_be(self, arrival: Arrival, what: str, now: float) -> None:
        self._violation(f"peer {arrival.peer.incarnation}", what)
        self._give_up(arrival, "protocol violation", now)

    def _close(self, arrival: Arrival, reply: Reply, now: float) -> None:
        arrival.stage, arrival.since, arrival.reply = Stage.CLOSING, now, reply
        self._on_the_way.leave(arrival)
        self._scheduler.forgo(arrival.key)
        if not arrival.fetches:
            self._closed(arrival)
            return
        self._scheduler.ending[arrival.key] = None
        arrival.closing = Silence(self._config.step_timeout_s, now)
        self._alarm.note(arrival.deadline)
        self.fetches.drop(arrival)

    def _closed(self, arrival: Arrival) -> None:
        """No rank touches its blocks any more."""
        self._on_the_way.gone(arrival)
        self._scheduler.give_up(arrival.key)
        id, attempt = arrival.id, arrival.attempt
        match arrival.reply:
            case Reply.CANCEL:
                self._courier.send(arrival.peer, Cancel(id, attempt, by_p=False, reason=arrival.reason))
            case Reply.CANCELLED:
                self._courier.send(arrival.peer, Cancelled(id, attempt, by_p=True))
            case Reply.TAKEN:
                self._courier.send(arrival.peer, Taken(id, attempt))
        self._forget(arrival)

    def _forget(self, arrival: Arrival) -> None:
        del self._arrivals[arrival.key[1:]]
        if not self._arrivals:
            self._alarm.at = None
            self._renew_at.clear()

    def _renew(self, peer: str, now: float) -> None:
        """Renews the leases of everything that still comes from this peer."""
        needed = []
        for arrival in list(self._arrivals.values()):
            if arrival.peer.incarnation != peer or arrival.stage not in (Stage.RESERVED, Stage.FETCHING):
                continue
            idle = arrival.stage is Stage.RESERVED and now >= arrival.reserved_at + arrival.lease_s
            if idle and (self._scheduler.in_demand or len(self.credits)):
                self._give_up(arrival, "idle, and others wait", now)
            else:
                needed.append(arrival)
        self._renew_at.pop(peer, None)
        if needed:
            self._renew_at[peer] = now + min(arrival.lease_s for arrival in needed) / 3
            for arrival in needed:
                arrival.listed = now if arrival.listed is None else arrival.listed
            self._courier.send(needed[0].peer, Renew(now, [(a.id, a.attempt) for a in needed]))

    def _promise(self) -> None:
        self._scheduler.promise(self.credits.promised_slots, self.credits.promised_blocks)
