"""Several instances of one server, as real processes with simulated executors."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import uvloop

from baton.gateway.instances.client import ClusterClient
from baton.launch.instances.fleet import Fleet
from baton.launch.instances.supervisor import InstanceFailed, Supervisor, _backoff
from baton.launch.planning.cluster_options import InstancePlan
from baton.launch.planning.instance_config import instance_config

CONFIG = instance_config(
    model="", executor="simulated", vocab_size=100, max_model_len=64, num_blocks=9, peer_endpoint="ipc://*"
)
DEADLINE_S = 60.0


def plan(name: str, **changes: object) -> InstancePlan:
    return InstancePlan("mixed", msgspec.structs.replace(CONFIG, name=name, log_level="error", **changes))


class Running:
    """A fleet on this event loop, with its gateway's client."""

    def __init__(self, *plans: InstancePlan, max_restarts: int = 5) -> None:
        self.client = ClusterClient(on_fatal=lambda reason: None)
        self.fleet = Fleet(plans, self.client, max_restarts=max_restarts)

    async def __aenter__(self) -> "Running":
        self.task = asyncio.create_task(self.fleet.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        assert all(supervisor._process.poll() is not None for supervisor in self.fleet.supervisors.values())

    async def until(self, condition) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.02)

    def kill(self, name: str) -> None:
        os.kill(self.fleet.supervisors[name].pid, signal.SIGKILL)

    async def kill_and_notice(self, name: str) -> None:
        """Kills the instance and returns once the fleet attached to the next one or gave it up.

        The state between lasts some milliseconds, so polling for it may miss it.
        """
        old = self.client.instances[name].incarnation
        self.kill(name)
        await self.until(
            lambda: (
                self.client.instances[name].incarnation != old
                or self.states()[name] == "failed"
                or self.task.done()
            )
        )

    def states(self) -> dict[str, str]:
        return {name: link.state for name, link in self.client.instances.items()}


async def test_one_is_restarted_and_the_other_is_not_disturbed():
    async with Running(plan("a"), plan("b")) as running:
        await asyncio.wait_for(running.client.ready(), DEADLINE_S)
        assert running.states() == {"a": "ready", "b": "ready"}
        other = running.fleet.supervisors["b"].pid
        old = running.client.instances["a"].incarnation
        await running.kill_and_notice("a")
        await running.until(lambda: running.states()["a"] == "ready")
        assert running.client.instances["a"].incarnation != old
        assert running.fleet.supervisors["b"].pid == other
        assert running.states()["b"] == "ready"
        assert running.client.restarts == {"a": 1, "b": 0}


@pytest.mark.parametrize("kills", [1, 2])
async def test_one_that_is_killed_before_it_ever_served_is_started_once_more(kills: int):
    """It is stopped as soon as it is there, so that it cannot be ready before it is killed: several ranks
    take their time to start."""
    async with Running(plan("a", tensor_parallel_size=4), plan("b")) as running:
        supervisor, killed = running.fleet.supervisors["a"], set()
        while len(killed) < kills:
            await running.until(lambda: supervisor.pid not in (None, *killed))
            os.kill(supervisor.pid, signal.SIGSTOP)
            assert running.states()["a"] != "ready"
            killed.add(supervisor.pid)
            os.kill(supervisor.pid, signal.SIGKILL)
        if kills == 1:
            await asyncio.wait_for(running.client.ready(), DEADLINE_S)
            await running.until(lambda: running.states() == {"a": "ready", "b": "ready"})
        else:
            with pytest.raises(InstanceFailed, match="a: the engine process was killed by SIGKILL"):
                await asyncio.wait_for(running.task, DEADLINE_S)


async def test_an_instance_is_in_the_servers_session_and_in_a_process_group_of_its_own():
    """Linux shares cores between sessions: processes that wait for each other are in one.  And Ctrl-C reaches
    the server's group only."""
    async with Running(plan("a")) as running:
        await asyncio.wait_for(running.client.ready(), DEADLINE_S)
        engine = running.fleet.supervisors["a"].pid
        workers = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
        assert workers
        for pid in (engine, *map(int, workers)):
            assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), engine)


async def test_an_engine_that_is_over_and_does_not_end_is_killed(monkeypatch, caplog):
    monkeypatch.setattr("baton.launch.instances.supervisor.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("baton.launch.instances.supervisor._LEAVE_S", 0.4)
    async with Running(plan("a")) as running:
        await asyncio.wait_for(running.client.ready(), DEADLINE_S)
        pid = running.fleet.supervisors["a"].pid
        for _ in range(10):
            await asyncio.sleep(0)  # the supervisor waits for the same, and watches the engine from now on
        running.client.instances["a"].lost("the connection broke")
        await running.until(lambda: running.states()["a"] == "ready")
        assert running.fleet.supervisors["a"].pid != pid
        assert "did not leave; killing it" in caplog.text


def test_a_supervisor_that_stood_still_kills_nobody_and_a_stopped_engine_is_found(monkeypatch):
    """On uvloop, as in the server: it runs timers before it reads sockets."""
    monkeypatch.setattr("baton.launch.instances.supervisor.HEARTBEAT_S", 0.02)
    monkeypatch.setattr("baton.gateway.instances.connection.SILENT_S", 0.4)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_stand_still_and_stop())


