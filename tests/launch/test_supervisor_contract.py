"""What a cluster may rely on from who starts its instances: the real supervisor and the simulator's alike.

The real one starts processes: an engine and two workers, with the simulated executor.  The simulator's starts
the twins of the same, and its world's clock goes on while a test waits.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import pytest

from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.inbox import Inbox
from baton.launch.instances.supervisor import Supervisor
from baton.launch.planning.instance_config import instance_config
from baton.protocol.codec import pack_int32
from baton.protocol.config import CostModel
from baton.protocol.params.sampling import Sampling, Stopping
from baton.simulation.plans.draw import draw_plan
from baton.simulation.plans.scenarios import SCENARIOS
from baton.simulation.world import Crashed, World
from tests.conftest import GENEROUS_S
from tests.e2e.server import alive, child_pids
from tests.engine.shell.simulated_side import Silent

NAME = "one"
CONFIG = instance_config(
    name=NAME,
    executor="simulated",
    simulated_cost=CostModel(0.01, 0.0, 0.0, 0.0),
    tensor_parallel_size=2,
    vocab_size=100,
    max_model_len=256,
    num_blocks=64,
    peer_endpoint="ipc://*",
    log_level="critical",
)
SAMPLING, STOPPING = Sampling(seed=1), Stopping(60)


class Shell(Protocol):
    """A gateway, and a supervisor of one instance."""

    cluster: Cluster

    def incarnation(self) -> str:
        """The one that was started last; "" before."""

    def kill_engine(self) -> None: ...

    def kill_worker(self) -> None: ...

    def processes(self) -> list[Callable[[], bool]]:
        """Of the engine and the workers that run now: whether each still lives."""

    def submit(self, prompt: tuple[int, ...]) -> EngineRequest: ...

    def until(self, condition: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


class Real:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())
        self.cluster = self._client.cluster

    async def _start(self) -> None:
        self._client = ClusterClient()
        self._supervisor = Supervisor(CONFIG, self._client.add(NAME), max_restarts=5)
        self._running = asyncio.create_task(self._supervisor.run())
        self._inbox = Inbox()

    def incarnation(self) -> str:
        return str(self._supervisor.pid or "")

    def kill_engine(self) -> None:
        self._supervisor.kill()

    def kill_worker(self) -> None:
        assert self._supervisor.pid is not None
        os.kill(child_pids(self._supervisor.pid)[1], signal.SIGKILL)

    def processes(self) -> list[Callable[[], bool]]:
        assert self._supervisor.pid is not None
        pids = [self._supervisor.pid, *child_pids(self._supervisor.pid)]
        return [lambda pid=pid: alive(pid) for pid in pids]  # type: ignore[misc]

    def submit(self, prompt: tuple[int, ...]) -> EngineRequest:
        async def there() -> EngineRequest:
            return self._client.submit(prompt, SAMPLING, STOPPING, inbox=self._inbox)

        return self._loop.run_until_complete(there())

    def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(2 * GENEROUS_S):
                while not condition():
                    await asyncio.sleep(0.005)

        self._loop.run_until_complete(wait())

    def close(self) -> None:
        async def end() -> None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running
            await self._client.close()

        self._loop.run_until_complete(end())
        self._loop.close()


class Simulated:
    def __init__(self) -> None:
        plan = draw_plan(1, SCENARIOS["standard"])
        plan = replace(plan, instances=(CONFIG,), labels=("mixed",), num_gateways=1, requests=(), faults=())
        self._world = World(replace(plan, ttl_s=None, faults_end=math.inf))
        self._gateway = self._world.gateways[0]
        self.cluster = self._gateway.cluster
        self._inbox = Inbox()
        self._world.supervisor.start(self._world.instances[0])

    def incarnation(self) -> str:
        return self._world.instances[0].name

    def kill_engine(self) -> None:
        self._world.supervisor.kill(self._world.instances[0].engine)

    def kill_worker(self) -> None:
        self._world.supervisor.kill(self._world.instances[0].ranks[1])

    def processes(self) -> list[Callable[[], bool]]:
        instance = self._world.instances[0]
        return [lambda one=one: one.alive for one in (instance.engine, *instance.ranks)]  # type: ignore[misc]

    def submit(self, prompt: tuple[int, ...]) -> EngineRequest:
        request = EngineRequest("r0", pack_int32(prompt), SAMPLING, STOPPING, 0, "", self._inbox)
        self.cluster.submit(request, self._gateway.now())
        self._gateway.pump()
        return request

    def until(self, condition: Callable[[], bool]) -> None:
        end = self._world.events.now + GENEROUS_S
        while not condition():
            timer = self._world.events.next()
            assert timer is not None
            assert timer.at < end
            with suppress(Crashed):
                timer.action(*timer.args)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(params=["real", "simulated"])
def shell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setattr("baton.simulation.world.Monitor", lambda world: Silent())
    shell: Any = Real() if request.param == "real" else Simulated()
    try:
        shell.until(lambda: shell.cluster.state == "ready")
        yield shell
    finally:
        shell.close()


def under_way(shell: Shell, prompt: tuple[int, ...]) -> EngineRequest:
    request = shell.submit(prompt)
    shell.until(lambda: request.num_generated >= 3)
    assert request.finished is None
    return request


def test_a_killed_engine_is_replaced_and_what_ran_there_goes_on(shell: Shell):
    """The gateway hears why, once; the next incarnation is another one; nothing of the old one is left."""
    undisturbed = shell.submit((5, 6))
    shell.until(lambda: undisturbed.finished is not None)
    request = under_way(shell, (5, 6))
    first, old, before = shell.incarnation(), shell.processes(), request.tokens.tolist()
    assert len(old) == 3
    member = shell.cluster.members[NAME]
    shell.kill_engine()
    shell.until(lambda: member.state != "ready")
    assert (member.state, member.failure) == ("restarting", "the engine process was killed by SIGKILL")
    shell.until(lambda: member.state == "ready")
    assert shell.incarnation() != first
    assert not any(lives() for lives in old)
    assert (member.failure, member.restarts) == (None, 1)
    shell.until(lambda: request.finished is not None)
    assert request.tokens.tolist()[: len(before)] == before
    assert request.tokens.tolist() == undisturbed.tokens.tolist()


def test_a_dead_worker_ends_its_instance_which_says_so(shell: Shell):
    request = under_way(shell, (5, 6))
    first, old = shell.incarnation(), shell.processes()
    member = shell.cluster.members[NAME]
    shell.kill_worker()
    shell.until(lambda: member.state != "ready")
    assert "rank 1" in (member.failure or "")
    assert "killed by SIGKILL" in (member.failure or "")
    shell.until(lambda: member.state == "ready")
    assert shell.incarnation() != first
    assert not any(lives() for lives in old)
    assert member.restarts == 1
    shell.until(lambda: request.finished is not None)
    assert request.num_generated == 60


def test_one_that_dies_before_it_serves_is_replaced_too(shell: Shell):
    request = under_way(shell, (5, 6))
    first, member = shell.incarnation(), shell.cluster.members[NAME]
    shell.kill_engine()
    shell.until(lambda: shell.incarnation() not in ("", first))
    second = shell.incarnation()
    assert member.state == "restarting"
    shell.kill_engine()
    shell.until(lambda: member.state == "ready")
    assert shell.incarnation() not in (first, second)
    shell.until(lambda: request.finished is not None)
    assert request.num_generated == 60
