"""Several gateways at one engine: a flood over one of them does not keep another one's requests out."""

from __future__ import annotations

import pytest

from baton.engine.request import Outbox, Request
from baton.engine.scheduling.backlog import Backlog
from baton.protocol.messages.requests import Hello
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.fair_queue import FairQueue, Flow
from tests.engine.world import World


def order_of(flows: list[Flow], cost: float = 10.0) -> list[int]:
    """In which order requests of these flows are served, each at this cost."""
    queue: FairQueue[int] = FairQueue()
    for number, flow in enumerate(flows):
        queue.push(number, number, (number,), flow)
    served = []
    while (head := queue.head()) is not None:
        queue.take(cost).forget()
        served.append(head)
    return served


def test_gateways_take_turns_within_a_user():
    flood = [Flow("k", "u", gateway="a")] * 10
    served = order_of([*flood, *[Flow("k", "u", gateway="b")] * 3])
    assert max(served.index(number) for number in (10, 11, 12)) <= 6


def test_what_a_user_gets_does_not_depend_on_its_gateways():
    """One asks over two gateways, the other one over one: both get the same."""
    both = [Flow("k", "x", gateway=name) for name in ("a", "b")] * 10
    served = order_of([*both, *[Flow("k", "y", gateway="a")] * 10])
    assert abs(sum(number < 20 for number in served[:10]) - 5) <= 1


class Places:
    """A backlog of so many places, as the engine keeps it."""

    def __init__(self, places: int) -> None:
        self.backlog = Backlog()
        self.places = places
        self.waiting: list[Request] = []
        self._numbers = 0

    def come(self, flow: Flow) -> bool:
        """Whether it gets a place."""
        if len(self.waiting) == self.places:
            worst = self.backlog.place_for(0, flow)
            if worst is None:
                return False
            self.backlog.remove(worst)
            self.waiting.remove(worst)
        self._numbers += 1
        outbox, params = Outbox(b""), (Sampling(seed=1), Stopping(1))
        more = dict(priority=0, number=self._numbers, arrived=0.0, num_prompt=1, flow=flow)
        request = Request(outbox, self._numbers, "", [1], *params, **more)
        self.backlog.add(request)
        self.waiting.append(request)
        return True

    def count(self, gateway: str) -> int:
        return sum(request.flow.gateway == gateway for request in self.waiting)


@pytest.mark.parametrize("other", ["u", "v"])
def test_a_full_queue_makes_place_for_another_gateway(other: str):
    """Also where another user has as many places."""
    places = Places(8)
    if other != "u":
        for _ in range(4):
            places.come(Flow("k", other, gateway="a"))
    while places.come(Flow("k", "u", gateway="a")) and len(places.waiting) < 8:
        pass
    wanted = [places.come(Flow("k", "u", gateway="b")) for _ in range(6)]
    assert places.count("b") == wanted.count(True) == (4 if other == "u" else 2)
    assert not places.come(Flow("k", "u", gateway="b")), "nobody makes place for an equal"
    assert not places.come(Flow("k", "u", gateway="a"))


def test_the_engine_names_the_gateway_itself():
    """Whatever the gateway says of it."""
    world = World(max_num_seqs=1, num_blocks=30)
    for name in (b"a", b"b"):
        world.core.on_message(name, Hello(name.decode()), world.now)
    clients = [world.submit([1, 2], 1, gateway=b"a") for _ in range(6)]
    late = world.submit([3, 4], 1, gateway=b"b")
    flows = {request.flow.gateway for request in world.core.scheduler.waiting_requests()}
    assert len(flows) == 2
    for _ in range(40):
        world.step()
        world.read_reports()
        world.flush()
        world.apply()
        if late.finished:
            break
    assert late.finished
    assert sum(bool(client.finished) for client in clients) <= 3