async def _stand_still_and_stop() -> None:
    async with Running(plan("a")) as running:
        supervisor = running.fleet.supervisors["a"]
        supervisor._heartbeat_idle = True
        await asyncio.wait_for(running.client.ready(), DEADLINE_S)
        pid = supervisor.pid
        asked, loop = 0, asyncio.get_running_loop()
        ask = running.client.instances["a"].silent

        async def silent() -> bool:
            nonlocal asked
            asked += 1
            if asked < 6:  # the question leaves, then the event loop stands still
                loop.call_soon(loop.call_soon, time.sleep, 0.6)
            return await ask()

        running.client.instances["a"].silent = silent
        await running.until(lambda: asked > 6)
        assert (supervisor.pid, running.states()["a"]) == (pid, "ready")
        os.kill(pid, signal.SIGSTOP)
        await running.until(lambda: supervisor.pid != pid and running.states()["a"] == "ready")


async def test_a_process_that_no_signal_reaches_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("baton.launch.instances.supervisor._KILL_S", 0.02)
    supervisor = Supervisor(CONFIG, ClusterClient().add("a"), max_restarts=5)
    process = SimpleNamespace(kill=lambda: None, pid=4711)
    await asyncio.wait_for(supervisor._kill(process, asyncio.get_running_loop().create_future()), DEADLINE_S)
    assert "process 4711 was killed and does not end" in caplog.text


async def test_an_engine_that_says_nothing_and_stays_is_ended(monkeypatch):
    """It closes its pipe without a word and lives on."""
    monkeypatch.setattr("baton.launch.instances.supervisor._LEAVE_S", 0.05)

    async def start(self, module, argument, environment, fds):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    monkeypatch.setattr("baton.launch.instances.processes.starting.Starter.start", start)
    async with Running(plan("a")) as running:
        with pytest.raises(InstanceFailed, match="without saying where it listens"):
            await asyncio.wait_for(running.task, DEADLINE_S)


async def test_loading_has_its_own_deadline(monkeypatch):
    async def start(self, module, argument, environment, fds):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=fds)

    monkeypatch.setattr("baton.launch.instances.processes.starting.Starter.start", start)
    far = {"a": "41 % (model.layers.3.mlp.down_proj.weight)"}
    monkeypatch.setattr("baton.launch.instances.supervisor.loading", far.get)
    async with Running(plan("a", startup_timeout_s=0.2)) as running:
        said = r"not ready after 0\.2 s \(--startup-timeout\); loading was at 41 % \(model\.layers"
        with pytest.raises(InstanceFailed, match=said):
            await asyncio.wait_for(running.task, DEADLINE_S)


def test_the_first_restart_is_at_once_and_later_ones_are_not():
    assert [_backoff(failures) for failures in (0, 1, 2, 3, 4, 9, 10**6)] == [0, 0, 0.5, 1, 2, 30, 30]


async def test_a_server_that_shuts_down_restarts_nobody(monkeypatch, caplog):
    """The client has let go of the instances, while the last answers are still being written."""
    monkeypatch.setattr("baton.launch.instances.supervisor.HEARTBEAT_S", 0.02)
    monkeypatch.setattr("baton.launch.instances.supervisor._LEAVE_S", 0.02)
    async with Running(plan("a")) as running:
        await asyncio.wait_for(running.client.ready(), DEADLINE_S)
        pid = running.fleet.supervisors["a"].pid
        await running.client.close()
        await asyncio.sleep(0.5)
        assert running.fleet.supervisors["a"].pid == pid
    assert "killing it" not in caplog.text
    assert "starting it again" not in caplog.text


async def test_the_others_go_on_without_one_that_dies_too_often_until_none_is_left():
    async with Running(plan("a"), plan("b"), max_restarts=1) as running:
        await asyncio.wait_for(running.client.ready(), DEADLINE_S)
        for _ in range(2):
            await running.until(lambda: running.states()["a"] == "ready")
            await running.kill_and_notice("a")
        await running.until(lambda: running.states()["a"] == "failed")
        assert running.states()["b"] == "ready"
        assert not running.task.done()
        for _ in range(2):
            await running.until(lambda: running.states()["b"] == "ready")
            await running.kill_and_notice("b")
        with pytest.raises(InstanceFailed, match=r"^b: the instance failed 2 times in a row.*SIGKILL"):
            await asyncio.wait_for(running.task, DEADLINE_S)


async def test_a_first_start_that_fails_ends_all_of_them():
    async with Running(plan("good"), plan("bad", vocab_size=0)) as running:
        with pytest.raises(InstanceFailed, match=r"^bad: .*vocab_size"):
            await asyncio.wait_for(running.task, DEADLINE_S)


async def test_ports_that_only_the_engine_knows_are_told():
    changed = plan("a", peer_endpoint="tcp://127.0.0.1:0")
    async with Running(changed) as running:
        supervisor = running.fleet.supervisors["a"]
        supervisor._public = "tcp://127.0.0.1:0"
        await asyncio.wait_for(running.client.ready(), DEADLINE_S)
        link = running.client.instances["a"]
        assert supervisor.public.startswith("tcp://127.0.0.1:")
        assert not supervisor.public.endswith(":0")
        assert link.endpoint.startswith("ipc:///"), "this process uses a private socket all the same"
        assert link.welcome.peer_endpoint.startswith("tcp://127.0.0.1:")
        assert link.welcome.peer_endpoint != supervisor.public
