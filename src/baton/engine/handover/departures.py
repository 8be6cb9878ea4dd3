"""Departures: requests that this engine prefills and hands over to another one to decode (its side is P).

Theory.  A request with `decoders` is *prepared* while it holds nothing here: the first decoder is asked for
room (`Reserve`), then the next one, and so on.  At most `max_preparing` requests are asking, or hold another
engine's room without having been admitted here; the rest wait by priority, those that ran before first, and
fairly by flow.  A decoder that refuses or says
nothing costs only the request that asked it:

* one that has not answered within `reserve_timeout_s` is passed over, and may be asked by one request at a
  time from then on; each answer in time doubles that (a window, as of TCP);
* a request that all refused waits for credit without holding others back, for `credit_wait_s`, and then stays
  here.

A request that stays for want of room elsewhere is served as if `max_waiting` requests had come before it.
It will keep a slot here for its whole answer, and one with a reservation needs it for a moment only, while
room is kept for it elsewhere.  Served in the order of their coming, those that stay would take all slots of
an instance whose decoders are full, the decoders would wait for it with empty slots, and more would stay.

Each `Reserve` is an *attempt*.  What happens between this engine and the decoder is the attempt's state; what
happens here is the request's (`request.py`), and the two are independent: a decoder may be lost, and another
one asked, while the request waits or is computed.

| attempt | D may be reading | waits for | leaves by |
| --- | --- | --- | --- |
| asking | nothing | an answer | `Reserved` → reserved; `Refused` → credit, or over; timeout, lost → over |
| credit | nothing | `Credit` | `Credit` → over (a new attempt asks); the request stays → over |
| reserved | pages that `Progress` named | the first token | `handed_over` → handed; lost, lease → over |
| handed | all pages | D's word | `Taken`, `Cancel`, lease → over; lost → ending |
| ending | what it named | D's word | `Cancelled`, `Cancel`, lease over → over |

An attempt that ends while D may be reading is *ending*: the pages that it named stay as they are until D has
said that its fetches are closed, or until the lease, counted from the last `Renew` that was *received*, is
over.  So if the slot closes before (first token, preemption, cancellation), these blocks are exported
(`Ledger.export`).  The loss of a connection says nothing about fetches; only a process known to be dead does.

The worker may sample the first token before it is known where the request decodes.  This engine keeps it, and
sends it to D in `Handoff`, or to the gateway when the request stays.  Once anything was sent to the gateway
the request never departs any more, because two instances cannot send in one order.

| a handed request | becomes |
| --- | --- |
| `Taken` | D's: gone here, and P tells the gateway where it is |
| `Cancel` from D | ours again: it never got there; it waits with its tokens, as after a preemption |
| peer lost, lease over | answered with `lost`: whether D has it, only D and the gateway know |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from baton.engine.counters import Counters
from baton.engine.endings import finish
from baton.engine.handover.attempts import Attempts
from baton.engine.handover.courier import Courier
from baton.engine.handover.records import Attempt, Departure, Phase, departure_of
from baton.engine.noting import note
from baton.engine.outbox import Outboxes
from baton.engine.request import Request
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.states import Event, State
from baton.protocol.codec import pack_int32
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.handover import (
    Cancel,
    Cancelled,
    Credit,
    Handoff,
    InstanceSource,
    Progress,
    Refused,
    Renew,
    Renewed,
    Reserved,
    Routed,
    Taken,
)
from baton.protocol.messages.requests import Target
from baton.protocol.params.sampling import LISTED_LOGPROBS
from baton.protocol.rules.fair_queue import FairLine

log = logging.getLogger(__name__)


class Departures:
    """Those of one engine.  `source()` says where its pages are.  `violation(sender, what)` is told what
    cannot be."""

    def __init__(
        self,
        config: InstanceConfig,
        courier: Courier,
        scheduler: Scheduler,
        outboxes: Outboxes,
        counters: Counters,
        source: Callable[[], InstanceSource | None],
        violation: Callable[[str, str], None],
        secret: bytes,
    ) -> None:
        self._config = config
        self._courier = courier
        self._scheduler = scheduler
        self._outboxes = outboxes
        self._all_counters = counters
        self._counters = counters.handovers
        self._source = source
        self._violation = violation
        self._ids = 0
        self._live: dict[int, Departure] = {}
        """Those that are not over."""
        self._preparing: dict[int, Departure] = {}
        """Of those, the ones whose request is being prepared."""
        self._queue: FairLine[Departure] = FairLine()
        self._num_placed = 0
        self.attempts = Attempts(config, courier, scheduler, secret)

    # -- what the core needs

    @property
    def num_preparing(self) -> int:
        """Requests that wait for a decoder's answer and are not in the scheduler's queue yet."""
        return len(self._preparing)

    def preparing(self) -> Iterator[Request]:
        return (departure.request for departure in self._preparing.values())

    @property
    def next_deadline(self) -> float | None:
        return self.attempts.next_deadline

    def begin(self, request: Request, decoders: tuple[Target, ...]) -> bool:
        """Takes a new request that is to be handed over.  False: that is not possible, it stays."""
        if (
            not decoders
            or not self._courier.endpoint
            or self._source() is None
            or self._scheduler.draining
            or request.pools
            or (request.sampling.logprobs or 0) > LISTED_LOGPROBS  # (a message holds few of those)
            or request.wants_prompt_logprobs  # they would have to come from here, in order with the tokens
            or request.stopping.max_tokens - request.num_generated < 2  # the first token is the last
        ):
            return False
        self._ids += 1
        departure = Departure(self._ids, request, decoders)
        request.advance(Event.PREPARE)
        request.departure = departure
        self._outboxes.redirect(request, departure.aside)
        self._live[departure.id] = self._preparing[departure.id] = departure
        self._scheduler.keep_slots(bool(self._live))
        level = (request.rank[0], not request.continued)
        self._queue.push(departure, departure.id, level, request.flow)
        self._counters.departures += 1
        return True

    def fill(self, now: float) -> None:
        """Lets those ask that have a place now."""
        while self._num_placed < self._config.max_preparing:
            departure = self._queue.head()
            if departure is None:
                return
            self._queue.take(departure.id, len(departure.request.tokens))
            self._ask(departure, now)

    def departs(self, request: Request) -> bool:
        """Whether it is to be closed after its first token."""
        departure = departure_of(request)
        return departure is not None and not departure.over

    def stay_all(self, why: str) -> None:
        """No request departs that was not handed over yet."""
        for departure in list(self._live.values()):
            if departure.request.state is not State.HANDED:
                self._stay(departure, why)

    def on_clock(self, now: float) -> None:
        if not self.attempts.due(now):
            return
        for attempt in self.attempts.overdue(now):
            if self.attempts.alive(attempt):
                self._overdue(attempt, now)
        self.attempts.rearm()

    @property
    def num_queued(self) -> int:
        """Requests that wait for a place of `max_preparing`."""
        return len(self._queue)

    # -- what happens to the request here

    def admitted(self, request: Request, num_computed: int) -> None:
        """It was admitted with so many leading tokens from the prefix cache."""
        departure = departure_of(request)
        if departure is not None and not departure.over:
            self._unplace(departure)
            departure.complete = num_computed // self._config.block_size
            departure.layers = 0
            self._report(departure)

    def computed(self, request: Request, num_tokens: int) -> None:
        """So many leading tokens are computed."""
        departure = departure_of(request)
        # (When all are, the first token follows in the same report, and with it Handoff, which says it all.)
        if departure is not None and not departure.over and num_tokens < len(request.tokens):
            departure.complete = max(departure.complete, num_tokens // self._config.block_size)
            self._report(departure)

    def layers_computed(self, request: Request, layers: int) -> None:
        """The last chunk is computed in so many layers."""
        departure = departure_of(request)
        if departure is not None and not departure.over and layers > departure.layers:
            departure.layers = layers
            self._report(departure)

    def withdrawn(self, request: Request) -> None:
        """The gateway wants it no more; its slot may still be open."""
        departure = departure_of(request)
        if departure is not None:
            self._finish(departure)

    def keep(self, request: Request) -> None:
        """Its slot is about to be released: what D may be reading stays as it is."""
        departure = departure_of(request)
        if departure is None:
            return
        current = departure.current
        if request.state is State.HANDED and current is not None and current.phase is Phase.RESERVED:
            num_tokens = len(request.tokens) - len(departure.aside.tokens)
            self.attempts.export(current, self._num_pages(num_tokens))
        for attempt in departure.attempts.values():
            if attempt.named and not attempt.kept:
                self.attempts.export(attempt, attempt.named)

    def closed(self, request: Request, now: float) -> None:
        """Its slot was released, and its state is what follows from that."""
        departure = departure_of(request)
        if departure is None:
            return
        if request.state is State.HANDED:
            self._hand_over(departure, now)
        elif request.state is State.WAITING:
            self._preempted(departure, now)
        else:
            self._pour(departure)
            self._finish(departure)
        if departure.over:
            request.departure = None

    def _hand_over(self, departure: Departure, now: float) -> None:
        request, attempt, aside = departure.request, departure.current, departure.aside
        if attempt is None or attempt.phase is not Phase.RESERVED or not aside.tokens:
            request.advance(Event.RETURNED)
            self._scheduler.enqueue(request)
            if not departure.over:
                self._stay(departure, "unprepared")
            return
        self.attempts.grant(attempt, attempt.kept)
        admitted = request.arrived if request.first_admitted is None else request.first_admitted
        handoff = Handoff(
            departure.id,
            attempt.number,
            first=attempt.named,
            blocks=pack_int32(attempt.kept[attempt.named :]),
            tokens=pack_int32(aside.tokens),
            logprobs=[logprobs for _, logprobs in aside.logprobs],
            num_cached=request.num_cached,
            queued_s=admitted - request.arrived,
        )
        attempt.named = len(attempt.kept)
        note(request, now, "handed", attempt.named, len(aside.tokens), text=attempt.target.incarnation)
        self.attempts.enter(attempt, Phase.HANDED, now)
        for _, routes in aside.routes:
            self._courier.send(attempt.target, Routed(departure.id, attempt.number, routes))
        self._courier.send(attempt.target, handoff)
        self._counters.handed += 1

    def _preempted(self, departure: Departure, now: float) -> None:
        """It waits again.  Pages that were named are not where they were: D must begin anew.

        Also if none was named: D has heard that the request began here, and would keep its room for as long
        as it waits, even if it waits for what D waits for."""
        departure.complete = departure.layers = 0
        attempt = departure.current
        if departure.over or attempt is None or attempt.phase is not Phase.RESERVED:
            return
        self.attempts.end(attempt, "preempted")
        departure.following = 0
        self._ask(departure, now)

    # -- what D says

    def reserved(self, peer: str, message: Reserved, now: float) -> None:
        attempt = self.attempts.find(peer, message.id, message.attempt)
        if attempt is None or attempt.phase in (Phase.CREDIT, Phase.ENDING):
            self._courier.answer(peer, Cancel(message.id, message.attempt, True, "it is over"))
            return
        if attempt.phase is not Phase.ASKING:
            return  # said twice
        departure = attempt.departure
        self._counters.reserved += 1
        self._counters.reserve_seconds += now - attempt.since
        note(departure.request, now, "room", attempt.number, message.num_cached_blocks, text=peer)
        if problem := self.attempts.reserved(attempt, message, now):
            self._violation(peer, problem)
        for other in list(departure.attempts.values()):
            if other.phase is Phase.CREDIT:
                self.attempts.end(other, "another one has room")
        departure.credit_until = None
        self._settle(departure.request)
        if departure.request.state is State.RUNNING:
            self._report(departure)

    def refused(self, peer: str, message: Refused, now: float) -> None:
        attempt = self.attempts.find(peer, message.id, message.attempt)
        if attempt is None or attempt.phase is not Phase.ASKING:
            if message.credit and attempt is None:
                self._courier.answer(peer, Cancel(message.id, message.attempt, True, "it is over"))
            return
        departure = attempt.departure
        self._counters.refused[message.code] += 1
        note(departure.request, now, "no_room", attempt.number, text=message.code)
        self.attempts.answered(peer)
        log.debug("%s refuses %s: %s", peer, departure.request.name, message.message)
        if message.credit:
            self.attempts.enter(attempt, Phase.CREDIT, now)
            departure.current = None
        else:
            self.attempts.forget(attempt)
        self._ask(departure, now)

    def credit(self, peer: str, message: Credit, now: float) -> None:
        attempt = self.attempts.find(peer, message.id, message.attempt)
        if attempt is None or attempt.phase is not Phase.CREDIT or attempt.departure.current is not None:
            if attempt is not None and attempt.phase is Phase.CREDIT:
                self.attempts.forget(attempt)
            self._courier.answer(peer, Cancel(message.id, message.attempt, True, "needed no more"))
            return
        self._counters.credits += 1
        self.attempts.forget(attempt)
        self._try(attempt.departure, attempt.target, now)

    def taken(self, peer: str, message: Taken, now: float) -> None:
        attempt = self.attempts.find(peer, message.id, message.attempt)
        if attempt is None:
            return
        if attempt.phase is Phase.ENDING:
            self.attempts.release(attempt)
            return
        if attempt.phase is not Phase.HANDED:
            self._violation(f"peer {peer}", f"Taken of a hand-over that is {attempt.phase.value}")
            return
        departure, request = attempt.departure, attempt.departure.request
        self._counters.taken += 1
        self._counters.taken_seconds += now - attempt.since
        self._counters.takes.add(now - attempt.since)
        note(request, now, "taken", text=peer)
        request.advance(Event.TAKEN)
        finish(self._outboxes, self._all_counters, request, "handed_over", peer)
        self.attempts.release(attempt)
        self._finish(departure)

    def cancel(self, peer: str, message: Cancel, now: float) -> None:
        """D's side is over, and nothing of it reads our pages."""
        attempt = self.attempts.find(peer, message.id, message.attempt)
        self._courier.answer(peer, Cancelled(message.id, message.attempt, by_p=False))
        if attempt is not None:
            log.debug("%s gives up %s: %s", peer, attempt.departure.request.name, message.reason)
            self._over(attempt, now)

    def cancelled(self, peer: str, message: Cancelled) -> None:
        attempt = self.attempts.find(peer, message.id, message.attempt)
        if attempt is not None and attempt.phase is Phase.ENDING:
            self.attempts.release(attempt)

    def renew(self, peer: str, message: Renew, now: float) -> None:
        known, unknown = [], []
        for number, count in message.handovers:
            attempt = self.attempts.find(peer, number, count)
            if attempt is None or attempt.phase not in (Phase.RESERVED, Phase.HANDED):
                unknown.append((number, count))
            else:
                self.attempts.renew(attempt, now)
                known.append(attempt)
        self.attempts.extend(known)
        self._courier.answer(peer, Renewed(message.stamp, unknown))

    def peer_lost(self, peer: str, now: float, dead: bool) -> None:
        """The connection is gone; `dead`: so is the process, and nobody uses what its workers still read."""
        self.attempts.forget_window(peer)
        for attempt in self.attempts.of(peer):
            if not self.attempts.alive(attempt):
                continue
            if dead or not attempt.named:
                if attempt.phase is Phase.HANDED:
                    self._lose(attempt, f"{peer} died")
                self._over(attempt, now)
            elif attempt.phase is Phase.HANDED:
                self._lose(attempt, f"the connection to {peer} is lost")
                self.attempts.enter(attempt, Phase.ENDING, now)
            elif attempt.phase is Phase.RESERVED:
                departure = attempt.departure
                self.attempts.enter(attempt, Phase.ENDING, now)
                departure.current = None
                self._ask(departure, now)

    # -- attempts

    def _ask(self, departure: Departure, now: float) -> None:
        """Asks the next decoder, or decides what follows when there is none."""
        while departure.following < len(departure.decoders):
            target = departure.decoders[departure.following]
            departure.following += 1
            if self.attempts.may_ask(target):
                self._try(departure, target, now)
                return
            self._counters.refused["passed_over"] += 1
        if any(attempt.phase is Phase.CREDIT for attempt in departure.attempts.values()):
            self.attempts.wait_for_credit(departure, now + self._config.credit_wait_s)
            self._unplace(departure)
        else:
            self._stay(departure, "refused", crowded=True)

    def _try(self, departure: Departure, target: Target, now: float) -> None:
        source = self._source()
        if source is None:
            raise RuntimeError("a departure of an instance whose pages nobody can fetch")
        attempt = self.attempts.begin(departure, target, source, now)
        note(departure.request, now, "asks", attempt.number, text=target.incarnation)
        self._counters.reserves += 1
        if not departure.placed and departure.request.state in (State.PREPARING, State.WAITING):
            departure.placed = True
            self._num_placed += 1

    def _report(self, departure: Departure) -> None:
        """Tells D which pages it can fetch now."""
        attempt, request = departure.current, departure.request
        if attempt is None or attempt.phase is not Phase.RESERVED or request.state is not State.RUNNING:
            return
        pages = self._num_pages(len(request.tokens)) if departure.layers else departure.complete
        table = self._scheduler.ledger.table(request.slot)
        blocks = table[attempt.named : pages]
        if blocks:
            self.attempts.grant(attempt, table[: self._num_pages(len(request.tokens))])
        self._courier.send(
            attempt.target,
            Progress(
                departure.id,
                attempt.number,
                attempt.named,
                pack_int32(blocks),
                departure.complete,
                departure.layers,
            ),
        )
        attempt.named = max(attempt.named, pages)

    def _overdue(self, attempt: Attempt, now: float) -> None:
        target = attempt.target
        if attempt.phase is Phase.CREDIT:
            self._stay(attempt.departure, "no_credit", crowded=True)
            return
        if attempt.phase is Phase.ASKING:
            self._counters.refused["no_answer"] += 1
            self.attempts.unanswered(target.incarnation)
            log.info("%s has not answered for %s s: passed over", target.incarnation, now - attempt.since)
        elif attempt.phase is Phase.HANDED:
            self._lose(attempt, f"{target.incarnation} was silent for {self._config.lease_s:g} s")
        if attempt.phase is not Phase.ENDING:
            reason = "no answer in time" if attempt.phase is Phase.ASKING else "the lease is over"
            self.attempts.tell(attempt, reason)
        self._over(attempt, now)

    def _over(self, attempt: Attempt, now: float) -> None:
        """D holds and reads nothing of this attempt any more; what becomes of the request?"""
        departure, phase, request = attempt.departure, attempt.phase, attempt.departure.request
        self.attempts.release(attempt)
        if departure.over:
            return
        if phase is Phase.HANDED:
            self._counters.returned += 1
            note(request, now, "returned")
            request.advance(Event.RETURNED)
            self._scheduler.enqueue(request)
            self._stay(departure, "returned")
        elif phase in (Phase.ASKING, Phase.RESERVED) or departure.current is None:
            self._ask(departure, now)

    def _lose(self, attempt: Attempt, why: str) -> None:
        """It is not known whether D has the request: the gateway must see."""
        request = attempt.departure.request
        about = {"request_id": request.name or request.id}
        log.warning("%s was handed over, then %s: goes on elsewhere", about["request_id"], why, extra=about)
        self._counters.lost += 1
        request.advance(Event.LOST)
        finish(self._outboxes, self._all_counters, request, "lost", f"handed over, then {why}")
        self._finish(attempt.departure, tell=False)

    def _stay(self, departure: Departure, why: str, *, crowded: bool = False) -> None:
        """The request decodes here.  `crowded`: because there is no room elsewhere."""
        request = departure.request
        if crowded and request.state is State.PREPARING:
            request.let_pass(self._config.max_waiting)
        self._counters.stayed[why] += 1
        note(request, self._outboxes.now, "stays", text=why)
        self._pour(departure)
        self._finish(departure)
        self._settle(request)
        if request.state is State.WAITING:
            request.departure = None

    def _pour(self, departure: Departure) -> None:
        """What was kept aside is for the gateway, and so is what follows."""
        request = departure.request
        if request.outbox is departure.aside:
            self._outboxes.redirect(request, request.gateway)
            departure.aside.pour(request.gateway)
            self._outboxes.touch(request.gateway)

    def _settle(self, request: Request) -> None:
        if request.state is State.PREPARING:
            departure = departure_of(request)
            if departure is not None:
                self._preparing.pop(departure.id, None)
            request.advance(Event.SETTLE)
            self._scheduler.enqueue(request)

    def _finish(self, departure: Departure, *, tell: bool = True) -> None:
        """The request departs no more; attempts may have to end."""
        departure.over = True
        self._queue.remove(departure.id)
        self._live.pop(departure.id, None)
        self._preparing.pop(departure.id, None)
        self._scheduler.keep_slots(bool(self._live))
        self._unplace(departure)
        for attempt in list(departure.attempts.values()):
            if tell:
                self.attempts.end(attempt, "the request went another way")

    def _unplace(self, departure: Departure) -> None:
        if departure.placed:
            departure.placed = False
            self._num_placed -= 1

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)
