"""Keeps one instance running: starts it, watches it, answers for it when it dies, starts it again.

An instance is one engine process, which is the parent of its worker ranks (`launch/instance.py`).  The
supervisor lives on the event loop of the process that holds the gateway, and watches the engine through
a pidfd, so a death is noticed when it happens, not at the next poll.  What was in flight is answered by
the gateway (`InstanceClient.lost`): it goes on at another instance, or at the next incarnation.

A process can also be alive and do nothing (stopped, swapped out, stuck in the kernel).  The engine's loop
never blocks, so while requests are in flight it is asked for its statistics every few seconds; when two
such questions in a row get no answer it is killed, and the rest is as for any death.  So is one that has said
that it fails, and does not end.  A hanging *worker* is the engine's to notice (`step_timeout_s`).

Each start is a new *incarnation* with its own sockets, so that nothing of the old one is ever taken for
the new one.  An endpoint `ipc://*` stands for a socket in a private directory; of `tcp://HOST:0` only the
engine learns the port, and tells it through a pipe.  Restarts back off (0.5 s, 1 s, 2 s, … 30 s); after
`max_restarts` in a row that did not serve for a minute, or when the very first start fails, the supervisor
gives up and says why.

Nobody outlives anybody: the engine dies with this process and the workers die with the engine
(PR_SET_PDEATHSIG, and a pidfd in each poll set).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from baton.gateway.errors import InstanceUnavailable
from baton.gateway.instance_client import InstanceClient
from baton.launch.environment import engine_environment
from baton.launch.instance import InstanceLaunch
from baton.launch.runtime_dir import RuntimeDirectory
from baton.protocol.config import InstanceConfig

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 60.0
_STOP_DEADLINE_S = 10.0
_LEAVE_S = 5.0
"""What an engine that has failed may take to end its workers and itself."""
_HEARTBEAT_S = 2.0
_HEARTBEAT_DEADLINE_S = 5.0
_MISSED_HEARTBEATS = 2


class InstanceFailed(RuntimeError):
    """The instance could not be started, or died too often; the message says why."""


class Supervisor:
    """Runs one instance for as long as `run` runs."""

    def __init__(
        self,
        config: InstanceConfig,
        client: InstanceClient,
        *,
        max_restarts: int = 5,
        startup_timeout_s: float = 600.0,
        endpoint: str = "ipc://*",
        heartbeat_idle: bool = False,
    ) -> None:
        """`endpoint`: where gateways reach the engine.  `heartbeat_idle`: it is asked for its statistics also
        while nothing is in flight here, because others send to it as well."""
        self._config = config
        self._client = client
        self._endpoint = endpoint
        self._heartbeat_idle = heartbeat_idle
        self._max_restarts = max_restarts
        self._startup_timeout_s = startup_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self.spawned = asyncio.Event()
        """There has been a process."""
        self.restarts = 0

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None while none runs."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Serves until cancelled.  Raises `InstanceFailed` when it gives up."""
        directory = RuntimeDirectory()
        failures = 0
        try:
            while True:
                served_s, reason = await self._run_once(directory.path)
                failures = 0 if served_s > _HEALTHY_AFTER_S else failures + 1
                if served_s == 0 and self.restarts == 0:
                    self._client.failed(reason)
                    raise InstanceFailed(reason)
                if failures > self._max_restarts:
                    reason = f"the instance failed {failures} times in a row, the last time: {reason}"
                    self._client.failed(reason)
                    raise InstanceFailed(reason)
                backoff = min(_FIRST_BACKOFF_S * 2 ** max(failures - 1, 0), _MAX_BACKOFF_S)
                log.error("%s: instance lost: %s; starting it again in %.1f s", self.name, reason, backoff)
                await asyncio.sleep(backoff)
                self.restarts += 1
        finally:
            await self._stop()
            directory.remove()

    def name_weights(self, name: str) -> None:
        """The cluster calls the weights that the next incarnation loads so (`InstanceConfig.weights`)."""
        self._config = msgspec.structs.replace(self._config, weights=name)

    def use_weights(self, directory: str) -> None:
        """The instance has been given other weights: the next incarnation loads them too."""
        self.name_weights(directory)
        if self._config.executor != "simulated":
            self._config = msgspec.structs.replace(self._config, model=directory)

    def kill(self) -> None:
        """Ends the instance at once, without waiting for anything."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def _run_once(self, directory: Path) -> tuple[float, str]:
        """One incarnation from start to death.  Returns (seconds it served, why it died)."""
        incarnation = secrets.token_hex(4)
        endpoint = _place(self._endpoint, f"{directory}/{incarnation}.sock")
        peers = _place(self._config.peer_endpoint, f"{directory}/{incarnation}.peer")
        config = msgspec.structs.replace(self._config, peer_endpoint=peers)
        told = _Told()
        with told.inherited() as told_fd:
            launch = InstanceLaunch(config, incarnation, endpoint, str(directory), os.getpid(), told_fd)
            self._process = _spawn(launch)
            self.spawned.set()
        died = asyncio.ensure_future(_exit_of(self._process))
        ready = asyncio.ensure_future(self._attach(told, incarnation))
        ready_at: float | None = None
        try:
            await asyncio.wait(
                (died, ready), timeout=self._startup_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ready.done() and not died.done():
                ready.result()
                ready_at = time.monotonic()
                await self._watch(self._process, died)
            elif not died.done():
                await self._stop()
                return 0.0, f"not ready after {self._startup_timeout_s:.0f} s (--startup-timeout)"
            # The engine may have said why it goes down; let the client read it before it is asked.
            await asyncio.sleep(0.05)
            reason = self._client.failure or _describe_exit(died.result())
            return (time.monotonic() - ready_at if ready_at else 0.0), reason
        finally:
            ready.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await ready
            if died.done():
                self._client.lost(self._client.failure or _describe_exit(died.result()))
            died.cancel()
            told.close()
            for place in (endpoint, peers):
                with suppress(OSError):
                    os.unlink(place.removeprefix("ipc://"))

    async def _attach(self, told: _Told, incarnation: str) -> None:
        """Returns when the instance serves; the caller bounds the wait."""
        await self._client.attach(await told.endpoint(), incarnation)

    async def _watch(self, process: subprocess.Popen[bytes], died: asyncio.Future[int]) -> None:
        """Returns when the process is dead; sees to it when it does not answer, or does not end."""
        missed = 0
        over_since: float | None = None
        while not died.done():
            await asyncio.wait((died,), timeout=_HEARTBEAT_S)
            if died.done():
                return
            if self._client.state != "ready":
                # It has said that it fails, or closed its connection: it is about to end.
                over_since = over_since or time.monotonic()
                if time.monotonic() - over_since >= _LEAVE_S:
                    log.error("%s: the engine failed and did not leave; killing it", self.name)
                    process.kill()
                    await died
                continue
            over_since = None
            if not (self._heartbeat_idle or self._client.in_flight):
                continue
            try:
                await self._client.query("stats", _HEARTBEAT_DEADLINE_S)
                missed = 0
            except InstanceUnavailable as error:
                missed += error.code == "timeout"
            if missed >= _MISSED_HEARTBEATS:
                silent_s = _MISSED_HEARTBEATS * _HEARTBEAT_DEADLINE_S
                self._client.lost(f"the engine process has not answered for {silent_s:.0f} s")
                process.kill()
                await died

    async def _stop(self) -> None:
        """Asks the engine to leave, waits a bounded time, then kills it."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_exit_of(process), _STOP_DEADLINE_S)
        if process.poll() is None:
            log.error("the engine did not leave within %.0f s; killing it", _STOP_DEADLINE_S)
            process.kill()
            process.wait()


