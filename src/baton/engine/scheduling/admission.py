"""Admission: which request gets a slot next, with which blocks, and what it waits for then.  Pure.

Theory.  A request gets a slot by one of two ways: it waits here and is admitted (`decide`), or it arrives
from another instance with a reservation (`reserve`, then `seat`).

**Order.** Waiting requests are admitted by priority; those that ran before come first, then newcomers, fairly
by flow (`waiting.py`). Admission follows that order strictly: what does not fit blocks everything behind it,
so nothing is overtaken for ever.

**No sooner than needed.** The worker computes prompts in the order in which it was given them. So a newcomer
is admitted only while less than `prefill_ahead` tokens of admitted prompts are left to compute: two steps'
worth keeps the worker busy, and a request that comes now waits for no more than that besides those ahead.

**Headroom.** A newcomer is admitted if, besides its own blocks, there is room for everybody who runs, the
newcomer included, to grow by H tokens (or to its own limit, if that is nearer; `room.py` has the sum). So
after an admission everybody can take H steps before anybody must give way: the price of a premature
admission, one prefill, is spread over H steps of the whole batch. How H is found is told in `headroom.py`.

**Following.** A request whose next blocks are being computed for another one takes those blocks and waits for
them (`in_flight.py`).  It has a slot, counts in every sum as if it ran, and gives way by its rank; as the
worker has not heard of it, it gives way at once.  If what it follows loses its slot too early, it loses its
own and waits again (`release`).

    waiting ──admit──► following ──all shared blocks are computed: begin──► running
       │                   └───────give way, or lose what it follows──────► waiting
       └─────admit, nothing to wait for────────────────────────────────────► running

**Hand-overs.** A request that arrives from another instance (`arrivals.py`) is judged as one that waits here:
it is given a reservation only if nothing waits ahead, a slot is left for it, and the same sum of blocks and
headroom fits. From then on its slot is promised (an admission leaves it alone) and its growth counts as that
of what runs. It is seated without being asked again.

A request that was to depart and stays, as there was no room elsewhere, takes a slot for its whole answer,
one that departs only for its prefill. Many of the former would keep the latter from the room that is
reserved for them elsewhere, which would stay idle and be refused to others. So they leave `kept_slots` free
while anybody wants to depart.

The scheduler says whether anybody may be admitted at all (not in a pause, not before new weights, not while
running requests lack blocks), and calls `decide` when it has served those that run.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.request import NEVER, Request
from baton.engine.scheduling.decisions import Admission, Decisions
from baton.engine.scheduling.in_flight import InFlight, Shared
from baton.engine.scheduling.ledger import Key
from baton.engine.scheduling.room import Room
from baton.engine.scheduling.sharing import Sharing
from baton.engine.scheduling.waiting import WaitingLine
from baton.engine.states import Event


class Admissions:
    """Of one engine: those that wait, and those that follow.  `prefill_ahead`: tokens of prompts that the
    worker is given ahead of computing them; None: no bound."""

    def __init__(self, room: Room, sharing: Sharing, in_flight: InFlight, prefill_ahead: int | None) -> None:
        self.line = WaitingLine()
        self.due = False
        """Somebody may be admitted who could not be before."""
        self.following: dict[int, int] = {}
        """Slot of each request that follows → the tokens that others were to compute for it."""
        self._room = room
        self._ledger = room.ledger
        self._sharing = sharing
        self._in_flight = in_flight
        self._ready: list[int] = []
        """Slots of those that follow and need not wait any more."""
        self._contended = False
        """Somebody waited after the last decision: what is generated since is charged."""
        self._prefill_ahead = NEVER if prefill_ahead is None else prefill_ahead
        self._uncomputed = 0
        """The sum over those that run of what is left to compute of their prompts."""

    # -- who waits

    def enqueue(self, request: Request) -> None:
        """A request in state `waiting`, new or preempted, wants to run."""
        if self._contended and self.line.is_new(request):
            self.line.settle(self._room.slots, charge=True, alone=True)  # what was before it came is no lead
        self.line.push(request)
        if self.line.head() is request:  # (the request that was ahead of it may be gone)
            self.due = True

    def withdraw(self, request: Request) -> None:
        """A request that waited is gone (its state says so)."""
        self.line.remove(request)
        self.due = True

    # -- what happens to those that have slots

    def computed(self, request: Request, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is computed."""
        self._leave_less(request, request.uncomputed - (num_tokens - request.computed))
        request.computed = num_tokens
        self.index(request, min(num_tokens, len(request.tokens)))
        if request.fills < request.fills_to:
            ready = self._in_flight.computed(request, num_tokens // self._room.block_size)
            self._ready += ready
            self.due = self.due or bool(ready) or self._in_flight.has_lent

    def index(self, request: Request, num_computed: int) -> None:
        """So many leading tokens are computed: others may share the blocks that these fill."""
        if self._sharing.index(request, num_computed):
            self.due = self.due or len(self.line) > 0

    def computes_no_more(self, request: Request) -> None:
        """What is left of its prompt is not computed."""
        self._leave_less(request, 0)

    def release(self, request: Request) -> None:
        """A request loses its slot and blocks.  Those that follow it, and those that follow them, wait
        again."""
        orphans = self._vacate(request)
        while orphans:
            orphan = self._room.slots[orphans.pop()]
            if orphan is not None:
                orphan.advance(Event.GIVE_UP)
                orphans += self._vacate(orphan)
                self.enqueue(orphan)

    def _vacate(self, request: Request) -> list[int]:
        """Returns the slots of those that waited for blocks of it."""
        orphans = self._in_flight.leave(request)
        if self.following.pop(request.slot, None) is not None and request.slot in self._ready:
            self._ready.remove(request.slot)
        self._leave_less(request, 0)
        self.line.settle((request,), charge=self._contended)
        self.line.released(request)
        self._room.leave_slot(request)
        self.due = True
        return orphans

    def _leave_less(self, request: Request, uncomputed: int) -> None:
        """So many tokens of a request's prompt are left to compute."""
        uncomputed = max(uncomputed, 0)
        before = self._uncomputed
        self._uncomputed += uncomputed - request.uncomputed
        request.uncomputed = uncomputed
        if self._uncomputed < self._prefill_ahead <= before:
            self.due = True

    # -- who is admitted

    def decide(self, decisions: Decisions, *, begins: bool, admits: bool) -> None:
        """`begins`: those that followed, and whose shared blocks are all computed, may run.  `admits`: those
        that wait may get slots."""
        if begins and self._ready:
            self._begin_ready(decisions)
        if admits and self.line:
            self._admit(decisions)
        waits = bool(self.line)
        if waits and not self._contended:
            self.line.settle(self._room.slots, charge=False)  # what nobody waited for is free
        self._contended = waits

    def _begin_ready(self, decisions: Decisions) -> None:
        for slot in self._ready:
            request = self._room.slots[slot]
            if request is not None:
                decisions.admitted.append(self._begin(request))
        self._ready.clear()

    def _admit(self, decisions: Decisions) -> None:
        """Gives slots to those at the head of the line, as long as they fit.  Somebody waits."""
        room = self._room
        growth: int | None = None
        if self._contended and self._may_admit:
            self.line.settle(room.slots, charge=True)
        while self._may_admit and (request := self.line.head()) is not None:
            if request.lets_pass and room.spare_slots <= room.kept_slots:
                return
            found = self._sharing.find(request, (len(request.tokens) - 1) // room.block_size)
            shared = found.blocks
            available = room.available(shared)
            fresh, own = room.cost(request, shared)
            if fresh + own > available:
                return
            if growth is None:
                growth = room.growth()
            if fresh + own + growth > available:
                return
            growth += own
            self.line.take(len(request.tokens) - len(shared) * room.block_size)
            self._seat(request, found, fresh)
            if found.behind:
                decisions.following.append(request)
            else:
                decisions.admitted.append(self._begin(request))

    @property
    def _may_admit(self) -> bool:
        return self._room.spare_slots > 0 and self._uncomputed < self._prefill_ahead

    def _seat(self, request: Request, found: Shared, fresh: int) -> None:
        """A slot, and blocks: those that were found, and fresh ones."""
        slot = self._room.take_slot(request)
        request.held = len(self._ledger.claim(slot, found.blocks, fresh))
        request.computed = len(found.blocks) * self._room.block_size
        request.uncomputed = len(request.tokens) - request.computed
        self._uncomputed += request.uncomputed
        self._room.headroom.on_admission()
        self._sharing.seat(request, found)
        if found.behind:
            request.advance(Event.FOLLOW)
            self.following[slot] = (len(found.blocks) - found.final) * self._room.block_size

    def _begin(self, request: Request) -> Admission:
        """All blocks that it shares are computed: the request runs, and its `Admit` is to be sent."""
        request.advance(Event.ADMIT)
        followed = self.following.pop(request.slot, 0)
        return Admission(request, list(self._ledger.table(request.slot)), request.computed, followed)

    # -- who arrives from another instance

    def reserve(self, key: Key, request: Request, coming: Sequence[int], *, promised: bool) -> int | None:
        """Reserves blocks for a request that is to arrive, if it would be admitted here.

        `coming`: blocks of its leading tokens that are being fetched for another one.  `promised`: room was
        kept for it, so who waits here may have come later.
        Returns how many of its leading blocks are here already (from the prefix cache), or None.
        """
        room = self._room
        if room.spare_slots <= 0 or (self.line and not promised):
            return None
        # (All blocks of its tokens may come from the cache: nothing of it needs to be computed.)
        shared = self._sharing.match(request, len(request.tokens) // room.block_size)
        num_cached = len(shared)
        shared += coming[num_cached:]
        fresh, own = room.cost(request, shared)
        if fresh + own + room.growth() > room.available(shared):
            return None
        self._ledger.reserve(key, shared, fresh)
        self._sharing.reserve(request)
        room.arriving[key] = request
        room.headroom.on_admission()
        return num_cached

    def seat(self, key: Key) -> Admission:
        """The pages of a request with a reservation are here: it runs."""
        request = self._room.arriving.pop(key)
        slot = self._room.take_slot(request)
        request.advance(Event.ADMIT)
        blocks = self._ledger.seat(key, slot)
        num_computed = len(request.tokens) - 1
        request.held, request.indexed = len(blocks), 0
        request.computed = num_computed
        self.line.seat(request)
        return Admission(request, blocks, num_computed)

    def forgo(self, key: Key) -> None:
        """The request with this reservation does not arrive; its blocks are still in use."""
        if self._room.arriving.pop(key, None) is not None:
            self.due = True
