"""Tasks: waits, turns, deadlines, cancelling."""

import os
import time

import pytest

from baton.transfer.tasks import READ, Tasks, Wait
from tests.conftest import GENEROUS_S


class Ends(list):
    def named(self, name):
        return lambda result, error: self.append((name, result, error))


@pytest.fixture
def tasks():
    tasks = Tasks()
    yield tasks
    tasks.close()


def run(tasks):
    give_up = time.monotonic() + GENEROUS_S
    while tasks.alive and time.monotonic() < give_up:
        tasks.run_once(0.05)


def test_a_task_is_told_whether_its_descriptor_became_ready(tasks):
    read, write = os.pipe()
    ends = Ends()

    def waiter(seconds):
        return (yield Wait(read, READ, seconds))

    try:
        tasks.start(waiter(0.02), ends.named("late"))
        run(tasks)
        os.write(write, b"x")
        tasks.start(waiter(GENEROUS_S), ends.named("ready"))
        run(tasks)
    finally:
        os.close(read)
        os.close(write)
    assert ends == [("late", False, None), ("ready", True, None)]


def test_tasks_take_turns_and_one_that_fails_ends_alone(tasks):
    order, ends = [], Ends()

    def worker(name, turns):
        for _ in range(turns):
            order.append(name)
            yield None
        if name == "b":
            raise ValueError("b failed")
        return name

    for name, turns in (("a", 3), ("b", 2), ("c", 3)):
        tasks.start(worker(name, turns), ends.named(name))
    run(tasks)
    assert "".join(order) == "abcabcac"
    assert [(name, result) for name, result, _ in ends] == [("b", None), ("a", "a"), ("c", "c")]
    assert str(ends[0][2]) == "b failed"


def test_cancelling_runs_what_must_be_run_and_reports_nothing(tasks):
    closed, ends = [], Ends()

    def holder(name):
        try:
            while True:
                yield Wait(-1, 0, 60.0)
        finally:
            closed.append(name)

    one, other = (tasks.start(holder(name), ends.named(name)) for name in "ab")
    tasks.run_once(0.0)
    tasks.cancel(one)
    tasks.cancel(one)
    assert (closed, tasks.alive) == (["a"], {other})
    fresh = tasks.start(holder("c"), ends.named("c"))
    tasks.cancel(fresh)  # it never ran: there is nothing to close
    tasks.run_once(0.0)
    tasks.close()
    assert (closed, ends, tasks.alive) == (["a", "b"], [], set())


def test_a_task_may_cancel_another_that_is_ready(tasks):
    ends, ran = Ends(), []

    def victim():
        yield None
        ran.append("victim")

    def killer(other):
        yield None
        tasks.cancel(other)

    tasks.start(killer(other := tasks.start(victim(), ends.named("victim"))), ends.named("killer"))
    tasks._ready.rotate(1)  # the killer first
    run(tasks)
    assert (ran, ends, other.over) == ([], [("killer", None, None)], True)


def test_old_deadlines_are_forgotten(tasks):
    """A task that waits often and briefly leaves no trace of its waits."""
    read, write = os.pipe()
    os.write(write, b"x")

    def busy():
        for _ in range(2000):
            assert (yield Wait(read, READ, 3600.0))

    ends = Ends()
    tasks.start(busy(), ends.named("busy"))
    most = 0
    while tasks.alive:
        tasks.run_once(1.0)
        most = max(most, len(tasks._deadlines))
    os.close(read)
    os.close(write)
    assert ends == [("busy", None, None)]
    assert most < 100
    tasks.run_once(0.01)  # (no deadline of an hour is left to wait for)