class _Told:
    """A pipe through which an engine says where it listens."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)

    @contextmanager
    def inherited(self) -> Iterator[int]:
        """The end for the engine, while it is started."""
        try:
            yield self._write
        finally:
            os.close(self._write)

    async def endpoint(self) -> str:
        """Waits until the engine has said it; without an end if it dies before, as its exit says more."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._read, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._read)
        text = os.read(self._read, 4096).decode()  # a short line arrives whole
        if not text:
            await asyncio.Event().wait()
        return text.strip()

    def close(self) -> None:
        os.close(self._read)


def _place(endpoint: str, path: str) -> str:
    """`ipc://*` → a socket at this path."""
    return f"ipc://{path}" if endpoint == "ipc://*" else endpoint


def _spawn(launch: InstanceLaunch) -> subprocess.Popen[bytes]:
    """Starts the engine process.

    `-P`: the working directory must not shadow installed packages.  A session of its own: Ctrl-C and signals
    to the server's group reach the server only, which ends the instance in its own time.
    """
    command = [sys.executable, "-P", "-m", "baton.launch.instance", msgspec.json.encode(launch).decode()]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=(launch.told_fd,),
        env=engine_environment(),
    )


async def _exit_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for the process without polling; returns its exit code (negative: the signal)."""
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process.pid)
    exited = asyncio.Event()
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return process.wait()


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    return f"the engine process exited with status {code} (its log says why)"
