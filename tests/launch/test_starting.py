"""Processes that a fork server forks: they are as if they had been started, and are started once."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.ipc.processes.children import Child
from baton.launch.instances.processes import starting
from baton.launch.instances.processes.starting import Starter
from tests.conftest import GENEROUS_S
from tests.e2e.server import alive, child_pids

ROOT = Path(__file__).parents[2]
HERE = "tests.launch.started"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Children find the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Told:
    """A pipe for what children say, line by line."""

    def __init__(self):
        self.read, self.write = os.pipe()
        self._text = b""

    async def line(self):
        async with asyncio.timeout(GENEROUS_S):
            while b"\n" not in self._text:
                self._text += await asyncio.to_thread(os.read, self.read, 65536)
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    async def nothing(self):
        """All that could say something has gone, and it has not."""
        os.close(self.write)
        async with asyncio.timeout(GENEROUS_S):
            assert await asyncio.to_thread(os.read, self.read, 1) == b""

    async def start(self, starter, what="0"):
        return await starter.start(HERE, f"{self.write} {what}", dict(os.environ), [self.write])


@asynccontextmanager
async def starter(imports="json"):
    one = Starter(imports)
    try:
        yield one
    finally:
        one.close()


async def ended(process):
    return await asyncio.to_thread(process.wait, GENEROUS_S)


async def test_a_fork_finds_itself_as_a_process_that_was_started(monkeypatch, tmp_path):
    """Also what libraries have read from the environment when the fork server loaded them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    told, mask = Told(), os.umask(0o027)
    leaks = [os.open("/dev/null", os.O_RDONLY), socket.socket()]
    os.set_inheritable(leaks[0], True)
    try:
        async with starter("torch") as one:
            forked = [await told.start(one, "torch") for _ in range(2)]
            assert all(isinstance(process, Child) for process in forked)
            seen = [await told.line(), await told.line()]
            server = one.fork_server
            assert len(os.listdir(f"/proc/{server}/task")) == 1
            one._plain = True
            plain = await told.start(one, "torch")
            expected = await told.line()
            assert [await ended(process) for process in (*forked, plain)] == [0, 0, 0]
            assert not child_pids(server)
    finally:
        os.umask(mask)
        os.close(leaks[0])
    assert {one["pid"] for one in seen} == {process.pid for process in forked}
    assert seen[0]["drawn"] != seen[1]["drawn"]
    assert seen[0]["drawn by numpy"] != seen[1]["drawn by numpy"]
    for one in (*seen, expected):
        assert one.pop("parent") == os.getpid()
        assert one.pop("forked") == (one["pid"] != plain.pid)
        assert set(one["descriptors"]) == {"0", "1", "2", str(told.write)}
        for different in ("pid", "drawn", "drawn by numpy"):
            del one[different]
        one["inheritable"] = [fd for fd in one["inheritable"] if fd < 3]
    assert seen[0]["threads of torch"] == 1
    for one in seen:
        assert {key: (one[key], expected[key]) for key in expected if one[key] != expected[key]} == {}


async def test_exit_codes_and_signals_reach_the_parent():
    told = Told()
    async with starter() as one:
        assert await ended(await told.start(one, "7")) == 7
        process = await told.start(one, "wait")
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert (await ended(process), process.poll()) == (-signal.SIGTERM, -signal.SIGTERM)
        process.kill()  # nobody any more
        process = await one.start("tests.launch.no_such_module", "", dict(os.environ))
        assert await ended(process) == 1


async def test_what_was_forked_outlives_the_fork_server_and_the_next_one_starts_more(caplog):
    told = Told()
    async with starter() as one:
        process = await told.start(one, "wait")
        first = one.fork_server
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        other = await told.start(one, "wait")
        assert isinstance(other, Child)
        assert one.fork_server != first
        assert [alive(process.pid), alive(other.pid)] == [True, True]
    assert [alive(process.pid), alive(other.pid)] == [True, True]
    for child in (process, other):
        child.kill()
        await ended(child)
    assert caplog.text.count("it has ended") == 1


async def test_one_that_dies_between_two_starts_is_replaced_at_once(monkeypatch):
    monkeypatch.setattr(starting, "_LASTING_S", 0.0)
    told = Told()
    async with starter() as one:
        await ended(await told.start(one))
        first = one.fork_server
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(GENEROUS_S):
            while one.fork_server in (first, None):
                await asyncio.sleep(0.005)


