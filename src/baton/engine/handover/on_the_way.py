"""Pages that are on their way here, and arrivals that wait for them instead of fetching the same.

Theory.  The side of D of what `scheduling/in_flight.py` is where prompts are computed.  From its reservation
until all its pages are here an arrival is the *fetcher* of the full pages of its tokens that were not here.
One that comes meanwhile with the same beginning takes the fetcher's blocks into its own reservation (one more
owner each) and *awaits* them: it asks only for pages after those.  P is told nothing: it names and keeps all
pages of each request, so that another arrival can fetch what this one does not.

* *Who awaits whom.*  A key names all tokens before and the salt (`prefix.py`).  Both come from the same P, so
  that the order of P's prompts is that of their pages; and both were named by the same gateway, as fetched
  pages are only as right as that one is honest.  Nobody awaits a request of a worse priority, nor one that
  itself awaits another one (so one loss concerns one fetcher and those that await it), nor one that came
  before the prefix cache was forgotten.
* *Nothing is believed too soon.*  An arrival awaits its fetcher until no fetch of that one is under way and
  what they share was asked for: each page was fetched then under a lease that held.
* *When P begins with another one first* (users take turns there), before anything of the fetcher's was asked
  for, the two change their parts.
* *When the fetcher goes* before it is ready, whatever the reason, and when none of its fetches is under way
  any more (so that nothing old is written over what is new), the arrival that shares most of its pages
  fetches them itself and becomes the fetcher of the others.  If P has begun with it, what it shares is asked
  for as a whole, once P has said that all of it is final.  One that shares a page which this one does not
  fetch goes on as if a fetch had failed.
* *No wait without an end.*  A fetcher is ready, or goes at one of its deadlines; who awaits it keeps its own
  deadlines, counted from the fetcher's last page too.

Each operation costs O(1) a page of the arrival, at its reservation and at its end, and O(1) an arrival that
awaits it.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.handover.fetches import Fetches
from baton.engine.handover.records import Arrival, Stage
from baton.engine.request import Request
from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import extend_keys


class OnTheWay:
    """The fetchers of one engine, and who awaits them.  `caching`: pages may be shared at all."""

    def __init__(self, ledger: Ledger, fetches: Fetches, block_size: int, *, caching: bool) -> None:
        self._ledger = ledger
        self._fetches = fetches
        self._block_size = block_size
        self._caching = caching
        self._fetchers: dict[bytes, Arrival] = {}
        """By key, who fetches the page."""
        self._waiting: dict[Arrival, dict[Arrival, None]] = {}
        """Fetcher → those that await it."""
        self._gone: list[Arrival] = []
        """Fetchers that are over, and that somebody awaits."""

    def find(self, peer: str, request: Request) -> tuple[Arrival | None, Sequence[int]]:
        """Whose pages a request of this peer could await, and the blocks of those that are the same."""
        if not self._fetchers:
            return None, ()
        keys, full = request.keys, len(request.tokens) // self._block_size
        extend_keys(keys, request.root, request.tokens, self._block_size, full)
        for count in range(full, 0, -1):
            fetcher = self._fetchers.get(keys[count - 1])
            if fetcher is not None and _serves(fetcher, peer, request):
                return fetcher, self._ledger.reserved(fetcher.key)[:count]
        return None, ()

    def add(self, arrival: Arrival, fetcher: Arrival | None, count: int) -> None:
        """A new arrival: its leading `count` pages are the fetcher's."""
        if fetcher is not None and count > arrival.num_cached:
            arrival.num_cached = max(arrival.num_cached, min(fetcher.num_cached, count))
            arrival.asked = arrival.num_cached
            if count > arrival.num_cached:
                self._await(arrival, fetcher, count)
                return
        self._fetch(arrival)

    def begins(self, arrival: Arrival, now: float) -> None:
        """P has begun with it.  If it has not begun with its fetcher, they change their parts."""
        fetcher = arrival.awaits
        if fetcher is None or fetcher.stage is not Stage.RESERVED:
            return
        others = [other for other in self._waiting[fetcher] if other is not arrival]
        if fetcher.num_cached < arrival.num_cached or not all(_within(other, arrival) for other in others):
            return
        del self._waiting[fetcher]
        self.leave(fetcher)
        arrival.awaits, arrival.asked = None, arrival.num_cached
        self._fetch(arrival)
        self._await(fetcher, arrival, arrival.shared)
        for other in others:
            self._await(other, arrival, other.shared)

    def came(self, arrival: Arrival) -> list[Arrival]:
        """Pages of it came.  Returns those that await nothing more."""
        if arrival.fetches or arrival.awaits or arrival.owes:
            return []
        arrival.num_cached = max(arrival.num_cached, arrival.asked)
        others = self._waiting.get(arrival, {})
        for other in others:  # (what others may have begun to use is never fetched again)
            other.num_cached = max(other.num_cached, min(other.shared, arrival.asked))
        served = [other for other in others if other.shared <= arrival.asked]
        for other in served:
            other.awaits = None
            del others[other]
        if not others:
            self._waiting.pop(arrival, None)
        return served

    def leave(self, arrival: Arrival) -> None:
        """It goes, or all its pages are here: nobody new awaits it, and it awaits nobody."""
        for key in arrival.request.keys[: len(arrival.request.tokens) // self._block_size]:
            if self._fetchers.get(key) is arrival:
                del self._fetchers[key]
        if arrival.awaits is not None:
            others = self._waiting.get(arrival.awaits)
            if others is not None:
                others.pop(arrival, None)
                if not others:
                    del self._waiting[arrival.awaits]

    def gone(self, arrival: Arrival) -> None:
        """None of its fetches is under way, and its pages are not all here."""
        if arrival in self._waiting:
            self._gone.append(arrival)

    def settle(self, now: float) -> list[Arrival]:
        """Others fetch what those that are gone were to fetch.  Returns those that nobody fetches for."""
        lost: list[Arrival] = []
        for fetcher in self._gone:
            others = list(self._waiting.pop(fetcher, ()))
            if not others:
                continue
            heir = max(others, key=lambda other: (other.shared, -other.num_cached))
            heir.awaits, heir.moved = None, now
            if heir.stage is Stage.RESERVED:
                heir.asked = heir.num_cached  # (as if it had never awaited anything)
            else:
                heir.owes = True
            self._fetch(heir)
            for other in others:
                if other is heir:
                    continue
                other.moved = now
                if _within(other, heir):
                    self._await(other, heir, other.shared)
                else:
                    other.awaits = None
                    lost.append(other)
            self._fetches.ask_owed(heir)
        self._gone.clear()
        return lost

    def _fetch(self, arrival: Arrival) -> None:
        if self._caching:
            full = len(arrival.request.tokens) // self._block_size
            for key in arrival.request.keys[arrival.num_cached : full]:
                self._fetchers.setdefault(key, arrival)

    def _await(self, arrival: Arrival, fetcher: Arrival, count: int) -> None:
        arrival.awaits, arrival.shared = fetcher, count
        arrival.asked = max(arrival.asked, count)
        self._waiting.setdefault(fetcher, {})[arrival] = None


def _serves(fetcher: Arrival, peer: str, request: Request) -> bool:
    """Whether a request of this peer may await it."""
    theirs = fetcher.request
    return (
        fetcher.peer.incarnation == peer
        and theirs.indexing
        and theirs.origin == (request.gateway.name or "")
        and theirs.rank[0] <= request.rank[0]
    )


def _within(one: Arrival, other: Arrival) -> bool:
    """Whether the other one fetches all that this one would await."""
    return one.num_cached >= other.num_cached and one.shared <= other.shared
