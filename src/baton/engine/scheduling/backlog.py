"""Bounds how many new requests wait in the engine, and chooses which one is displaced if more come.  Pure.

Theory.  `max_waiting` bounds the requests that wait for admission or are prepared for a hand-over.  When it
is reached, places go where they are needed most: a request of better priority takes the place of the worst
that waits, and within a priority one of a flow that has few places takes one of the flow that has the most,
by weight (longest queue drop, first among keys, then among the users of the key).  Of that flow it is the
last that came.  A request never displaces an equal one, so a queue of equals refuses newcomers.

Only requests that have had no slot and no token yet are displaced.  Each operation costs O(log n).
"""

from __future__ import annotations

from baton.engine.request import Request
from baton.protocol.rules.fair_queue import Flow, Ranking


class _User:
    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests: dict[int, Request] = {}
        """By number, in the order of their coming."""


class _Key:
    __slots__ = ("count", "most", "users", "weight")

    def __init__(self) -> None:
        self.count = 0
        self.weight = 1.0
        self.users: dict[str, _User] = {}
        self.most: Ranking[str] = Ranking()
        """Its users, the one with most requests first."""

    @property
    def score(self) -> float:
        return -self.count / self.weight


class _Class:
    """Of one priority."""

    __slots__ = ("keys", "most")

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        self.most: Ranking[str] = Ranking()


class Backlog:
    """The newcomers of one engine that wait."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}
        self._worst: Ranking[int] = Ranking()
        """Priorities, the largest first."""

    def add(self, request: Request) -> None:
        priority, flow = request.rank[0], request.flow
        one = self._classes.setdefault(priority, _Class())
        key = one.keys.setdefault(flow.key, _Key())
        user = key.users.setdefault(flow.user, _User())
        user.requests[request.number] = request
        key.count, key.weight = key.count + 1, flow.weight
        self._rank(priority, one, flow, key, user)

    def remove(self, request: Request) -> None:
        """It waits no more, or is no newcomer.  Harmless if it is not there."""
        priority, flow = request.rank[0], request.flow
        one = self._classes.get(priority)
        key = None if one is None else one.keys.get(flow.key)
        user = None if key is None else key.users.get(flow.user)
        if one is None or key is None or user is None:
            return
        if user.requests.pop(request.number, None) is not None:
            key.count -= 1
            self._rank(priority, one, flow, key, user)

    def counts(self, most: int) -> dict[str, int]:
        """How many wait by key: the `most` that have the most of them, all others together as "*"."""
        counts: dict[str, int] = {}
        for one in self._classes.values():
            for name, key in one.keys.items():
                counts[name] = counts.get(name, 0) + key.count
        ordered = sorted(counts, key=lambda name: (-counts[name], name))
        result = {name: counts[name] for name in ordered[:most]}
        if len(ordered) > most:
            result["*"] = sum(counts[name] for name in ordered[most:])
        return result

    def place_for(self, priority: int, flow: Flow, *, continued: bool = False) -> Request | None:
        """Who makes place for such a request; None: nobody.  `continued`: it has run before."""
        worst = self._worst.first()
        if worst is None or worst < priority:
            return None
        one = self._classes[worst]
        name = one.most.first()
        if name is None:
            return None
        key = one.keys[name]
        most = key.most.first()
        if most is None:
            return None
        if worst == priority and not continued:
            own = one.keys.get(flow.key)
            if name != flow.key:
                count = 0 if own is None else own.count
                if key.score >= -(count + 1) / flow.weight:
                    return None
            elif most == flow.user or len(key.users[most].requests) <= self._num_of(key, flow.user) + 1:
                return None
        return next(reversed(key.users[most].requests.values()))

    @staticmethod
    def _num_of(key: _Key, user: str) -> int:
        known = key.users.get(user)
        return 0 if known is None else len(known.requests)

    def _rank(self, priority: int, one: _Class, flow: Flow, key: _Key, user: _User) -> None:
        if user.requests:
            key.most.set(flow.user, -len(user.requests))
        else:
            del key.users[flow.user]
            key.most.remove(flow.user)
        if key.count:
            one.most.set(flow.key, key.score)
        else:
            del one.keys[flow.key]
            one.most.remove(flow.key)
        if one.keys:
            self._worst.set(priority, -priority)
        else:
            del self._classes[priority]
            self._worst.remove(priority)
