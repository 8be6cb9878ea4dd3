"""Deliberate defects of requests that wait for pages fetched for another one; see `mutations.py`."""

from __future__ import annotations

from baton.engine.handover import on_the_way
from baton.engine.handover.arrivals import Arrivals
from baton.engine.handover.on_the_way import OnTheWay
from tests.simulation.mutations import Patch, mutation


@mutation("pages that another request fetches are believed to be here", "pages", "coming", scenario="coming")
def believed(patch: Patch) -> None:
    add = OnTheWay.add

    def wrong(self, arrival, fetcher, count):
        add(self, arrival, fetcher, count)
        if arrival.awaits is not None:
            self.leave(arrival)
            arrival.awaits = None

    patch.setattr(OnTheWay, "add", wrong)


@mutation("who awaits pages of a request that goes is forgotten", "coming", "end", scenario="coming")
def forgotten(patch: Patch) -> None:
    patch.setattr(OnTheWay, "gone", lambda self, arrival: None)


@mutation(
    "who awaits pages of a request that goes believes that they are here",
    "pages",
    "coming",
    "crash",
    scenario="coming",
    start=38,
)
def believed_at_the_end(patch: Patch) -> None:
    settle = OnTheWay.settle

    def wrong(self, now):
        others = [other for gone in self._gone for other in self._waiting.get(gone, ())]
        lost = settle(self, now)
        for other in others:
            other.awaits, other.owes = None, False
        return lost

    patch.setattr(OnTheWay, "settle", wrong)


@mutation("pages are fetched again while the old fetch may write them", "coming", scenario="coming")
def fetched_twice(patch: Patch) -> None:
    close = Arrivals._close

    def wrong(self, arrival, reply, now):
        close(self, arrival, reply, now)
        if arrival.fetches:
            self._on_the_way.gone(arrival)

    patch.setattr(Arrivals, "_close", wrong)


@mutation("what was fetched on the word of one gateway is awaited by another's", "coming", scenario="coming")
def other_gateway(patch: Patch) -> None:
    def wrong(fetcher, peer, request):
        return fetcher.request.indexing and fetcher.request.rank[0] <= request.rank[0]

    patch.setattr(on_the_way, "_serves", wrong)


@mutation("all that is shared is fetched by each", "coming", scenario="coming")
def fetched_by_each(patch: Patch) -> None:
    add = OnTheWay.add

    def wrong(self, arrival, fetcher, count):
        add(self, arrival, fetcher, count)
        if arrival.awaits is not None:
            self.leave(arrival)
            arrival.awaits, arrival.asked = None, arrival.num_cached

    patch.setattr(OnTheWay, "add", wrong)
