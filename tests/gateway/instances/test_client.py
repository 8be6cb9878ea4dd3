"""The client of a cluster of one instance: output, cancellation, loss, queries, and death of the reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import pytest_asyncio

from baton.gateway.cluster.table import MAX_FRUITLESS
from baton.gateway.errors import BadRequest, InstanceUnavailable, RequestCancelled
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.inbox import Inbox
from baton.protocol.codec import pack_int32, pack_int64, unpack_int32
from baton.protocol.messages.requests import FROM_ENGINE, Outputs, max_message_bytes
from baton.protocol.params.sampling import Sampling, Stopping, TokenLogprobs
from tests.conftest import GENEROUS_S
from tests.gateway.echo_engine import EchoEngine


class World:
    """An engine and a client on this test's event loop."""

    def __init__(self, *, retry_wait_s: float = 60.0, max_message_bytes: int = -1) -> None:
        self.engine = EchoEngine(max_message_bytes=max_message_bytes)
        self.fatal: list[str] = []
        self.client = ClusterClient(retry_wait_s=retry_wait_s, on_fatal=self.fatal.append)
        self.instance = self.client.add("instance-0")
        self.inbox = Inbox()

    async def attach(self) -> None:
        await self.instance.connect(self.engine.endpoint, 60, self.engine.incarnation)

    def lose(self) -> None:
        self.engine.die()
        self.instance.lost("it died")

    def submit(self, prompt=(5, 6, 7), max_tokens=4, **options):
        stopping = Stopping(max_tokens, stop_token_ids=(2,))
        return self.client.submit(prompt, Sampling(seed=1), stopping, inbox=self.inbox, **options)

    async def finish(self, *requests):
        """The tokens of each request once all have ended."""
        tokens = {request: [] for request in requests}
        open_requests = set(requests)
        async with asyncio.timeout(60):
            while open_requests:
                for request in await self.inbox.wait():
                    if request not in open_requests:
                        continue
                    chunk = request.take()
                    if chunk.error:
                        raise chunk.error
                    tokens[request] += chunk.tokens
                    if chunk.finished:
                        open_requests.discard(request)
        return [tokens[request] for request in requests]


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.attach()
    yield world
    await world.client.close()
    world.engine.die()


async def test_tokens_of_many_requests(world: World):
    requests = [world.submit((i, i + 1), max_tokens=3) for i in range(10, 60)]
    assert await world.finish(*requests) == [[i, i + 1, i] for i in range(10, 60)]
    assert world.client.in_flight == 0


async def test_requests_that_are_sent_together(world: World):
    with suppress(KeyError), world.client.together():
        requests = [world.submit((i, i + 1), max_tokens=3) for i in (10, 20)]
        await asyncio.sleep(0.05)
        assert not world.engine.submits
        raise KeyError  # what was enqueued before is sent all the same
    assert await world.finish(*requests) == [[i, i + 1, i] for i in (10, 20)]


async def test_a_patient_consumer_is_called_once(world: World):
    request = world.submit((5, 6), max_tokens=9, patient=True)
    assert await world.inbox.wait() == [request]
    chunk = request.take()
    assert chunk.tokens == [5, 6, 5, 6, 5, 6, 5, 6, 5]
    assert chunk.finished is not None
    assert world.engine.submits[0].patient


async def test_what_is_submitted_arrives_whole(world: World):
    world.engine.behaviour.mute = True
    request = world.submit(range(1000), name="r-1", priority=3, cache_salt="salt")
    world.engine.wait_for(lambda: bool(world.engine.submits), "the submit")
    submit = world.engine.submits[0]
    assert (submit.id, submit.name, submit.priority, submit.cache_salt) == (request.id, "r-1", 3, "salt")
    assert list(unpack_int32(submit.prompt)) == list(range(1000))


async def test_a_slow_consumer_gets_one_chunk(world: World):
    request = world.submit(max_tokens=50)
    async with asyncio.timeout(GENEROUS_S):
        while request.finished is None:
            await asyncio.sleep(0.005)
    assert await world.inbox.wait() == [request]
    chunk = request.take()
    assert len(chunk.tokens) == 50
    assert chunk.finished.reason == "length"
    assert await world.inbox.wait(0) == []


