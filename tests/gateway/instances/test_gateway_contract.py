"""What a cluster may rely on between a gateway and its instances: the real client and the simulator's gateway
keep it alike.

Both are shells around the production `Cluster`.  Instances are scripts: they note what they are told and say
what a test has them say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from baton.gateway.cluster.cluster import Cluster
from baton.gateway.cluster.request import EngineRequest
from baton.gateway.instances.client import ClusterClient
from baton.gateway.instances.inbox import Inbox
from baton.protocol.codec import pack_int32, pack_int64, unpack_int32
from baton.protocol.messages.requests import (
    FROM_ENGINE,
    TO_ENGINE,
    Cancel,
    Failing,
    Finished,
    FromEngine,
    Hello,
    Outputs,
    Submit,
    Welcome,
)
from baton.protocol.params.sampling import Sampling, Stopping
from baton.simulation.events import Events, Party
from baton.simulation.parties.gateway import GatewayProcess
from baton.simulation.wires.network import Connection
from tests.conftest import GENEROUS_S
from tests.engine.shell.simulated_side import Silent
from tests.gateway.echo_engine import EchoEngine
from tests.gateway.instances.test_connection_loss import Proxy

NAME = "instance-0"


class Engine(Protocol):
    """A scripted instance."""

    submits: list[Submit]
    cancels: list[int]
    hellos: int

    def say(self, message: FromEngine | bytes) -> None:
        """To every gateway."""


class Shell(Protocol):
    """One gateway, with one instance."""

    cluster: Cluster
    engine: Engine

    def start(self) -> None:
        """The supervisor starts an incarnation, the first or the next one."""

    def kill(self, reason: str) -> None:
        """The instance's process dies, and the supervisor says so."""

    def break_connection(self) -> None:
        """Both ends live on."""

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> EngineRequest: ...

    def cancel(self, request: EngineRequest) -> None: ...

    def until(self, condition: Callable[[], bool]) -> None: ...

    def close(self) -> None: ...


