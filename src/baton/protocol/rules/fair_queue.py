"""Fair queuing of requests between users: start-time fair queuing over tokens, in three levels.  Pure.

Theory.  A *flow* is (API key, user, gateway): the key's share is its weight among all keys, the users of one
key divide what the key gets evenly, and the gateways over which one user asks divide what it gets.  So a
client that invents users takes from its own key alone, what a user gets does not depend on the gateways, and
a flood over one gateway does not keep the same user's requests of another one out.  Within a flow requests
are served in the order of their coming.

Each share has a *tag*, the tokens it was served divided by its weight, and the share with the smallest tag
is served next.  What a request costs is not known when it comes (how much of it is cached, how long is the
answer?), so a share is charged as the service happens: `take` charges what must be computed of the prompt,
`Share.charge` what was generated since.  A share that begins to wait begins at its parent's *clock* at least,
as nobody saves up service by not using it.  The clock is the largest tag that was ever chosen, and moves by
cost / (the weights of those that wait) with each choice besides, as fast as everybody would be served in
turn; so new shares, however many come, do not keep older ones waiting for ever.

**Bound.**  Take two shares f and g that both wait all the time.  When f was chosen last its tag was not
larger than g's, and since then f was charged for that one request's prompt and for what f's running requests
have generated: together X_f.  Tags of shares that wait never fall, so tag(f) - tag(g) <= X_f / weight(f),
and the same the other way round.  So over any time in which both wait the tokens served differ, each divided
by its weight, by at most X_f / weight(f) + X_g / weight(g), where X is one prompt and the answers of what
one share runs at once.  (`simulation/checks/watches/scheduling/fairness.py` checks that.)

**Bounded.**  Shares that wait or run are no more than the requests that do.  Of the others a share is
forgotten when it has no lead over the clock, when nobody waits or runs beside it, and else when
`MAX_IDLE` younger ones are remembered; it loses a debt of at most X by that.  Each operation costs O(log n).

Nothing depends on hashes or addresses: equal calls give equal orders.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

MAX_IDLE = 256
"""Shares of one parent that are remembered although they neither wait nor run."""
MAX_NAME = 64
"""Characters of a key's or user's name in a flow; gateways send digests."""
MIN_WEIGHT, MAX_WEIGHT = 1e-3, 1e3

T = TypeVar("T")
Rank = tuple[float, ...]
"""Smaller is served first; unique in its queue."""


class Flow(msgspec.Struct, array_like=True, frozen=True):
    """Whose a request is."""

    key: str = ""
    """Names the API key; "" if there is none, or fair queuing is off."""
    user: str = ""
    """Names the user within the key; "" if unknown."""
    weight: float = 1.0
    """Of the key."""
    gateway: str = ""
    """Names the gateway; the engine that takes the request sets it."""


EVERYBODY = Flow()


def check_flow(flow: Flow) -> str | None:
    """What is wrong with a flow that came over the wire, for people; None if nothing is."""
    if max(len(flow.key), len(flow.user), len(flow.gateway)) > MAX_NAME:
        return f"flow: names of at most {MAX_NAME} characters"
    if not MIN_WEIGHT <= flow.weight <= MAX_WEIGHT:
        return f"flow: the weight {flow.weight} must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
    return None


class Ranking(Generic[T]):
    """Members and their scores; `first` has the smallest.  Members must be comparable with each other."""

    __slots__ = ("_heap", "_scores")

    def __init__(self) -> None:
        self._scores: dict[T, Any] = {}
        self._heap: list[tuple[Any, T]] = []
        """With entries of members that left or have another score by now."""

    def __len__(self) -> int:
        return len(self._scores)

    def __iter__(self) -> Iterator[T]:
        return iter(self._scores)

    def set(self, member: T, score: Any) -> None:
        if self._scores.get(member) == score:
            return
        self._scores[member] = score
        if len(self._heap) > 2 * len(self._scores) + 16:
            self._heap = [(known, one) for one, known in self._scores.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (score, member))

    def remove(self, member: T) -> None:
        """Harmless if it is not there."""
        self._scores.pop(member, None)
        if not self._scores:
            self._heap.clear()

    def first(self) -> T | None:
        heap = self._heap
        while heap and self._scores.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][1] if heap else None


class Share(Generic[T]):
    """What a key, a user of a key, or a user over one gateway is served.  Of the last: also its requests that
    wait."""

    __slots__ = (
        "children",
        "clock",
        "idle",
        "items",
        "name",
        "order",
        "parent",
        "ready",
        "running",
        "since",
        "tag",
        "waiting",
        "weight",
        "weights",
    )

    def __init__(self, name: str, parent: Share[T] | None, weight: float) -> None:
        self.name = name
        self.parent = parent
        self.weight = weight
        self.tag: float = 0.0 if parent is None else parent.clock
        self.since: Rank = ()
        """The request with which it began to wait; of equal tags the older one is served."""
        self.waiting = 0
        self.running = 0
        """Requests that were taken and are not over."""
        self.children: dict[str, Share[T]] = {}
        self.clock: float = 0.0
        """Of its children."""
        self.weights = 0.0
        """The sum over its children that wait."""
        self.ready: Ranking[str] = Ranking()
        """Its children that wait."""
        self.idle: OrderedDict[str, None] = OrderedDict()
        """Its children that neither wait nor run, the one that is so for longest first."""
        self.items: dict[int, T] = {}
        self.order: list[tuple[Rank, int]] = []
        """A heap of the numbers of its items, also of some that left."""

    def child(self, name: str, weight: float) -> Share[T]:
        share = self.children.get(name)
        if share is None:
            share = self.children[name] = Share(name, self, weight)
        elif share.weight != weight:
            if share.waiting:
                self.weights += weight - share.weight
            share.weight = weight
        self.idle.pop(name, None)
        return share

    def charge(self, tokens: float) -> None:
        """It was served so many tokens."""
        share: Share[T] = self
        while (parent := share.parent) is not None:
            if len(parent.children) > 1:  # (else there is nobody to be compared with)
                share.tag += tokens / share.weight
                if share.waiting:
                    parent.ready.set(share.name, (share.tag, share.since))
            share = parent

    def begin(self) -> None:
        """One more request of it runs."""
        share: Share[T] | None = self
        while share is not None:
            share.running += 1
            share = share.parent

    def end(self) -> None:
        """One that ran is over."""
        share: Share[T] | None = self
        while share is not None:
            share.running -= 1
            share = share.parent
        self.forget()

    def wait(self, rank: Rank) -> None:
        """One more request of it waits."""
        share: Share[T] = self
        share.waiting += 1
        while (parent := share.parent) is not None:
            if share.waiting == 1:
                share.tag = max(share.tag, parent.clock)
                share.since = rank
                parent.weights += share.weight
                parent.ready.set(share.name, (share.tag, share.since))
            parent.waiting += 1
            share = parent

    def wait_no_more(self) -> None:
        """One of those that waited does not."""
        share: Share[T] = self
        share.waiting -= 1
        while (parent := share.parent) is not None:
            if not share.waiting:
                share.since = ()
                parent.ready.remove(share.name)
                parent.weights = parent.weights - share.weight if len(parent.ready) else 0.0
            parent.waiting -= 1
            share = parent

    def forget(self) -> None:
        """Forgets those on the way up that need not be remembered."""
        share: Share[T] = self
        while not share.waiting and not share.running:
            parent = share.parent
            share.children.clear()
            share.idle.clear()
            share.clock = 0.0
            if parent is None:
                return
            if share.tag <= parent.clock:
                parent.children.pop(share.name, None)
                parent.idle.pop(share.name, None)
            else:
                parent.idle[share.name] = None
                if len(parent.idle) > MAX_IDLE:
                    oldest, _ = parent.idle.popitem(last=False)
                    del parent.children[oldest]
            share = parent

    def head(self) -> tuple[int, T] | None:
        """Its own request that comes next, with its number."""
        while self.order and self.order[0][1] not in self.items:
            heapq.heappop(self.order)
        return (self.order[0][1], self.items[self.order[0][1]]) if self.order else None


class FairQueue(Generic[T]):
    """Requests of one priority that wait, known by a number."""

    def __init__(self) -> None:
        self.root: Share[T] = Share("", None, 1.0)
        self._shares: dict[int, Share[T]] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def __iter__(self) -> Iterator[T]:
        """In no order that matters."""
        return (share.items[number] for number, share in self._shares.items())

    def __contains__(self, number: int) -> bool:
        return number in self._shares

    @property
    def unused(self) -> bool:
        """Nothing waits and nothing that was taken runs: it may be thrown away."""
        return not self.root.waiting and not self.root.running

    @property
    def rivals(self) -> bool:
        """Several shares are known, so that some are compared with others."""
        share = self.root
        while len(share.children) == 1:
            (share,) = share.children.values()
        return len(share.children) > 1

    def share(self, flow: Flow) -> Share[T]:
        """That of a flow; made if there is none.  Call `forget` if it is not used after all."""
        return self.root.child(flow.key, flow.weight).child(flow.user, 1.0).child(flow.gateway, 1.0)

    def is_new(self, flow: Flow) -> bool:
        """Nothing is remembered of this flow."""
        key = self.root.children.get(flow.key)
        user = None if key is None else key.children.get(flow.user)
        return user is None or flow.gateway not in user.children

    def push(self, item: T, number: int, rank: Rank, flow: Flow) -> None:
        share = self.share(flow)
        share.items[number] = item
        heapq.heappush(share.order, (rank, number))
        if len(share.order) > 2 * len(share.items) + 16:
            share.order = [entry for entry in share.order if entry[1] in share.items]
            heapq.heapify(share.order)
        self._shares[number] = share
        share.wait(rank)

    def remove(self, number: int) -> None:
        """It does not wait any more, and was not served.  Harmless if it is not there."""
        share = self._shares.pop(number, None)
        if share is not None:
            del share.items[number]
            share.wait_no_more()
            share.forget()

    def head(self) -> T | None:
        """What is served next."""
        share = self._next()
        entry = None if share is None else share.head()
        return None if entry is None else entry[1]

    def take(self, cost: float) -> Share[T]:
        """The head is served, at this cost in tokens: it leaves the queue and its share is charged.  The
        caller calls `begin` or `forget` of the share that is returned.  `IndexError`: nothing waits."""
        share = self._next()
        entry = None if share is None else share.head()
        if share is None or entry is None:
            raise IndexError("nothing waits")
        child: Share[T] = share
        while (parent := child.parent) is not None:
            parent.clock = max(parent.clock, child.tag)
            if len(parent.children) > 1:
                parent.clock += cost / parent.weights
            child = parent
        del self._shares[entry[0]], share.items[entry[0]]
        share.wait_no_more()
        share.charge(cost)
        return share

    def _next(self) -> Share[T] | None:
        share = self.root
        while share.children:
            name = share.ready.first()
            if name is None:
                return None
            share = share.children[name]
        return share if share.items else None


class FairLine(Generic[T]):
    """Things that wait, of any class (smaller ones first), fairly by flow within one.  Known by a number."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, ...], FairQueue[T]] = {}
        self._classes: Ranking[tuple[int, ...]] = Ranking()
        self._where: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def push(self, item: T, number: int, level: tuple[int, ...], flow: Flow) -> None:
        """`number`: unique here; smaller ones of a flow come first."""
        queue = self._queues.get(level)
        if queue is None:
            queue = self._queues[level] = FairQueue()
        queue.push(item, number, (number,), flow)
        self._classes.set(level, level)
        self._where[number] = level

    def remove(self, number: int) -> None:
        """Harmless if it is not there."""
        level = self._where.pop(number, None)
        if level is not None:
            self._queues[level].remove(number)
            self._tidy(level)

    def head(self) -> T | None:
        level = self._classes.first()
        return None if level is None else self._queues[level].head()

    def take(self, number: int, cost: float) -> None:
        """The head, which has this number, is served at this cost."""
        level = self._where.pop(number)
        self._queues[level].take(cost).forget()
        self._tidy(level)

    def _tidy(self, level: tuple[int, ...]) -> None:
        if not len(self._queues[level]):
            del self._queues[level]
            self._classes.remove(level)