async def test_a_consumer_is_woken_once_a_message(world: World):
    world.engine.behaviour.mute = True
    requests = [world.submit() for _ in range(3)]
    waiting = asyncio.ensure_future(world.inbox.wait())
    await asyncio.sleep(0)
    ids = [request.id for request in requests] * 2
    world.engine.wait_for(lambda: len(world.engine.submits) == 3, "the submits")
    world.engine.say(Outputs(pack_int64(ids), pack_int32(range(6))))
    assert await asyncio.wait_for(waiting, 60) == requests
    assert [request.take().tokens for request in requests] == [[0, 3], [1, 4], [2, 5]]


async def test_waiting_has_a_limit_and_can_be_closed(world: World):
    world.engine.behaviour.mute = True
    world.submit()
    assert await world.inbox.wait(0.01) == []
    waiting = asyncio.ensure_future(world.inbox.wait())
    await asyncio.sleep(0)
    world.inbox.close()
    with pytest.raises(RequestCancelled):
        await waiting
    with pytest.raises(RequestCancelled):
        await world.inbox.wait()


async def test_nothing_arrives_after_a_cancel(world: World):
    world.engine.behaviour.step_s = 0.01
    gone, stays = world.submit(max_tokens=100), world.submit((9,), max_tokens=5)
    world.client.cancel(gone)
    world.client.cancel(gone)
    assert await world.finish(stays) == [[9] * 5]
    world.engine.wait_for(lambda: world.engine.cancels == [gone.id], "one cancel")
    assert gone.take().tokens == []
    world.client.cancel(stays)
    assert world.engine.cancels == [gone.id]


async def test_a_lost_instance_is_replaced_unseen(world: World):
    """The requests go on, under new ids, in order."""
    world.engine.behaviour.hold_after = 1
    requests = [world.submit((i,), max_tokens=3) for i in (20, 21, 22)]
    ends = asyncio.ensure_future(world.finish(*requests))
    world.engine.wait_held(3)
    await asyncio.sleep(0.05)
    first = [submit.id for submit in world.engine.submits]
    world.lose()
    assert world.client.state == "restarting"
    with pytest.raises(InstanceUnavailable, match="restarting: it died"):
        world.submit()
    world.engine = EchoEngine(incarnation="second")
    await world.attach()
    assert (world.client.state, world.instance.restarts, world.instance.failure) == ("ready", 1, None)
    assert await ends == [[20] * 3, [21] * 3, [22] * 3]
    second = [submit.id for submit in world.engine.submits]
    assert len(second) == 3
    assert not set(first) & set(second)


async def test_who_waits_during_a_loss_is_woken_by_the_next_tokens(world: World):
    world.engine.behaviour.mute = True
    request = world.submit(max_tokens=1000)

    async def first_token() -> int:
        while True:
            for _ in await world.inbox.wait():
                chunk = request.take()
                if chunk.tokens:
                    return chunk.tokens[0]

    waiting = asyncio.ensure_future(first_token())
    await asyncio.sleep(0.02)
    world.lose()
    world.engine = EchoEngine(incarnation="second")
    world.engine.behaviour.step_s = 0.05
    await world.attach()
    assert await asyncio.wait_for(waiting, 60) == 5


async def test_what_was_passed_on_goes_on(world: World):
    world.engine.behaviour.hold_after = 20
    request = world.submit(max_tokens=50)
    await world.inbox.wait()
    begun = request.take().tokens
    world.lose()
    world.engine = EchoEngine(incarnation="second")
    await world.attach()
    (rest,) = await world.finish(request)
    assert begun + rest == ([5, 6, 7] * 50)[:50]
    assert list(unpack_int32(world.engine.submits[0].generated))[: len(begun)] == begun
    assert world.client.in_flight == 0


async def test_who_loses_every_instance_is_given_up(world: World):
    """It may be what kills them."""
    world.engine.behaviour.mute = True
    request = world.submit()
    for number in range(MAX_FRUITLESS):
        assert request.error is None
        world.lose()
        world.engine = EchoEngine(incarnation=f"next-{number}")
        world.engine.behaviour.mute = True
        await world.attach()
    with pytest.raises(InstanceUnavailable, match=f"it died .*{MAX_FRUITLESS} times"):
        await world.finish(request)
    assert world.engine.submits == []