class Real:
    """The client of the gateway, over unix sockets."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._directory = directory
        self._proxies: list[Proxy] = []
        self._engines: list[EchoEngine] = []
        self._inbox = Inbox()
        self._in_loop(self._make)

    def _make(self) -> None:
        self._client = ClusterClient(retry_wait_s=60.0)
        self._instance = self._client.add(NAME)
        self.cluster = self._client.cluster

    @property
    def engine(self) -> EchoEngine:
        return self._engines[-1]

    def start(self) -> None:
        number = len(self._engines) + 1
        engine = EchoEngine(incarnation=f"{NAME}.{number}")
        engine.behaviour.mute = True
        self._engines.append(engine)
        self._proxies.append(Proxy(self._directory / f"{number}.sock", engine))
        self._loop.run_until_complete(self._proxies[-1].start())
        path = self._proxies[-1].path
        self._in_loop(lambda: self._instance.open(f"ipc://{path}", engine.incarnation))

    def kill(self, reason: str) -> None:
        self.engine.die()
        self._in_loop(lambda: self._instance.lost(self._instance.failure or reason))  # as a supervisor does

    def break_connection(self) -> None:
        self._in_loop(self._proxies[-1].cut)

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> EngineRequest:
        sampling, stopping = Sampling(seed=1), Stopping(max_tokens)
        return self._in_loop(lambda: self._client.submit(prompt, sampling, stopping, inbox=self._inbox))

    def cancel(self, request: EngineRequest) -> None:
        self._in_loop(lambda: self._client.cancel(request))

    def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            async with asyncio.timeout(GENEROUS_S):
                while not condition():
                    await asyncio.sleep(0.005)

        self._loop.run_until_complete(wait())

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        for proxy in self._proxies:
            self._loop.run_until_complete(proxy.close())
        for engine in self._engines:
            engine.die()
        self._loop.close()

    def _in_loop(self, function: Callable[[], Any]) -> Any:
        async def there() -> Any:
            return function()

        return self._loop.run_until_complete(there())


class SimulatedEngine(Party):
    """As `EchoEngine` when it is mute: it greets, notes, and ends what is cancelled."""

    def __init__(self, incarnation: str) -> None:
        super().__init__(incarnation)
        self.listening = True
        self.connections: dict[bytes, Connection] = {}
        self.submits: list[Submit] = []
        self.cancels: list[int] = []
        self.hellos = 0

    def message_arrived(self, connection: Connection, data: bytes) -> None:
        message = TO_ENGINE.decode(data)
        if isinstance(message, Hello):
            self.hellos += 1
            connection.send_to_gateway(
                FROM_ENGINE.encode(Welcome(self.name, 100, 16, 256, 8, 512, [1], detail="echo"))
            )
        elif isinstance(message, Submit):
            self.submits.append(message)
        elif isinstance(message, Cancel):
            self.cancels.append(message.id)
            ends = Outputs(finished=[Finished(message.id, "aborted")])
            connection.send_to_gateway(FROM_ENGINE.encode(ends))

    def say(self, message: FromEngine | bytes) -> None:
        data = message if isinstance(message, bytes) else FROM_ENGINE.encode(message)
        for connection in self.connections.values():
            connection.send_to_gateway(data)


class Simulated:
    """The simulator's gateway, in a world that holds nothing else."""

    def __init__(self) -> None:
        self.events = Events()
        self.monitor = Silent()
        self.plan = SimpleNamespace(
            instances=[SimpleNamespace(name=NAME)],
            threshold=None,
            ttl_s=None,
            usual_delay=0.001,
            arranging=None,
            notices=False,
        )
        self.labels = ["mixed"]
        self.decided: list[Any] = []
        self.over = False
        self.losses = 0
        self._gateway = GatewayProcess(self, 0, 1, Random(1))  # type: ignore[arg-type]
        self.cluster = self._gateway.cluster
        self._inbox = Inbox()
        self._instances: list[Any] = []

    # -- what a gateway asks of its world

    def draw_rate(self, random: Random) -> float:
        return 1.0

    def note(self, *_: object) -> None:
        """Nobody reads it."""

    def message_passed(self, *_: object) -> None:
        """Nobody crashes here."""

    # -- what the tests ask

    @property
    def engine(self) -> SimulatedEngine:
        return self._instances[-1].engine

    def start(self) -> None:
        incarnation = f"{NAME}.{len(self._instances) + 1}"
        engine = SimulatedEngine(incarnation)
        instance = SimpleNamespace(member=NAME, name=incarnation, engine=engine, index=0, alive=True)
        engine.instance = instance  # type: ignore[attr-defined]
        self._instances.append(instance)
        self._gateway.attach(instance)

    def kill(self, reason: str) -> None:
        self._instances[-1].alive = self.engine.alive = False
        for connection in self.engine.connections.values():
            connection.open = False
        self._gateway.lost(NAME, reason)

    def break_connection(self) -> None:
        connection = self._gateway.connections[NAME]
        connection.cut()
        self.events.after(0.01, self._gateway, self._gateway.disconnected, connection)

    def submit(self, prompt: tuple[int, ...], max_tokens: int) -> EngineRequest:
        request = EngineRequest(
            "r", pack_int32(prompt), Sampling(seed=1), Stopping(max_tokens), 0, "", self._inbox
        )
        self.cluster.submit(request, self._gateway.now())
        self._gateway.pump()
        return request

    def cancel(self, request: EngineRequest) -> None:
        self.cluster.cancel(request)
        self._gateway.pump()

    def until(self, condition: Callable[[], bool]) -> None:
        end = self.events.now + GENEROUS_S
        while not condition():
            timer = self.events.next()
            assert timer is not None
            assert timer.at < end
            timer.action(*timer.args)

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(params=["real", "simulated"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    shell: Any = Real(tmp_path) if request.param == "real" else Simulated()
    shell.start()
    shell.until(lambda: shell.cluster.state == "ready")
    yield shell
    shell.close()


def tokens(request: EngineRequest, *values: int) -> Outputs:
    return Outputs(pack_int64([request.id] * len(values)), pack_int32(values))


def end(request: EngineRequest) -> Outputs:
    return Outputs(finished=[Finished(request.id, "length")])


def test_what_is_sent_arrives_in_order_once_after_the_greeting(shell: Shell):
    requests = [shell.submit((5, number), 3) for number in range(200)]
    shell.cancel(requests[7])
    shell.until(lambda: bool(shell.engine.cancels))
    assert shell.engine.hellos == 1
    assert [submit.id for submit in shell.engine.submits] == [request.id for request in requests]
    assert shell.engine.cancels == [requests[7].id]


def test_what_comes_is_taken_in_order(shell: Shell):
    request = shell.submit((5, 6), 300)
    for number in range(299):
        shell.engine.say(tokens(request, number))
    shell.engine.say(end(request))
    shell.until(lambda: request.finished is not None)
    assert request.tokens.tolist() == list(range(299))


def test_over_a_broken_connection_nothing_is_lost_and_the_same_instance_goes_on(shell: Shell):
    """Under another id: what was under way to and from the engine is not believed."""
    request = shell.submit((5, 6), 5)
    shell.until(lambda: bool(shell.engine.submits))
    shell.engine.say(tokens(request, 5, 6))
    shell.until(lambda: request.num_generated == 2)
    first = request.id
    shell.break_connection()
    shell.until(lambda: request.id != first and shell.cluster.state == "ready")
    shell.engine.say(Outputs(pack_int64([first]), pack_int32([99])))
    shell.until(lambda: request.id in [submit.id for submit in shell.engine.submits])
    shell.engine.say(tokens(request, 7))
    shell.until(lambda: request.num_generated == 3)
    assert request.tokens.tolist() == [5, 6, 7]
    assert unpack_int32(shell.engine.submits[-1].generated).tolist() == [5, 6]
    assert shell.engine.hellos >= 2
    member = shell.cluster.members[NAME]
    assert (member.restarts, member.failure) == (1, None)


def test_a_message_that_cannot_be_read_costs_the_connection_alone(shell: Shell):
    request = shell.submit((5, 6), 5)
    shell.until(lambda: bool(shell.engine.submits))
    first = request.id
    shell.engine.say(tokens(request, 5))
    shell.engine.say(b"\xc1 garbage")
    shell.engine.say(tokens(request, 6))  # (it may follow what was lost)
    shell.until(lambda: shell.cluster.state != "ready")
    assert request.tokens.tolist() == [5], "what came before it counts, and nothing behind it"
    shell.until(lambda: request.id != first and len(shell.engine.submits) == 2)
    assert unpack_int32(shell.engine.submits[1].generated).tolist() == [5]
    assert shell.cluster.members[NAME].failure is None


def test_a_dead_instance_is_replaced_by_the_next(shell: Shell):
    requests = [shell.submit((5, number), 3) for number in range(3)]
    shell.until(lambda: len(shell.engine.submits) == 3)
    old = [request.id for request in requests]
    shell.kill("it was killed")
    member = shell.cluster.members[NAME]
    assert (member.state, member.failure) == ("restarting", "it was killed")
    shell.start()
    shell.until(lambda: len(shell.engine.submits) == 3)
    assert [submit.id for submit in shell.engine.submits] == [request.id for request in requests]
    assert not set(old) & {request.id for request in requests}
    assert (member.state, member.failure, member.restarts) == ("ready", None, 1)


def test_what_an_engine_says_of_its_end_is_the_reason(shell: Shell):
    """Nothing is read from it afterwards, and what the supervisor says of its death is no news."""
    request = shell.submit((5, 6), 5)
    shell.until(lambda: bool(shell.engine.submits))
    shell.engine.say(tokens(request, 5))
    shell.engine.say(Failing("worker 1 is lost"))
    shell.engine.say(tokens(request, 6))
    member = shell.cluster.members[NAME]
    shell.until(lambda: member.state != "ready")
    shell.kill("exited with status 1")
    assert request.tokens.tolist() == [5]
    assert "worker 1 is lost" in (member.failure or "")
    shell.start()
    shell.until(lambda: bool(shell.engine.submits))
    assert unpack_int32(shell.engine.submits[0].generated).tolist() == [5]


def test_after_a_break_the_supervisor_has_the_first_word(shell: Shell):
    """A connection mostly breaks because the process has died."""
    shell.break_connection()
    shell.kill("it was killed by SIGKILL")
    shell.start()
    shell.until(lambda: shell.cluster.state == "ready")
    assert shell.cluster.members[NAME].restarts == 1, "one loss, not two"
