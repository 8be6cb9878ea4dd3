"""The scheduler: which requests are admitted, get more blocks, are preempted.

Pure: the core calls `enqueue`, `progress`, `computed` and `release` as things happen, and `decide` returns
what the engine has to tell the worker.  `decide` depends on the books alone, never on how often or when it is
called: calling it twice in a row decides nothing the second time.

**Order.** A request's rank is (priority, number of its coming); smaller is served first (`departures.py`
says which requests let later ones pass). Waiting requests are admitted by priority; those that ran before
come first, then newcomers, fairly by flow (`waiting.py`). Admission follows that order
strictly: what does not fit blocks everything behind it, so nothing is overtaken for ever.

**No sooner than needed.** The worker computes prompts in the order in which it was given them. So a newcomer
is admitted only while less than `prefill_ahead` tokens of admitted prompts are left to compute: two steps'
worth keeps the worker busy, and a request that comes now waits for no more than that besides those ahead.

**Blocks.** A request that was taken needs at most `limit` tokens of KV, which fit in the pool (`validation`).
At admission it gets the blocks of all its tokens and of `lookahead` tokens more. When less than `lookahead`
tokens of room are left it *wants* more. Wants are served by rank. Only a want that has become urgent (next to
no room: the slot is about to skip steps) makes another request give way, that is, preempts it.

**Giving way.** The victim is the running request of the largest rank, which may be the one that wants: an
older request is never preempted for a younger one. A request whose blocks others wait for has the smallest
rank of all these, and the others go before it. Its blocks stay its own until the worker has closed it;
until then those that its release will make available are *coming*, and an urgent want that coming blocks will
satisfy chooses no further victim. What is being closed is not chosen again.

**Headroom.** A newcomer is admitted if, besides its own blocks, there is room for everybody who runs, the
newcomer included, to grow by H tokens (or to its own limit, if that is nearer). So after an admission
everybody can take H steps before anybody must give way: the price of a premature admission, one prefill, is
spread over H steps of the whole batch. How H is found is told in `headroom.py`.

**Hand-overs.** A request that arrives from another instance (`arrivals.py`) is judged as one that waits here:
it is given a reservation only if nothing waits ahead, a slot is left for it, and the same sum of blocks and
headroom fits. From then on its slot is promised (an admission leaves it alone) and its growth counts as that
of what runs. It is seated without being asked again. Blocks promised to a request of another engine by
a credit (`promise`) count as taken. Blocks of hand-overs that only wait for their last reader (`ending`) are
coming, as those of slots that are being closed.

**Following.** A request whose next blocks are being computed for another one takes those blocks and waits for
them (`in_flight.py`).  It has a slot, counts in every sum as if it ran, and gives way by its rank; as the
worker has not heard of it, it gives way at once.

A request that was to depart and stays, as there was no room elsewhere, takes a slot for its whole answer,
one that departs only for its prefill. Many of the former would keep the latter from the room that is
reserved for them elsewhere, which would stay idle and be refused to others. So they leave `kept_slots` free
while anybody wants to depart.

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
from dataclasses import dataclass, field
from typing import Any

from baton.engine.request import NEVER, Request
from baton.engine.scheduling.headroom import Headroom
from baton.engine.scheduling.in_flight import InFlight, Shared
from baton.engine.scheduling.ledger import Key, Ledger
from baton.engine.scheduling.prefix import PrefixIndex, extend_keys
from baton.engine.scheduling.waiting import WaitingLine
from baton.engine.states import Event, State
from baton.protocol.rules.fair_queue import Rank

URGENT_TOKENS = 2
"""A want is urgent when there is room for fewer tokens than this: about what the worker samples while a
preemption travels."""
_STAYING = (State.FOLLOWING, State.RUNNING)
"""Of those that have a slot: they keep it."""
MIN_LOOKAHEAD = 8
"""Tokens: what a fast worker may sample before the engine reads of it."""


@dataclass(slots=True)
class Admission:
    request: Request
    blocks: list[int]
    num_computed: int
    """Leading tokens that came from the prefix cache."""
    num_followed: int = 0
    """Of those, the ones that another request was computing when this one got its slot."""


@dataclass(slots=True)
class Decisions:
    """What to tell the worker, in this order."""

    grown: list[tuple[Request, list[int]]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    following: list[Request] = field(default_factory=list)
    """They have slots and blocks; the engine sends their `Admit` when the shared blocks are computed."""
    gave_up: list[Request] = field(default_factory=list)
    """Of those that followed: they gave way, and wait again."""
    lent: list[Request] = field(default_factory=list)
    """They run, and are more urgent than before, or less, by those that wait for their blocks."""


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
        self.lookahead = max(block_size, MIN_LOOKAHEAD) + drafts
        self.headroom = Headroom(self.lookahead, max_model_len, admission_headroom)
        self.paused = False
        """While paused nothing is admitted and nobody must give way."""
        self.slots: list[Request | None] = [None] * max_num_seqs
        """Who occupies each slot: following, running or being closed."""
        self.draining = False
        """While draining nothing is admitted, and nothing runs that is not being closed."""
        self.arriving: dict[Key, Request] = {}
        """Requests with a reservation, by its key in the ledger."""
        self.kept_slots = 0
        """So many are left to departing requests by those that were to depart and stay for want of room."""
        self.ending: dict[Key, None] = {}
        """Hand-overs whose blocks become available without anybody's doing."""
        self._promised_slots = 0
        self._promised_blocks = 0
        self._epochs = [0] * max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.line = WaitingLine()
        self._contended = False
        """Somebody waited after the last decision: what is generated since is charged."""
        self._prefill_ahead = NEVER if prefill_ahead is None else prefill_ahead
        self._uncomputed = 0
        """The sum over those that run of what is left to compute of their prompts."""
        self._wanting: dict[int, Request] = {}
        self._in_flight = InFlight(ledger, block_size, self.slots, in_order=in_order)
        self._following: dict[int, int] = {}
        """Slot of each request that follows → the tokens that others were to compute for it."""
        self._ready: list[int] = []
        """Slots of those that need not wait any more."""
        self._stale = False
        """Something changed that `decide` must look at."""

    @property
    def num_waiting(self) -> int:
        return len(self.line)

    @property
    def num_occupied(self) -> int:
        """Slots that run or are being closed: those of which the worker knows."""
        return len(self.slots) - len(self._free_slots) - len(self._following)

    @property
    def num_following(self) -> int:
        """Slots whose requests wait for blocks that others compute."""
        return len(self._following)

    @property
    def due(self) -> bool:
        """Whether `decide` could decide something."""
        return self._stale

    def gauges(self) -> dict[str, Any]:
        """For statistics: numbers of requests, blocks by state, the headroom."""
        running = sum(1 for request in self.slots if request and request.state is State.RUNNING)
        return {
            "running": running,
            "closing": self.num_occupied - running,
            "following": len(self._following),
            "waiting": len(self.line),
            "arriving": len(self.arriving),
            "paused": self.paused,
            "headroom_tokens": self.headroom.tokens,
            "blocks": self.ledger.counts(),
        }

    # -- what happened

    def enqueue(self, request: Request) -> None:
        """A request in state `waiting`, new or preempted, wants to run."""
        if self._contended and self.line.is_new(request):
            self.line.settle(self.slots, charge=True, alone=True)  # what was before it came is no lead
        self.line.push(request)
        if self.line.head() is request:  # (the request that was ahead of it may be gone)
            self._stale = True

    def withdraw(self, request: Request) -> None:
        """A request that waited is gone (its state says so)."""
        self.line.remove(request)
        self._stale = True

    def progress(self, request: Request) -> None:
        """A running request has reached its `watermark`: it has more tokens."""
        if request.state is not State.RUNNING:
            request.watermark = NEVER
            return
        self._index(request, len(request.tokens) - 1)
        if self._room(request) < self.lookahead and request.held < self._blocks(request.limit):
            self._wanting[request.slot] = request
            self._stale = True
        self._set_watermark(request)

    def computed(self, request: Request, num_tokens: int) -> None:
        """A report said that the KV of the first `num_tokens` tokens is computed."""
        self._leave_less(request, request.uncomputed - (num_tokens - request.computed))
        request.computed = num_tokens
        self._index(request, min(num_tokens, len(request.tokens)))
        if request.fills < request.fills_to:
            ready = self._in_flight.computed(request, num_tokens // self.block_size)
            self._ready += ready
            self._stale = self._stale or bool(ready) or self._in_flight.has_lent
        if request.state is State.RUNNING:
            self._set_watermark(request)

    def stop_running(self, request: Request) -> None:
        """A request that ran is being closed: it wants nothing more."""
        self._wanting.pop(request.slot, None)
        self._leave_less(request, 0)
        request.watermark = NEVER

    def release(self, request: Request) -> None:
        """The worker has closed the request's epoch, or never heard of it: its slot and blocks are free.

        Those that follow it, and those that follow them, wait again."""
        orphans = self._vacate(request)
        while orphans:
            orphan = self.slots[orphans.pop()]
            if orphan is not None:
                orphan.advance(Event.GIVE_UP)
                orphans += self._vacate(orphan)
                self.enqueue(orphan)

    def _vacate(self, request: Request) -> list[int]:
        """Returns the slots of those that waited for blocks of it."""
        orphans = self._in_flight.leave(request)
        if self._following.pop(request.slot, None) is not None and request.slot in self._ready:
            self._ready.remove(request.slot)
        self.stop_running(request)
        self.line.settle((request,), charge=self._contended)
        self.line.released(request)
        slot = request.slot
        self.ledger.release(slot)
        self.slots[slot] = None
        self._free_slots.append(slot)
        request.slot, request.held = -1, 0
        self._stale = True
        return orphans

    def reset_prefix(self) -> int:
        """Forgets what was computed so far, also by what runs now.  Returns the number of blocks."""
        for request in self.slots:
            if request is not None:
                request.indexing = False
                if request.state is State.RUNNING:
                    self._set_watermark(request)
        for request in self.arriving.values():
            request.indexing = False
        self._in_flight.forget()
        return self.prefix.clear() if self.prefix else 0

    def keep_slots(self, wanted: bool) -> None:
        """Whether anybody wants to depart: an eighth of the slots is left to those."""
        kept = len(self.slots) // 8 if wanted else 0
        self._stale = self._stale or kept < self.kept_slots
        self.kept_slots = kept

    def pause(self, paused: bool) -> None:
        self.paused = paused
        self._stale = True

    def drain(self) -> list[Request]:
        """Everything that runs must give way, and nothing is admitted until `end_drain`.

        Returns who must be told.  Says nothing about the headroom: no admission was premature.
        """
        self.draining = True
        for slot in list(self._following):
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
        """Reserves blocks for a request that is to arrive, if it would be admitted here.

        `coming`: blocks of its leading tokens that are being fetched for another one.  `promised`: room was
        kept for it, so who waits here may have come later.
        Returns how many of its leading blocks are here already (from the prefix cache), or None.
        """
        if self.paused or self.draining or self._wanting or self._spare_slots <= 0:
            return None
        if self.line and not promised:
            return None
        # (All blocks of its tokens may come from the cache: nothing of it needs to be computed.)
        shared = self._match(request, len(request.tokens) // self.block_size)
        num_cached = len(shared)
        shared += coming[num_cached:]
        fresh, own = self._cost(request, shared)
        if fresh + own + self._growth() > self._available(shared):
            return None
        self.ledger.reserve(key, shared, fresh)
        request.indexing = self.prefix is not None
        request.origin = request.gateway.name or ""  # who named the instance that computes the rest
        self.arriving[key] = request
        self.headroom.on_admission()
        return num_cached

    def seat(self, key: Key) -> Admission:
        """The pages of a request with a reservation are here: it runs."""
        request = self.arriving.pop(key)
        slot = self._take_slot(request)
        request.advance(Event.ADMIT)
        blocks = self.ledger.seat(key, slot)
        num_computed = len(request.tokens) - 1
        request.held, request.indexed = len(blocks), 0
        request.computed = num_computed
        self.line.seat(request)
        self.progress(request)
        return Admission(request, blocks, num_computed)

    def forgo(self, key: Key) -> None:
        """The request with this reservation does not arrive; its blocks are still in use."""
        if self.arriving.pop(key, None) is not None:
            self._stale = True

    def give_up(self, key: Key) -> None:
        """Nobody uses the blocks of this hand-over any more."""
        self.ending.pop(key, None)
        self.forgo(key)
        self.ledger.give_up(key)
        self._stale = True

    def promise(self, slots: int, blocks: int) -> None:
        """So many slots and blocks, in all, were promised to requests of other instances."""
        if slots < self._promised_slots or blocks < self._promised_blocks:
            self._stale = True
        self._promised_slots, self._promised_blocks = slots, blocks

    def estimate(self, request: Request) -> int:
        """Blocks that a reservation takes at most, room for its growth included."""
        return self._blocks(
            min(len(request.tokens) + max(self.headroom.tokens, self.lookahead), request.limit)
        )

    def has_room(self, blocks: int) -> bool:
        """Whether a request of another instance that needs so many blocks could come now."""
        if self.paused or self.draining or self.line or self._wanting or self._spare_slots <= 0:
            return False
        return blocks + self._growth() + self._promised_blocks <= self.ledger.available

    @property
    def in_demand(self) -> bool:
        """Whether a request of this instance lacks blocks."""
        return bool(self.line or self._wanting)

    def waiting_requests(self) -> Iterator[Request]:
        """Those that wait for admission, in no order."""
        return iter(self.line)

    # -- what to do

    def decide(self) -> Decisions:
        """Serves wants, makes room for urgent ones, admits.  Idempotent."""
        decisions = Decisions()
        self._stale = False
        if self._wanting:
            self._serve_wants(decisions)
            while self._wanting and not self.paused:
                self._give_way(decisions)
                if not self.ledger.available:
                    break
                self._serve_wants(decisions)  # from what those had that followed
        if self._ready and not self.paused and not self.draining:
            self._begin_ready(decisions)
        waits = bool(self.line)
        if waits and not self._wanting and not self.paused and not self.draining:
            self._admit(decisions)
            waits = bool(self.line)
        if waits and not self._contended:
            self.line.settle(self.slots, charge=False)  # what nobody waited for is free
        self._contended = waits
        decisions.lent = self._in_flight.take_lent()
        return decisions

    def _serve_wants(self, decisions: Decisions) -> None:
        for request in sorted(self._wanting.values(), key=lambda request: request.rank):
            available = self.ledger.available
            if not available:
                return
            missing = self._target(request) - request.held
            blocks = self.ledger.extend(request.slot, min(missing, available))
            request.held += len(blocks)
            decisions.grown.append((request, blocks))
            if len(blocks) == missing:
                del self._wanting[request.slot]
            self._set_watermark(request)

    def _give_way(self, decisions: Decisions) -> None:
        """Chooses victims until the coming blocks are enough for one more block per urgent want.  One that
        follows is told nothing: its blocks are available at once."""
        urgent = {slot for slot, request in self._wanting.items() if self._room(request) < URGENT_TOKENS}
        if not urgent:
            return
        closing = [
            slot for slot, request in enumerate(self.slots) if request and request.state not in _STAYING
        ]
        coming = self.ledger.yield_of(closing, self.ending)
        while len(urgent) > coming + self.ledger.available:
            victim = max(
                (request for request in self.slots if request and request.state in _STAYING),
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

    def _admit(self, decisions: Decisions) -> None:
        growth: int | None = None
        if self._contended and self._may_admit:
            self.line.settle(self.slots, charge=True)
        while self._may_admit and (request := self.line.head()) is not None:
            if request.lets_pass and self._spare_slots <= self.kept_slots:
                return
            found = self._find(request, (len(request.tokens) - 1) // self.block_size)
            shared = found.blocks
            available = self._available(shared)
            fresh, own = self._cost(request, shared)
            if fresh + own > available:
                return
            if growth is None:
                growth = self._growth()
            if fresh + own + growth > available:
                return
            growth += own
            self.line.take(len(request.tokens) - len(shared) * self.block_size)
            self._seat(request, found, fresh)
            if found.behind:
                decisions.following.append(request)
            else:
                decisions.admitted.append(self._begin(request))

    def _begin_ready(self, decisions: Decisions) -> None:
        for slot in self._ready:
            request = self.slots[slot]
            if request is not None:
                decisions.admitted.append(self._begin(request))
        self._ready.clear()

    @property
    def _may_admit(self) -> bool:
        return self._spare_slots > 0 and self._uncomputed < self._prefill_ahead

    def _leave_less(self, request: Request, uncomputed: int) -> None:
        """So many tokens of a request's prompt are left to compute."""
        uncomputed = max(uncomputed, 0)
        before = self._uncomputed
        self._uncomputed += uncomputed - request.uncomputed
        request.uncomputed = uncomputed
        if self._uncomputed < self._prefill_ahead <= before:
            self._stale = True

    @property
    def _spare_slots(self) -> int:
        """Free slots that are promised to nobody."""
        return len(self._free_slots) - len(self.arriving) - self._promised_slots

    def _available(self, shared: list[int]) -> int:
        """Blocks that are available to a request that shares these."""
        return self.ledger.available - self.ledger.idle(shared) - self._promised_blocks

    def _cost(self, request: Request, shared: list[int]) -> tuple[int, int]:
        """Fresh blocks that an admission takes, and blocks that the request may want within the headroom."""
        target = self._target(request)
        grown = self._blocks(min(len(request.tokens) + self.headroom.tokens, request.limit))
        return target - len(shared), max(grown - target, 0)

    def _take_slot(self, request: Request) -> int:
        slot = self._free_slots.pop()
        self._epochs[slot] += 1
        request.slot, request.epoch = slot, self._epochs[slot]
        request.continued = True
        request.urgency, request.hurried = request.rank, not request.patient
        self.slots[slot] = request
        return slot

    def _seat(self, request: Request, found: Shared, fresh: int) -> None:
        """A slot, and blocks: those that were found, and fresh ones."""
        slot = self._take_slot(request)
        request.held = len(self.ledger.claim(slot, found.blocks, fresh))
        request.indexed = len(found.blocks)
        request.indexing = self.prefix is not None
        request.origin = found.origin
        request.computed = len(found.blocks) * self.block_size
        request.uncomputed = len(request.tokens) - request.computed
        self._uncomputed += request.uncomputed
        self.headroom.on_admission()
        if self.prefix is not None:
            full = len(request.tokens) // self.block_size
            extend_keys(request.keys, request.root, request.tokens, self.block_size, full)
            self._in_flight.fill(request, request.indexed, full)
        if found.behind:
            request.advance(Event.FOLLOW)
            request.watermark = NEVER
            self._following[slot] = (len(found.blocks) - found.final) * self.block_size
            self._in_flight.follow(request, found.behind)

    def _begin(self, request: Request) -> Admission:
        """All blocks that it shares are computed: the request runs, and its `Admit` is to be sent."""
        request.advance(Event.ADMIT)
        self._set_watermark(request)
        followed = self._following.pop(request.slot, 0)
        return Admission(request, list(self.ledger.table(request.slot)), request.computed, followed)

    def _growth(self) -> int:
        """Blocks that everybody who runs may want within the next H tokens."""
        ahead, size = self.headroom.tokens, self.block_size
        total = 0
        for request in self.slots:
            if request is not None and request.state in _STAYING:
                tokens = min(len(request.tokens) + ahead, request.limit)
                total += max(-(-tokens // size) - request.held, 0)
        for key, request in self.arriving.items():
            tokens = min(len(request.tokens) + ahead, request.limit)
            total += max(-(-tokens // size) - len(self.ledger.reserved(key)), 0)
        return total

    # -- blocks and keys

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _room(self, request: Request) -> int:
        """Tokens that fit in its blocks beyond those it has."""
        return request.held * self.block_size - len(request.tokens)

    def _target(self, request: Request) -> int:
        """Blocks that it should hold now."""
        return self._blocks(min(len(request.tokens) + self.lookahead, request.limit))

    def _find(self, request: Request, limit: int) -> Shared:
        """Blocks for its leading tokens that are computed, or are being computed for another request."""
        limit = min(limit, request.reusable // self.block_size)
        blocks = self._match(request, limit)
        if self.prefix is None:
            return Shared(blocks, "")
        found = Shared(blocks, self.prefix.origin(blocks))
        if len(blocks) < limit:
            self._in_flight.find(request, found, limit)
        return found

    def _match(self, request: Request, limit: int) -> list[int]:
        """Cached blocks for its leading tokens, `limit` at most: for one that is to run here never all
        tokens, since something must be computed."""
        if self.prefix is None:
            return []
        limit = min(limit, request.reusable // self.block_size)
        extend_keys(request.keys, request.root, request.tokens, self.block_size, limit)
        return self.prefix.match(request.keys, limit, request.gateway.name or "")

    def _index(self, request: Request, num_computed: int) -> None:
        """Offers the blocks that are full and computed to the prefix index."""
        full = num_computed // self.block_size
        if not request.indexing or self.prefix is None or full <= request.indexed:
            return
        extend_keys(request.keys, request.root, request.tokens, self.block_size, full)
        table = self.ledger.table(request.slot)
        for index in range(request.indexed, full):
            self.prefix.insert(request.keys[index], table[index], request.origin)
        request.indexed = full
        self._stale = self._stale or len(self.line) > 0

    def _set_watermark(self, request: Request) -> None:
        """The next number of tokens at which it wants blocks, becomes urgent, or has filled a block."""
        mark = NEVER
        if request.held < self._blocks(request.limit):
            room = URGENT_TOKENS if request.slot in self._wanting else self.lookahead
            mark = request.held * self.block_size - room + 1
        if request.indexing:
            mark = min(mark, (request.indexed + 1) * self.block_size + 1)
        request.watermark = max(mark, len(request.tokens) + 1)


def _last_to_stay(request: Request) -> tuple[Rank, bool]:
    """The largest one gives way: who waits for a request goes before that one, as they are equally urgent."""
    return request.urgency, request.urgency == request.rank