async def test_the_wait_for_a_restart_has_a_limit(world: World):
    world.client.cluster.table._retry_wait_s = 0.3
    request = world.submit()
    world.lose()
    with pytest.raises(InstanceUnavailable, match=r"not back within 0\.3 s"):
        await world.finish(request)


async def test_a_cancelled_request_is_not_retried(world: World):
    world.engine.behaviour.mute = True
    gone, stays = world.submit(), world.submit((8,), max_tokens=2)
    world.lose()
    world.client.cancel(gone)
    world.engine = EchoEngine(incarnation="second")
    await world.attach()
    assert await world.finish(stays) == [[8, 8]]
    assert len(world.engine.submits) == 1


async def test_failing_says_why(world: World):
    world.client.cluster.table._retry_wait_s = 0.3
    world.engine.behaviour.mute = True
    request = world.submit()
    world.engine.fail("worker 1 was killed")
    with pytest.raises(InstanceUnavailable, match="worker 1 was killed"):
        await world.finish(request)
    assert world.instance.failure == "worker 1 was killed"
    assert world.client.state == "restarting"
    world.instance.lost("worker 1 was killed")
    assert world.client.state == "restarting"


async def test_giving_up_ends_everything(world: World):
    world.engine.behaviour.mute = True
    request = world.submit()
    world.lose()
    waiting = asyncio.ensure_future(world.instance.ready())
    await asyncio.sleep(0)
    world.instance.failed("too many restarts")
    for wait in (world.finish(request), waiting, world.instance.ready()):
        with pytest.raises(InstanceUnavailable, match="too many restarts"):
            await wait
    assert world.client.state == "failed"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xc1 garbage",
        FROM_ENGINE.encode(Outputs(pack_int64([1, 2]), pack_int32([5]))),
        FROM_ENGINE.encode(Outputs(b"123", b"")),
        FROM_ENGINE.encode(Outputs(logprobs=[(0, TokenLogprobs(1, -0.5, 1))])),
    ],
    ids=["no message", "too few tokens", "half a number", "logprobs of nothing"],
)
async def test_what_cannot_be_read_costs_the_connection(garbage, caplog: pytest.LogCaptureFixture):
    """Tokens may be missing, so what is there goes on over another connection; the gateway lives."""
    world = World()
    await world.attach()
    world.engine.behaviour.mute = True
    one, other = world.submit(max_tokens=5), world.submit((8, 9), max_tokens=3)
    world.engine.wait_for(lambda: len(world.engine.submits) == 2, "the submits")
    world.engine.say(Outputs(pack_int64([one.id] * 2), pack_int32([5, 6])))
    world.engine.say(garbage)
    while world.client.state == "ready":
        await asyncio.sleep(0.01)
    world.engine.behaviour.mute = False
    assert await world.finish(one, other) == [[5, 6, 7, 5, 6], [8, 9, 8]]
    assert (world.client.state, world.instance.failure, world.fatal) == ("ready", None, [])
    assert await world.finish(world.submit()) == [[5, 6, 7, 5]]
    (line,) = [record for record in caplog.messages if "cannot be read" in record]
    assert "instance first at ipc://" in line
    await world.client.close()
    world.engine.die()


async def test_garbage_without_end_is_not_answered_in_a_hurry(world: World):
    """Each connection brings a welcome that cannot be read."""
    world.engine.garbled = True
    world.engine.say(b"\xc1")
    began = time.monotonic()
    async with asyncio.timeout(60):
        while world.engine.hellos < 4:
            await asyncio.sleep(0.01)
    assert time.monotonic() - began > 1.5, "three connections, with a second before each but the first"
    assert world.client.state == "restarting"
    world.engine.garbled = False
    await asyncio.wait_for(world.instance.ready(), 60)
    assert world.fatal == []


