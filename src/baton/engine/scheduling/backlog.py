"""Bounds how many new requests wait in the engine, and chooses which one is displaced if more come.  Pure.

Theory.  `max_waiting` bounds the requests that wait for admission or are prepared for a hand-over.  When it
is reached, places go where they are needed most: a request of better priority takes the place of the worst
that waits, and within a priority one of a flow that has few places takes one of the flow that has the most,
by weight (longest queue drop, first among keys, then among the users of the key, then among the gateways of
the user).  Of that flow it is the last that came.  A request never displaces an equal one, so a queue of
equals refuses newcomers.

Only requests that have had no slot and no token yet are displaced.  Each operation costs O(log n).
"""

from __future__ import annotations

from baton.engine.request import Request
from baton.protocol.rules.fair_queue import Flow, Ranking


class _User:
    __slots__ = ("count", "gateways", "most")

    def __init__(self) -> None:
        self.count = 0
        self.gateways: dict[str, dict[int, Request]] = {}
        """Its requests over each, by number, in the order of their coming."""
        self.most: Ranking[str] = Ranking()
        """Gateways, the one with most requests first."""

    def set(self, request: Request, *, waits: bool) -> bool:
        """False: nothing has changed."""
        name = request.flow.gateway
        requests = self.gateways.setdefault(name, {})
        if waits == (request.number in requests):
            return False
        if waits:
            requests[request.number] = request
        else:
            del requests[request.number]
        self.count += 1 if waits else -1
        if requests:
            self.most.set(name, -len(requests))
        else:
            del self.gateways[name]
            self.most.remove(name)
        return True

    def last(self) -> Request | None:
        """Of the gateway that has most, the last that came."""
        name = self.most.first()
        return None if name is None else next(reversed(self.gateways[name].values()))

    def last_of_others(self, gateway: str) -> Request | None:
        """The same, if that gateway has more than this one would have with one more."""
        last, own = self.last(), len(self.gateways.get(gateway, ()))
        name = self.most.first()
        if name is None or name == gateway or len(self.gateways[name]) <= own + 1:
            return None
        return last


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
        user.set(request, waits=True)
        key.count, key.weight = key.count + 1, flow.weight
        self._rank(priority, one, flow, key, user)

    def remove(self, request: Request) -> None:
        """It waits no more, or is no newcomer.  Harmless if it is not there."""
        priority, flow = request.rank[0], request.flow
        one = self._classes.get(priority)
        key = None if one is None else one.keys.get(flow.key)
        user = None if key is None else key.users.get(flow.user)
        if one is None or key is None or user is None or flow.gateway not in user.gateways:
            return
        if user.set(request, waits=False):
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
        if worst == priority and not continued and not self._has_more(one, name, most, flow):
            own = one.keys.get(flow.key)
            mine = None if own is None else own.users.get(flow.user)
            return None if mine is None else mine.last_of_others(flow.gateway)
        return key.users[most].last()

    @staticmethod
    def _has_more(one: _Class, name: str, user: str, flow: Flow) -> bool:
        """This user of this key, who has most, has more than the flow's would have with one more."""
        key, own = one.keys[name], one.keys.get(flow.key)
        if name != flow.key:
            return key.score < -((0 if own is None else own.count) + 1) / flow.weight
        known = key.users.get(flow.user)
        return user != flow.user and key.users[user].count > (0 if known is None else known.count) + 1

    def _rank(self, priority: int, one: _Class, flow: Flow, key: _Key, user: _User) -> None:
        if user.count:
            key.most.set(flow.user, -user.count)
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
