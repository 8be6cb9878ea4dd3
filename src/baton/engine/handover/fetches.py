"""Fetches that are under way: which pages and layers were asked of the workers, and which ranks are not done.

A fetch is over when every rank has said so, in whatever way it ended.  What is asked for is what has become
final and was not asked for before: whole pages, and of all later pages the layers that are done (during the
last chunk).
"""

from __future__ import annotations

from baton.engine.counters import HandoverCounters
from baton.engine.handover.records import Arrival
from baton.engine.noting import note
from baton.engine.scheduling.ledger import Ledger
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Command, DropFetch, Fetch
from baton.protocol.messages.reports import Fetched

MAX_FETCH_PAGES = 256
"""Of one `Fetch`: so that a long one shows progress, and ends soon when it is dropped."""


class Fetches:
    """Those of one engine with `num_ranks` ranks."""

    def __init__(self, num_ranks: int, ledger: Ledger, counters: HandoverCounters) -> None:
        self._num_ranks = num_ranks
        self._ledger = ledger
        self._counters = counters
        self.commands: list[Command] = []
        """For the workers; the core takes them into its batch and empties this list."""
        self._under_way: dict[int, Arrival] = {}
        self._last_id = 0

    def ask(self, arrival: Arrival, complete: int, layers: int) -> None:
        """The first `complete` pages are final, and of all others the first `layers` layers."""
        num_layers = arrival.source.ranks[0].num_layers
        if complete > arrival.asked:
            if arrival.layers < num_layers:
                self._send(arrival, arrival.asked, complete, arrival.layers, -1)
            arrival.asked = complete
        layers = min(layers, num_layers)
        if layers > arrival.layers and arrival.asked < arrival.num_pages:
            self._send(arrival, arrival.asked, arrival.num_pages, arrival.layers, layers - arrival.layers)
            arrival.layers = layers
        arrival.complete = max(arrival.complete, complete)
        self.ask_owed(arrival)

    def ask_owed(self, arrival: Arrival) -> None:
        """Asks for the pages that another arrival was to fetch for it, once all of them are final."""
        if arrival.owes and arrival.complete >= arrival.shared:
            arrival.owes = False
            self._send(arrival, arrival.num_cached, arrival.shared, 0, -1)

    def _send(self, arrival: Arrival, first: int, end: int, first_layer: int, num_layers: int) -> None:
        table = self._ledger.reserved(arrival.key)
        for start in range(first, end, MAX_FETCH_PAGES):
            stop = min(start + MAX_FETCH_PAGES, end)
            self._last_id += 1
            arrival.fetches[self._last_id] = set(range(self._num_ranks))
            self._under_way[self._last_id] = arrival
            self._counters.fetches += 1
            self.commands.append(
                Fetch(
                    self._last_id,
                    arrival.source,
                    pages=pack_int32(arrival.pages[start:stop]),
                    blocks=pack_int32(table[start:stop]),
                    first_layer=first_layer,
                    num_layers=num_layers,
                    grant=arrival.grant,
                )
            )

    def ended(self, rank: int, report: Fetched, now: float) -> Arrival | None:
        """A rank has ended one; returns whose it is, or None if that cannot be."""
        arrival = self._under_way.get(report.id)
        if arrival is None or rank not in arrival.fetches[report.id]:
            return None
        ranks = arrival.fetches[report.id]
        microseconds = round(report.seconds * 1e6)
        note(arrival.request, now, "fetched", report.num_bytes, microseconds, rank, report.transport)
        ranks.discard(rank)
        if not ranks:
            del arrival.fetches[report.id], self._under_way[report.id]
        self._counters.fetched_bytes += report.num_bytes
        self._counters.fetch_seconds += report.seconds
        if report.num_bytes:
            self._counters.fetched_by[report.transport or "unknown"] += report.num_bytes
        return arrival

    def drop(self, arrival: Arrival) -> None:
        """Its pages are of no use any more."""
        self.commands.append(DropFetch(list(arrival.fetches)))
