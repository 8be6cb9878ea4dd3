"""Who makes place when the queue is full."""

from array import array

from baton.engine.request import Outbox, Request
from baton.engine.scheduling.backlog import Backlog
from baton.protocol.params.sampling import Sampling, Stopping
from baton.protocol.rules.fair_queue import EVERYBODY, Flow


class Queue:
    def __init__(self) -> None:
        self.backlog = Backlog()
        self._count = 0

    def add(self, priority: int = 0, flow: Flow = EVERYBODY, count: int = 1) -> list[Request]:
        requests = []
        for _ in range(count):
            self._count += 1
            request = Request(
                Outbox(b"g"),
                self._count,
                f"r{self._count}",
                array("i", [1]),
                Sampling(seed=0),
                Stopping(4),
                priority=priority,
                number=self._count,
                arrived=0.0,
                flow=flow,
            )
            self.backlog.add(request)
            requests.append(request)
        return requests


def test_the_worst_priority_makes_place_and_of_it_who_came_last():
    queue = Queue()
    assert queue.backlog.place_for(-5, EVERYBODY) is None
    queue.add(0, count=3)
    worst = queue.add(2, count=2)
    queue.add(1)
    assert queue.backlog.place_for(0, EVERYBODY) is worst[1]
    assert queue.backlog.place_for(2, EVERYBODY) is None  # an equal
    assert queue.backlog.place_for(3, EVERYBODY) is None
    for request in worst:
        queue.backlog.remove(request)
        queue.backlog.remove(request)
    assert queue.backlog.place_for(0, EVERYBODY) is not None
    assert queue.backlog.place_for(1, EVERYBODY) is None


def test_within_a_priority_who_has_the_most_places_makes_place():
    queue = Queue()
    many = queue.add(0, Flow("a"), 5)
    queue.add(0, Flow("b"), 3)
    assert queue.backlog.place_for(0, Flow("c")) is many[-1]
    assert queue.backlog.place_for(0, Flow("b")) is many[-1]
    assert queue.backlog.place_for(0, Flow("a")) is None
    queue.add(0, Flow("b"))
    assert queue.backlog.place_for(0, Flow("b")) is None  # it would have as many
    assert queue.backlog.place_for(0, Flow("b", weight=2.0)) is many[-1]


def test_the_users_of_one_key_share_its_places():
    queue = Queue()
    loud = queue.add(0, Flow("a", "loud"), 3)
    queue.add(0, Flow("a", "quiet"))
    assert queue.backlog.place_for(0, Flow("a", "new")) is loud[-1]
    assert queue.backlog.place_for(0, Flow("a", "quiet")) is loud[-1]
    assert queue.backlog.place_for(0, Flow("a", "loud")) is None
    for user in range(3):
        queue.add(0, Flow("a", f"invented{user}"))
    queue.add(0, Flow("b"), 5)
    # A key that invents users has no more places for that.
    assert queue.backlog.place_for(0, Flow("a", "one more")) is loud[-1]
    assert queue.backlog.place_for(0, Flow("c")) is loud[-1]


def test_what_ran_before_takes_the_place_of_an_equal():
    queue = Queue()
    (waits,) = queue.add(0)
    assert queue.backlog.place_for(0, EVERYBODY) is None
    assert queue.backlog.place_for(0, EVERYBODY, continued=True) is waits
    assert queue.backlog.place_for(1, EVERYBODY, continued=True) is None
