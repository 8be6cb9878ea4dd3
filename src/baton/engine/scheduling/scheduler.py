"""The scheduler: which requests are admitted, get more blocks, are preempted.

Pure: the core calls `enqueue`, `progress`, `computed` and `release` as things happen, and `decide` returns
what the engine has to tell the worker.  `decide` depends on the books alone, never on how often or when it is
called: calling it twice in a row decides nothing the second time.

| who | decides or knows | file |
| --- | --- | --- |
| `Admissions` | which request gets a slot, with which blocks, and what it waits for | `admission.py` |
| `Room` | who has which slot, what is promised, how much room is left | `room.py` |
| `Sharing` | which blocks of a request there are already | `sharing.py` |
| `Scheduler`, here | which request gets more blocks, and which one gives way | |

**Rank.** A request's rank is (priority, number of its coming); smaller is served first (`departures.py`
says which requests let later ones pass).

**Blocks.** A request that was taken needs at most `limit` tokens of KV, which fit in the pool (`validation`).
At admission it gets the blocks of all its tokens and of `lookahead` tokens more. When less than `lookahead`
tokens of room are left it *wants* more. Wants are served by rank, and before anybody is admitted. Only a want
that has become urgent (next to no room: the slot is about to skip steps) makes another request give way, that
is, preempts it.

**Giving way.** The victim is the running request of the largest rank, which may be the one that wants: an
older request is never preempted for a younger one. A request whose blocks others wait for has the smallest
rank of all these, and the others go before it. Its blocks stay its own until the worker has closed it;
until then those that its release will make available are *coming*, and an urgent want that coming blocks will
satisfy chooses no further victim. What is being closed is not chosen again. Blocks of hand-overs that only
wait for their last reader (`ending`) are coming, as those of slots that are being closed.

**No deadlock, no starvation.** Take the request r of the smallest rank among all that are alive.
(1) r runs. It is the victim only if nothing else runs. Then every block that r does not hold is free, cached
or held by something that is being closed, that is, available or coming; and since `limit` fits in the pool
there is one if r wants one. So r never gives way, and its wants are served first: by an available block, by a
coming one (the worker closes what it was told to close, also while no step runs), or by a victim's. r ends
after at most `max_tokens` steps.  (If r follows, what it follows runs and wants no blocks for its prompt.)
(2) r waits. When it is the head, nobody else is admitted. What runs ends or gives way by the argument of (1),
applied to the smallest rank that runs. When nothing runs and nothing is being closed, the headroom asks only
for r's own `limit`, which fits: r is admitted, if it was not before. And r becomes the head: of its priority
there are finitely many that ran before, and with each newcomer of another flow that is admitted the fair
queue's clock moves on, and the tag of that flow, while that of r's flow stands still.
By induction every request ends, unless smaller priorities keep arriving, which is what priorities mean.
(What departs leaves, stays, or ends within the deadlines of `departures.py`; then no slot is kept.)
Reservations and exported pages are neither available nor somebody's who could give way; but each of them has
a deadline of its own (a lease, or `arrivals.py`'s limit for an idle one when somebody waits here), so the
argument holds after that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.engine.request import NEVER, Request
from baton.engine.scheduling.admission import Admissions
from baton.engine.scheduling.decisions import Admission, Decisions
from baton.engine.scheduling.headroom import Headroom
from baton.engine.scheduling.in_flight import InFlight
from baton.engine.scheduling.ledger import Key, Ledger
from baton.engine.scheduling.prefix import PrefixIndex
from baton.engine.scheduling.room import STAYING, Room
from baton.engine.scheduling.sharing import Sharing
from baton.engine.states import Event, State
from baton.protocol.rules.fair_queue import Rank

URGENT_TOKENS = 2
"""A want is urgent when there is room for fewer tokens than this: about what the worker samples while a
preemption travels."""
MIN_LOOKAHEAD = 8
"""Tokens: what a fast worker may sample before the engine reads of it."""


class Scheduler:
    """Schedules requests on `max_num_seqs` slots over the blocks of one ledger.

    `prefix` None: no prefix caching.  `max_model_len` bounds every request (`validation`).  `prefill_ahead`:
    tokens of prompts that the worker is given ahead of computing them; None: no bound.  `in_order`: it
    computes them in the order in which it was given them.  `drafts`: of a slot in a step, at most.
    """

    def __init__(
        self,
        ledger: Ledger,
        prefix: PrefixIndex | None,
        *,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        admission_headroom: int | None = None,
        prefill_ahead: int | None = None,
        in_order: bool = True,
        drafts: int = 0,
    ) -> None:
        self.ledger = ledger
        self.prefix = prefix
        self.block_size = block_size
        lookahead = max(block_size, MIN_LOOKAHEAD) + drafts
        self.headroom = Headroom(lookahead, max_model_len, admission_headroom)
        self.room = Room(
            ledger, self.headroom, block_size=block_size, max_num_seqs=max_num_seqs, lookahead=lookahead
        )
        self.slots = self.room.slots
        self._in_flight = InFlight(ledger, block_size, self.slots, in_order=in_order)
        self._sharing = Sharing(ledger, prefix, self._in_flight, block_size)
        self.admissions = Admissions(self.room, self._sharing, self._in_flight, prefill_ahead)
        self.paused = False
        """While paused nothing is admitted and nobody must give way."""
        self.draining = False
        """While draining nothing is admitted, and nothing runs that is not being closed."""
        self.ending: dict[Key, None] = {}
        """Hand-overs whose blocks become available without anybody's doing."""
        self._wanting: dict[int, Request] = {}
        self._stale = False
        """Something changed that `decide` must look at, besides what `Admissions.due` says."""

    @property
    def lookahead(self) -> int:
        return self.room.lookahead

    @property
    def arriving(self) -> dict[Key, Request]:
        """Requests with a reservation, by its key in the ledger."""
        return self.room.arriving

    @property
    def num_waiting(self) -> int:
        return len(self.admissions.line)

    @property
    def num_occupied(self) -> int:
        """Slots that run or are being closed: those of which the worker knows."""
        return self.room.num_taken - self.num_following

    @property
    def num_following(self) -> int:
        """Slots whose requests wait for blocks that others compute."""
        return len(self.admissions.following)

    @property
    def in_demand(self) -> bool:
        """Whether a request of this instance lacks blocks."""
        return bool(self.admissions.line or self._wanting)

    @property
    def due(self) -> bool:
        """Whether `decide` could decide something."""
        return self._stale or self.admissions.due

    def waiting_requests(self) -> Iterator[Request]:
        """Those that wait for admission, in no order."""
        return iter(self.admissions.line)

    def gauges(self) -> dict[str, Any]:
        """For statistics: numbers of requests, blocks by state, the headroom."""
        running = sum(1 for request in self.slots if request and request.state is State.RUNNING)
        return {
            "running": running,
            "closing": self.num_occupied - running,
            "following": self.num_following,
            "waiting": self.num_waiting,
            "arriving": len(self.arriving),
            "paused": self.paused,
            "headroom_tokens": self.headroom.tokens,
            "blocks": self.ledger.counts(),
        }

    # -- what happened

    def enqueue(self, request: Request) -> None:
        """A request in state `waiting`, new or preempted, wants to run."""
        self.admissions.enqueue(request)

    def withdraw(self, request: Request) -> None:
        """A request that waited is gone (its state says so)."""
        self.admissions.withdraw(request)

    def progress(self, request: Request) -> None:
        """A running request has reached its `watermark`: it has more tokens."""
        if request.state is not State.RUNNING:
            request.watermark = NEVER
            return
        room = self.room
        self.admissions.index(request, len(request.tokens) - 1)
        if room.spare_tokens(request) < room.lookahead and request.held < room.blocks(request.limit):
            self._wanting[request.slot] = request
            self._stale = True
        self._set_watermark(request)

    def computed(self, request: Request, num_tokens: int) -> None:
        """A report said that the KV of the first `num_tokens` tokens is computed."""
        self.admissions.computed(request, num_tokens)
        if request.state is State.RUNNING:
            self._set_watermark(request)

    def stop_running(self, request: Request) -> None:
        """A request that ran is being closed: it wants nothing more."""
        self._wanting.pop(request.slot, None)
        self.admissions.computes_no_more(request)
        request.watermark = NEVER

    def release(self, request: Request) -> None:
        """The worker has closed the request's epoch, or never heard of it: its slot and blocks are free.

        Those that follow it, and those that follow them, wait again."""
        self.stop_running(request)
        self.admissions.release(request)

    def reset_prefix(self) -> int:
        """Forgets what was computed so far, also by what runs now.  Returns the number of blocks."""
        for request in self.slots:
            if request is not None:
                request.indexing = False
                if request.state is State.RUNNING:
                    self._set_watermark(request)
        for request in self.arriving.values():
            request.indexing = False
        return self._sharing.forget()

    def keep_slots(self, wanted: bool) -> None:
        """Whether anybody wants to depart: an eighth of the slots is left to those."""
        self._stale = self.room.keep_slots(wanted) or self._stale

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._stale = True

    def drain(self) -> list[Request]:
        """Everything that runs must give way, and nothing is admitted until `end_drain`.

        Returns who must be told.  Says nothing about the headroom: no admission was premature.
        """
        self.draining = True
        for slot in list(self.admissions.following):
            self._give_up(slot)
        victims = [request for request in self.slots if request and request.state is State.RUNNING]
        for request in victims:
            request.advance(Event.PREEMPT)
            self.stop_running(request)
        return victims

    def end_drain(self) -> None:
        self.draining = False
        self._stale = True

    # -- hand-overs

    def try_reserve(
        self, key: Key, request: Request, coming: Sequence[int] = (), *, promised: bool = False
    ) -> int | None:
        """As `Admissions.reserve`; None also if nothing is admitted now."""
        if self.paused or self.draining or self._wanting:
            return None
        return self.admissions.reserve(key, request, coming, promised=promised)

    def seat(self, key: Key) -> Admission:
        """The pages of a request with a reservation are here: it runs."""
        admission = self.admissions.seat(key)
        self.progress(admission.request)
        return admission

    def forgo(self, key: Key) -> None:
        """The request with this reservation does not arrive; its blocks are still in use."""
        self.admissions.forgo(key)

    def give_up(self, key: Key) -> None:
        """Nobody uses the blocks of this hand-over any more."""
        self.ending.pop(key, None)
        self.forgo(key)
        self.ledger.give_up(key)
        self._stale = True

    def promise(self, slots: int, blocks: int) -> None:
        """So many slots and blocks, in all, were promised to requests of other instances."""
        self._stale = self.room.promise(slots, blocks) or self._stale

    def estimate(self, request: Request) -> int:
        """Blocks that a reservation takes at most, room for its growth included."""
        return self.room.estimate(request)

    def has_room(self, blocks: int) -> bool:
        """Whether a request of another instance that needs so many blocks could come now."""
        return not (self.paused or self.draining or self.in_demand) and self.room.has(blocks)

    # -- what to do

    def decide(self) -> Decisions:
        """Serves wants, makes room for urgent ones, admits.  Idempotent."""
        decisions, admissions = Decisions(), self.admissions
        self._stale = admissions.due = False
        if self._wanting:
            self._serve_wants(decisions)
            while self._wanting and not self.paused:
                self._give_way(decisions)
                if not self.ledger.available:
                    break
                self._serve_wants(decisions)  # from what those had that followed
        begins = not self.paused and not self.draining
        admissions.decide(decisions, begins=begins, admits=begins and not self._wanting)
        for admission in decisions.admitted:
            self._set_watermark(admission.request)
        decisions.lent = self._in_flight.take_lent()
        return decisions

    def _serve_wants(self, decisions: Decisions) -> None:
        for request in sorted(self._wanting.values(), key=lambda request: request.rank):
            available = self.ledger.available
            if not available:
                return
            missing = self.room.target(request) - request.held
            blocks = self.ledger.extend(request.slot, min(missing, available))
            request.held += len(blocks)
            decisions.grown.append((request, blocks))
            if len(blocks) == missing:
                del self._wanting[request.slot]
            self._set_watermark(request)

    def _give_way(self, decisions: Decisions) -> None:
        """Chooses victims until the coming blocks are enough for one more block per urgent want.  One that
        follows is told nothing: its blocks are available at once."""
        spare = self.room.spare_tokens
        urgent = {slot for slot, request in self._wanting.items() if spare(request) < URGENT_TOKENS}
        if not urgent:
            return
        closing = [
            slot for slot, request in enumerate(self.slots) if request and request.state not in STAYING
        ]
        coming = self.ledger.yield_of(closing, self.ending)
        while len(urgent) > coming + self.ledger.available:
            victim = max(
                (request for request in self.slots if request and request.state in STAYING),
                key=_last_to_stay,
            )
            self.headroom.on_preemption()
            if victim.state is State.FOLLOWING:
                decisions.gave_up.append(victim)
                self._give_up(victim.slot)
            else:
                victim.advance(Event.PREEMPT)
                self.stop_running(victim)
                decisions.preempted.append(victim)
                urgent.discard(victim.slot)
                closing.append(victim.slot)
            coming = self.ledger.yield_of(closing, self.ending)

    def _give_up(self, slot: int) -> None:
        """A request that follows, if there is one on this slot, waits again."""
        request = self.slots[slot]
        if request is not None and request.state is State.FOLLOWING:
            request.advance(Event.GIVE_UP)
            self.release(request)
            self.enqueue(request)

    def _set_watermark(self, request: Request) -> None:
        """The next number of tokens at which it wants blocks, becomes urgent, or has filled a block."""
        mark, room, size = NEVER, self.room, self.block_size
        if request.held < room.blocks(request.limit):
            spare = URGENT_TOKENS if request.slot in self._wanting else room.lookahead
            mark = request.held * size - spare + 1
        if request.indexing:
            mark = min(mark, (request.indexed + 1) * size + 1)
        request.watermark = max(mark, len(request.tokens) + 1)


def _last_to_stay(request: Request) -> tuple[Rank, bool]:
    """The largest one gives way: who waits for a request goes before that one, as they are equally urgent."""
    return request.urgency, request.urgency == request.rank