async def test_more_of_a_request_waits_for_the_next_incarnation(world: World):
    first = world.client.prepare(pack_int32((4,)), Sampling(seed=1), Stopping(2), inbox=world.inbox)
    world.lose()
    world.client.enqueue(first)
    world.engine = EchoEngine(incarnation="second")
    await world.attach()
    assert await world.finish(first) == [[4, 4]]
    late = world.client.prepare(pack_int32((4,)), Sampling(seed=1), Stopping(2), inbox=world.inbox)
    world.lose()
    world.client.cluster.table._retry_wait_s = 0.3
    world.client.enqueue(late)
    with pytest.raises(InstanceUnavailable, match=r"not back within 0\.3 s"):
        await world.finish(late)


async def test_more_of_a_request_fails_with_the_instance(world: World):
    late = world.client.prepare(pack_int32((4,)), Sampling(seed=1), Stopping(2), inbox=world.inbox)
    world.instance.failed("too many restarts")
    world.client.enqueue(late)
    with pytest.raises(InstanceUnavailable, match="too many restarts"):
        await world.finish(late)


async def test_a_message_that_the_engine_would_not_read_is_not_sent():
    """The engine would drop the connection, and what others have in flight with it."""
    world = World(max_message_bytes=max_message_bytes(256))
    await world.attach()
    world.engine.behaviour.step_s = 0.02
    other = world.submit((8, 9), max_tokens=10)
    with pytest.raises(BadRequest, match="reads at most"):
        world.submit(cache_salt="s" * (17 << 20))
    assert world.client.in_flight == 1
    large = world.submit(cache_salt="s" * (16 << 20), max_tokens=1)
    assert await world.finish(other, large) == [[8, 9] * 5, [5]]
    assert world.instance.restarts == 0
    await world.client.close()
    world.engine.die()


async def test_who_breaks_the_connection_is_given_up():
    """Even if such a message is sent, nothing hangs, and others are answered."""
    world = World(max_message_bytes=10_000)
    await world.attach()
    bad = world.submit(cache_salt="s" * 20_000)
    with pytest.raises(InstanceUnavailable, match="connection to the instance broke") as caught:
        await world.finish(bad)
    assert caught.value.code == "instance_lost"
    assert bad.losses == MAX_FRUITLESS
    await asyncio.wait_for(world.instance.ready(), 60)
    assert await world.finish(world.submit(max_tokens=1)) == [[5]]
    await world.client.close()
    world.engine.die()


async def test_the_client_knows_of_a_pause(world: World):
    for what, paused in (("pause", True), ("stats", True), ("resume", False), ("pause", True)):
        await world.client.query(what)
        assert world.client.paused is paused
    world.engine.say(b"\xc1")  # a new connection to the same instance
    while world.client.state == "ready":
        await asyncio.sleep(0.01)
    await asyncio.wait_for(world.instance.ready(), 60)
    assert world.client.paused
    world.lose()
    world.engine = EchoEngine(incarnation="second")
    await world.attach()
    assert not world.client.paused


async def test_queries(world: World):
    world.engine.behaviour.stats = {"num_requests_running": 3}
    assert await world.client.query("stats") == {"num_requests_running": 3}
    world.engine.behaviour.answer_queries = False
    with pytest.raises(InstanceUnavailable, match=r"within 0\.05 s"):
        await world.client.query("ledger", 0.05)
    waiting = asyncio.ensure_future(world.client.query("ledger"))
    await asyncio.sleep(0)
    world.lose()
    with pytest.raises(InstanceUnavailable, match="it died"):
        await waiting
    with pytest.raises(InstanceUnavailable, match="restarting"):
        await world.client.query("stats")


async def test_starting_takes_its_time():
    """The instance listens only after the gateway has connected; a wrong one is not taken for it."""
    client = ClusterClient()
    instance = client.add("instance-0")
    assert client.state == "starting"
    with pytest.raises(InstanceUnavailable, match="loading"):
        client.check_ready()
    silent = EchoEngine(welcome=False)
    with pytest.raises(InstanceUnavailable, match="no answer"):
        await instance.connect(silent.endpoint, 0.1)
    other = EchoEngine(incarnation="old")
    with pytest.raises(InstanceUnavailable, match="no answer"):
        await instance.connect(other.endpoint, 0.1, "new")
    assert client.state == "starting"
    welcome = await instance.connect(other.endpoint, 60, "old")
    assert welcome == instance.welcome
    assert welcome.detail == "echo"
    await client.close()
    for engine in (silent, other):
        engine.die()