async def test_no_start_happens_twice_whenever_the_fork_server_dies(monkeypatch):
    monkeypatch.setattr(starting, "_LASTING_S", 0.0)
    told, count = Told(), 12
    async with starter() as one:
        await ended(await told.start(one))
        await told.line()
        for number in range(count):
            starts = asyncio.gather(*(told.start(one) for _ in range(3)))
            await asyncio.sleep(0.0005 * number)
            if one.fork_server:
                os.kill(one.fork_server, signal.SIGKILL)
            processes = await starts
            assert [await ended(process) for process in processes] == [0, 0, 0]
            assert {(await told.line())["pid"] for _ in range(3)} == {process.pid for process in processes}
    await told.nothing()


async def test_a_silent_one_is_given_up_and_what_it_forks_late_does_nothing(monkeypatch, caplog):
    told = Told()
    async with starter() as one:
        await ended(await told.start(one))
        await told.line()
        monkeypatch.setattr(starting, "_SILENT_S", 0.05)
        killed = []
        monkeypatch.setattr(starting._Server, "close", lambda server: killed.append(server))
        first = one._server
        os.kill(one.fork_server, signal.SIGSTOP)
        monkeypatch.setattr(starting, "_TRIES", 1)
        process = await told.start(one)
        assert isinstance(process, subprocess.Popen)
        assert (await ended(process), (await told.line())["forked"]) == (0, False)
        assert killed == [first]
        first.process.send_signal(signal.SIGCONT)  # now it reads the request, and forks
        first._control.close()
        await asyncio.to_thread(first.process.wait, GENEROUS_S)
        monkeypatch.undo()
        first.close()
    await told.nothing()
    assert caplog.text.count("has not answered") == 1


async def test_where_nothing_can_be_forked_instances_are_started_with_one_warning(caplog):
    told = Told()
    async with starter("tests.launch.thready") as one:
        for _ in range(2):
            process = await told.start(one)
            assert isinstance(process, subprocess.Popen)
            assert (await ended(process), (await told.line())["forked"]) == (0, False)
        assert one.fork_server is None
    assert caplog.text.count("instances are started without it") == 1


async def test_another_environment_needs_another_fork_server(monkeypatch):
    told = Told()
    async with starter() as one:
        await ended(await told.start(one))
        first = one.fork_server
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        await ended(await told.start(one))
        assert one.fork_server != first
        assert not alive(first)


async def test_the_one_that_was_begun_before_the_event_loop_is_used_once(monkeypatch):
    told = Told()
    starting.begin("json")
    starting.begin("json")
    first = starting._begun["json"].process.pid
    async with starter() as one, starter() as two:
        await ended(await told.start(one))
        assert one.fork_server == first
        await ended(await told.start(two))
        assert two.fork_server != first
    assert not alive(first)
    starting.begin("json")
    begun = starting._begun["json"].process.pid
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    async with starter() as one:
        await ended(await told.start(one))
        assert one.fork_server != begun
        assert not alive(begun)


async def test_a_fork_server_that_waits_does_nothing():
    told = Told()
    async with starter() as one:
        await ended(await told.start(one))

        def turns():
            status = Path(f"/proc/{one.fork_server}/status").read_text()
            return [line for line in status.splitlines() if "ctxt_switches" in line]

        while (before := turns()) != (await asyncio.sleep(0.05), turns())[1]:
            pass  # it closes what it has been sent
        await asyncio.sleep(0.3)
        assert turns() == before


def test_all_of_it_dies_with_the_parent(tmp_path):
    """`kill -9` of a program in the middle of it all."""
    script = f"""
import asyncio, os, time
from baton.launch.instances.processes import starting
async def main():
    one = starting.Starter("json")
    process = await one.start({HERE!r}, "1 wait", dict(os.environ))
    print(one.fork_server, flush=True)
    time.sleep(600)
asyncio.run(main())
"""
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    said = [program.stdout.readline(), program.stdout.readline()]
    pids = [json.loads(line)["pid"] if "pid" in line else int(line) for line in said]
    assert all(map(alive, pids))
    program.kill()
    program.wait()
    end = time.monotonic() + GENEROUS_S
    while any(map(alive, pids)):
        assert time.monotonic() < end
        time.sleep(0.01)
    program.stdout.close()
