"""Fair queuing: who is served next, by how much shares may differ, and what is remembered."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.protocol.rules.fair_queue import MAX_IDLE, MAX_NAME, FairLine, FairQueue, Flow, Ranking, check_flow


class Server:
    """Serves a queue; what a request costs is in its item."""

    def __init__(self) -> None:
        self.queue: FairQueue[tuple[Flow, int]] = FairQueue()
        self.number = 0
        self.served: dict[Flow, int] = {}

    def ask(self, flow: Flow, cost: int, count: int = 1) -> None:
        for _ in range(count):
            self.number += 1
            self.queue.push((flow, cost), self.number, (0, self.number), flow)

    def serve(self, generated: int = 0) -> Flow:
        item = self.queue.head()
        assert item is not None
        flow, cost = item
        share = self.queue.take(cost)
        share.begin()
        share.charge(generated)
        share.end()
        self.served[flow] = self.served.get(flow, 0) + cost + generated
        return flow


A, B, C = Flow("a"), Flow("b"), Flow("c")


def test_a_flow_is_first_come_first_served():
    queue: FairQueue[int] = FairQueue()
    for number in (3, 1, 2):
        queue.push(number, number, (0, number), A)
    order = []
    while queue:
        order.append(queue.head())
        queue.take(10).forget()
    assert order == [1, 2, 3]


def test_who_comes_into_a_flood_is_next_but_one():
    server = Server()
    server.ask(A, 1500, 200)
    for _ in range(5):
        server.serve()
    server.ask(B, 1500)
    assert [server.serve(), server.serve()] == [A, B]  # (equal until A is charged for the first of them)


def test_shares_of_equal_weight_get_equal_tokens_not_equal_requests():
    server = Server()
    server.ask(A, 100, 100)
    server.ask(B, 20, 500)
    for _ in range(300):
        server.serve()
    assert abs(server.served[A] - server.served[B]) <= 200


def test_what_is_generated_counts():
    server = Server()
    server.ask(A, 10, 100)
    server.ask(B, 10, 100)
    for _ in range(60):
        item = server.queue.head()
        assert item is not None
        server.serve(generated=90 if item[0] == A else 0)
    assert abs(server.served[A] - server.served[B]) <= 200


def test_weights_divide_tokens_in_their_proportion():
    server = Server()
    heavy = Flow("heavy", weight=3.0)
    server.ask(heavy, 10, 400)
    server.ask(B, 10, 400)
    for _ in range(400):
        server.serve()
    assert server.served[heavy] == pytest.approx(3 * server.served[B], rel=0.02)


def test_a_key_with_many_users_gets_no_more_than_one_with_one():
    server = Server()
    for user in range(100):
        server.ask(Flow("many", f"u{user}"), 10)
    server.ask(Flow("one", "me"), 10, 100)
    for _ in range(100):
        server.serve()
    assert server.served[Flow("one", "me")] == 500
    # And its users share: each of them was served once at most.
    assert sum(cost for flow, cost in server.served.items() if flow.key == "many") == 500


def test_nobody_saves_up_by_being_away():
    server = Server()
    server.ask(B, 10)
    server.serve()
    server.ask(A, 10, 1000)
    for _ in range(100):
        server.serve()
    server.ask(B, 10, 100)
    server.served.clear()
    for _ in range(40):
        server.serve()
    assert 180 <= server.served[B] <= 220


def test_ever_new_flows_starve_nobody():
    server = Server()
    server.ask(A, 10, 3)
    server.ask(B, 10)
    server.serve(generated=1000)  # A is far ahead now
    for number in range(20):
        server.ask(Flow(f"early{number}"), 10)
    for number in range(4000):
        server.ask(Flow(f"new{number}"), 10)  # (as many as are served: the queue is bounded)
        if server.serve() == A:
            return
    pytest.fail("A was never served again")


def test_what_is_remembered_is_bounded():
    server = Server()
    server.ask(A, 10, 5000)
    for number in range(2000):
        server.ask(Flow("b", f"user{number}"), 10)
        server.ask(Flow(f"key{number}"), 10)
        for _ in range(3):
            server.serve(generated=5)
    keys = server.queue.root.children
    waiting = len(list(server.queue))
    assert len(keys) <= waiting + MAX_IDLE + 1
    assert sum(len(key.children) for key in keys.values()) <= waiting + 2 * MAX_IDLE + 1
    while server.queue:
        server.serve()
    assert not server.queue.root.children
    assert server.queue.unused


def test_who_waits_no_more_leaves_no_trace():
    queue: FairQueue[int] = FairQueue()
    for number in range(200):
        queue.push(number, number, (0, number), Flow("k", f"u{number % 7}"))
    for number in range(199):
        queue.remove(number)
        queue.remove(number)
    assert queue.head() == 199
    queue.remove(199)
    assert queue.head() is None
    assert not queue.root.children
    with pytest.raises(IndexError):
        queue.take(1)


@given(st.integers(0, 2**32), st.integers(2, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_bound_of_the_theory(seed: int, num_flows: int, come_and_go: bool):
    """Of two flows that both wait all the time, the tokens by weight differ by no more than X/w of each."""
    draw = random.Random(seed)
    flows = [Flow(f"k{index}", weight=draw.choice((0.5, 1.0, 1.0, 4.0))) for index in range(num_flows)]
    server = Server()
    most = 50 + 200
    ever = flows[:2]
    for flow in flows:
        server.ask(flow, draw.randint(1, 50), 3)
    start = dict.fromkeys(ever, 0)
    for _ in range(400):
        for flow in ever:
            share = server.queue.root.children.get(flow.key)
            if share is None or share.waiting < 2:
                server.ask(flow, draw.randint(1, 50), 3)
        if come_and_go and draw.random() < 0.3:
            server.ask(draw.choice(flows), draw.randint(1, 50), draw.randint(1, 5))
        if server.queue:
            server.serve(generated=draw.choice((0, 0, 10, 200)))
        if draw.random() < 0.01:
            start = {flow: server.served.get(flow, 0) for flow in ever}
        f, g = ((server.served.get(flow, 0) - start[flow]) / flow.weight for flow in ever)
        assert abs(f - g) <= most / ever[0].weight + most / ever[1].weight


def test_the_same_calls_give_the_same_order():
    def run() -> list[Flow]:
        draw, server, order = random.Random(5), Server(), []
        for _ in range(500):
            server.ask(Flow(f"k{draw.randrange(9)}", f"u{draw.randrange(9)}"), draw.randint(1, 99))
            if draw.random() < 0.9:
                order.append(server.serve(draw.randrange(50)))
        return order

    assert run() == run()


def test_the_work_of_a_submit_does_not_grow_with_what_waits(monkeypatch):
    """Counted in comparisons of scores: some for each of the two levels, and their logarithm."""
    compared = 0

    class Score(tuple):
        def __lt__(self, other):
            nonlocal compared
            compared += 1
            return tuple.__lt__(self, other)

    original = Ranking.set
    monkeypatch.setattr(Ranking, "set", lambda self, name, score: original(self, name, Score(score)))
    costs = []
    for size in (100, 10_000):
        server = Server()
        for index in range(size):
            server.ask(Flow(f"k{index}"), 10, 2)
        compared = 0
        for index in range(100):
            server.ask(Flow(f"k{index}"), 10)
            server.serve()
        costs.append(compared)
    assert costs[1] < 4 * costs[0]


def test_a_line_of_several_classes():
    line: FairLine[str] = FairLine()
    line.push("later", 1, (5,), A)
    line.push("a1", 2, (0,), A)
    line.push("a2", 3, (0,), A)
    line.push("b1", 4, (0,), B)
    assert len(line) == 4
    order = []
    while (head := line.head()) is not None:
        order.append(head)
        line.take({"later": 1, "a1": 2, "a2": 3, "b1": 4}[head], 10)
    assert order == ["a1", "b1", "a2", "later"]
    assert len(line) == 0
    line.remove(4)


def test_flows_from_the_wire_are_checked():
    assert check_flow(Flow("k", "u", 2.0)) is None
    assert "characters" in str(check_flow(Flow("k" * (MAX_NAME + 1))))
    assert "weight" in str(check_flow(Flow("k", "u", float("nan"))))
    assert "weight" in str(check_flow(Flow("k", "u", 0.0)))
