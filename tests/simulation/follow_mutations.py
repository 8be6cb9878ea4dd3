"""Deliberate defects of requests that wait for what another one computes; see `mutations.py`."""

from __future__ import annotations

from baton.engine.scheduling.admission import Admissions
from baton.engine.scheduling.in_flight import InFlight
from baton.engine.scheduling.prefix import extend_keys, root_key
from baton.engine.scheduling.room import Room
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.states import State
from tests.simulation.mutations import Patch, mutation


@mutation("a block is shared a moment before it is computed", "pages", scenario="bursts", start=19)
def shared_too_soon(patch: Patch) -> None:
    computed = InFlight.computed
    patch.setattr(InFlight, "computed", lambda self, request, full: computed(self, request, full + 1))


@mutation("who follows a request that goes believes that all was computed", "pages", scenario="bursts")
def believed(patch: Patch) -> None:
    leave = InFlight.leave
    release = Admissions.release

    def wrong_leave(self, request):
        self.believers = leave(self, request)
        for slot in self.believers:
            self._behind.pop(slot, None)
        return []

    def wrong_release(self, request):
        release(self, request)
        self._ready += [slot for slot in self._in_flight.believers if slot in self.following]

    patch.setattr(InFlight, "leave", wrong_leave)
    patch.setattr(Admissions, "release", wrong_release)


@mutation("who follows a request that goes is forgotten", "follow", "liveness", scenario="bursts")
def forgotten(patch: Patch) -> None:
    leave = InFlight.leave

    def wrong(self, request):
        leave(self, request)
        return []

    patch.setattr(InFlight, "leave", wrong)


@mutation(
    "of those that follow one that goes only the first is thought of",
    "follow",
    "liveness",
    scenario="bursts",
    start=30,
)
def only_the_first(patch: Patch) -> None:
    leave = InFlight.leave
    patch.setattr(InFlight, "leave", lambda self, request: leave(self, request)[:1])


@mutation("what one that follows has is given back twice", "ledger", "crash", scenario="bursts")
def freed_twice(patch: Patch) -> None:
    vacate = Admissions._vacate

    def wrong(self, request):
        table = list(self._ledger.table(request.slot)) if request.slot in self.following else []
        orphans = vacate(self, request)
        self._ledger._let_go(table)
        return orphans

    patch.setattr(Admissions, "_vacate", wrong)


@mutation(
    "who stops following keeps the blocks that it shares",
    "ledger",
    "owner",
    "end",
    "crash",
    scenario="bursts",
)
def kept(patch: Patch) -> None:
    vacate = Admissions._vacate

    def wrong(self, request):
        shared = list(self._ledger.table(request.slot))[: request.indexed]
        if request.slot in self.following:
            self._ledger._exported[f"leak {request.name} {request.epoch}"] = shared
            for block in shared:
                self._ledger._refs[block] += 1
        return vacate(self, request)

    patch.setattr(Admissions, "_vacate", wrong)


@mutation("what is computed for one salt is followed by another", "salt", scenario="bursts")
def other_salt(patch: Patch) -> None:
    find = InFlight.find

    def wrong(self, request, shared, limit):
        find(self, request, shared, limit)
        if request.cache_salt and not shared.behind:
            keys, request.keys = request.keys, []
            extend_keys(request.keys, root_key(""), request.tokens, self._block_size, limit)
            find(self, request, shared, limit)
            request.keys = keys

    patch.setattr(InFlight, "find", wrong)


@mutation("what those that follow may grow by is not reckoned", "room", scenario="bursts", start=163)
def growth_of_followers(patch: Patch) -> None:
    growth = Room.growth

    def wrong(self):
        hidden = {one.slot: one for one in self.slots if one and one.state is State.FOLLOWING}
        for slot in hidden:
            self.slots[slot] = None
        total = growth(self)
        for slot, request in hidden.items():
            self.slots[slot] = request
        return total

    patch.setattr(Room, "growth", wrong)


@mutation("one that follows and is cancelled stays", "follow", "cancel", "end", scenario="bursts")
def cancelled_follower_stays(patch: Patch) -> None:
    release = Scheduler.release

    def wrong(self, request):
        if not (request.state is State.GONE and request.slot in self.admissions.following):
            release(self, request)

    patch.setattr(Scheduler, "release", wrong)


# -- priority is lent


@mutation("who waits for another request lends it no priority", "lent", "order", scenario="bursts")
def nothing_lent(patch: Patch) -> None:
    patch.setattr(InFlight, "_lend", lambda self, slot, follower: None)


@mutation("priority that was lent is never given back", "lent", "order", scenario="bursts")
def kept_for_good(patch: Patch) -> None:
    patch.setattr(InFlight, "_take_back", lambda self, slot: None)


@mutation("the worker is not told what was lent while it computes", "lent", scenario="bursts")
def lent_untold(patch: Patch) -> None:
    take = InFlight.take_lent
    patch.setattr(InFlight, "take_lent", lambda self: take(self) and [])
