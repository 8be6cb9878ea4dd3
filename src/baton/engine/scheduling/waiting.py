"""The line of requests that wait for admission.  Pure.

Theory.  Smaller priorities come first.  Within a priority there are three parts:

| who | order | comes |
| --- | --- | --- |
| *continued*: it ran already, here or elsewhere, and has given its blocks up | by rank | first |
| newcomers | fair between flows, first come first served within one (`protocol/rules/fair_queue.py`) | then |
| those that let others pass (`Request.let_pass`) | by rank | before every newcomer of a larger rank |

So nobody loses what was begun for the sake of what was not, and a request that lets others pass waits for a
finite number of them.

What a flow is charged: the tokens that the first admission computes, and those generated while requests wait
(`settle`; while none waits, no flow is kept from anything).  What is computed again after a preemption
or a loss is not charged again; what a request computes that was to follow another one (`in_flight.py`) and
has lost it is charged then.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from baton.engine.request import Request
from baton.engine.states import State
from baton.protocol.rules.fair_queue import FairQueue, Rank, Ranking, Share


class _Class:
    """The requests of one priority."""

    __slots__ = ("continued", "newcomers", "passing")

    def __init__(self) -> None:
        self.continued: list[tuple[Rank, Request]] = []
        self.passing: list[tuple[Rank, Request]] = []
        """(Both are heaps, with entries that left.)"""
        self.newcomers: FairQueue[Request] = FairQueue()

    def head(self) -> Request | None:
        continued = _first(self.continued)
        if continued is not None:
            return continued
        newcomer, passing = self.newcomers.head(), _first(self.passing)
        if newcomer is None or (passing is not None and passing.rank < newcomer.rank):
            return passing
        return newcomer

    def __iter__(self) -> Iterator[Request]:
        for heap in (self.continued, self.passing):
            yield from (request for _, request in heap if request.state is State.WAITING)
        yield from self.newcomers


class WaitingLine:
    """Those of one engine, all in state `waiting`."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._priorities: Ranking[int] = Ranking()
        """Of classes that wait."""
        self._counts: dict[int, int] = {}
        """By priority, who waits."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """In no order that matters."""
        for one in self._classes.values():
            yield from one

    def push(self, request: Request) -> None:
        priority = request.rank[0]
        one = self._class(priority)
        if request.continued:
            heapq.heappush(one.continued, (request.rank, request))
        elif request.lets_pass:
            heapq.heappush(one.passing, (request.rank, request))
        else:
            one.newcomers.push(request, request.number, request.rank, request.flow)
        self._num_waiting += 1
        self._counts[priority] = self._counts.get(priority, 0) + 1
        self._priorities.set(priority, priority)

    def remove(self, request: Request) -> None:
        """A request that waited is gone (its state says so)."""
        one = self._classes[request.rank[0]]
        one.newcomers.remove(request.number)
        for heap in (one.continued, one.passing):
            if len(heap) > 2 * self._num_waiting + 16:
                heap[:] = [entry for entry in heap if entry[1].state is State.WAITING]
                heapq.heapify(heap)
        self._left(request.rank[0])

    def head(self) -> Request | None:
        """Who is next; nobody behind is admitted before."""
        priority = self._priorities.first()
        return None if priority is None else self._classes[priority].head()

    def take(self, cost: int) -> Request:
        """The head is admitted, and computes so many tokens of its prompt.  Somebody waits."""
        priority = self._priorities.first()
        request = None if priority is None else self._classes[priority].head()
        if priority is None or request is None:
            raise IndexError("nobody waits")
        one = self._classes[priority]
        if request.number in one.newcomers:
            share = one.newcomers.take(cost)
            request.charged = cost
        else:
            heapq.heappop(one.continued if request.continued else one.passing)
            share = one.newcomers.share(request.flow)
            has_followed = request.charged and not request.begun
            if (not request.continued or has_followed) and cost > request.charged:
                share.charge(cost - request.charged)
                request.charged = cost
        self._seated(request, share)
        self._left(priority)
        return request

    def seat(self, request: Request) -> None:
        """A request that did not wait here runs: it was prefilled elsewhere."""
        self._seated(request, self._class(request.rank[0]).newcomers.share(request.flow))

    def is_new(self, request: Request) -> bool:
        """It is of a flow of which nothing is known here, beside others."""
        one = self._classes.get(request.rank[0])
        return one is not None and not one.newcomers.unused and one.newcomers.is_new(request.flow)

    def settle(self, running: Iterable[Request | None], *, charge: bool, alone: bool = False) -> None:
        """Charges what these have generated since the last time, or only remembers that it was.  Where no
        flow has a rival nothing is to be compared, and nothing is done, unless `alone`."""
        if not alone and not any(one.newcomers.rivals for one in self._classes.values()):
            return
        for request in running:
            if request is not None and request.share is not None:
                generated = len(request.tokens) - request.settled
                if generated:
                    request.settled += generated
                    if charge:
                        request.share.charge(generated)

    def released(self, request: Request) -> None:
        """A request that ran has ended, or gave way."""
        share, request.share = request.share, None
        if share is not None:
            share.end()
            self._tidy(request.rank[0])

    def _class(self, priority: int) -> _Class:
        one = self._classes.get(priority)
        if one is None:
            one = self._classes[priority] = _Class()
        return one

    def _seated(self, request: Request, share: Share[Request]) -> None:
        request.share = share
        request.settled = len(request.tokens)
        share.begin()

    def _left(self, priority: int) -> None:
        self._num_waiting -= 1
        self._counts[priority] -= 1
        if not self._counts[priority]:
            del self._counts[priority]
            self._priorities.remove(priority)
            self._tidy(priority)

    def _tidy(self, priority: int) -> None:
        """Forgets a priority that nobody has."""
        one = self._classes.get(priority)
        if one is not None and priority not in self._counts and one.newcomers.unused:
            del self._classes[priority]


def _first(heap: list[tuple[Rank, Request]]) -> Request | None:
    while heap and heap[0][1].state is not State.WAITING:
        heapq.heappop(heap)
    return heap[0][1] if heap else None
