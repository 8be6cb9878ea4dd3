"""Keeps one instance running: starts it, watches it, answers for it when it dies, starts it again.

An instance is one engine process, which is the parent of its worker ranks
(`launch/instances/processes/instance.py`).  The supervisor lives on the event loop of the process that holds
the gateway, and watches the engine through a pidfd, so a death is noticed when it happens, not at the next
poll.  What was in flight is answered by the gateway (`InstanceClient.lost`): it goes on at another instance,
or at the next incarnation.

A process can also be alive and do nothing (stopped, swapped out, stuck in the kernel).  The engine's loop
never blocks, so while requests are in flight it is asked for its statistics every few seconds; when such a
question gets no answer for 10 s it is killed, and the rest is as for any death.  So is one that has said
that it fails, and does not end.  A hanging *worker* is the engine's to notice (`step_timeout_s`).  What the
supervisor has not read because it stood still itself counts against nobody (`protocol/rules/silence.py`).

A process that is killed and does not end is stuck in the kernel, and no signal reaches it.  The supervisor
waits `_KILL_S` for it, says so, and starts the next incarnation beside it.

Each start is a new *incarnation* with its own sockets, so that nothing of the old one is ever taken for
the new one.  An endpoint `ipc://*` stands for a socket in a private directory; of `tcp://HOST:0` only the
engine learns the port, and tells it through a pipe.  An instance that was lost is started again at once; if
it is lost again and again, at the earliest 0.5 s, 1 s, 2 s, … 30 s after it had begun to serve; after
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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from baton.gateway.errors import InstanceUnavailable
from baton.gateway.instances.connection import HEARTBEAT_S, SILENT_S, InstanceClient
from baton.gateway.instances.patience import any_within
from baton.ipc.processes.children import Process
from baton.launch.instances.image_server import image_server, loading
from baton.launch.instances.processes.environment import engine_environment
from baton.launch.instances.processes.instance import InstanceLaunch
from baton.launch.instances.processes.starting import Starter, exit_of
from baton.launch.instances.runtime_dir import RuntimeDirectory
from baton.launch.instances.vocabulary import write_vocabulary
from baton.protocol.config import InstanceConfig
from baton.protocol.rules.cluster_secret import NO_SECRETS, SECRETS_VARIABLE, Secrets
from baton.protocol.rules.proof import SECRET_VARIABLE
from baton.protocol.rules.silence import Silence
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

_MODULE = "baton.launch.instances.processes.instance"
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_HEALTHY_AFTER_S = 60.0
_STOP_DEADLINE_S = 10.0
_LEAVE_S = 5.0
"""What an engine that has failed may take to end its workers and itself."""
_KILLED = f"killed by {signal.Signals.SIGKILL.name}"
"""In the reason why an instance ended: somebody did that, or the kernel was out of memory.  One that was
never ready is started once more then; nothing else of a first start is tried again."""
_LAST_WORDS_S = 0.5
"""So long what an engine that has left said last may take to be read."""
_KILL_S = 10.0
"""What a killed process may take to end."""


class InstanceFailed(RuntimeError):
    """The instance could not be started, or died too often; the message says why."""


class Supervisor:
    """Runs one instance for as long as `run` runs."""

    def __init__(
        self,
        config: InstanceConfig,
        client: InstanceClient,
        *,
        max_restarts: int,
        public: str = "",
        heartbeat_idle: bool = False,
        secret: str = "",
        cluster_secrets: Secrets | None = None,
        starter: Starter | None = None,
    ) -> None:
        """`public`: where gateways of other hosts reach the engine, "" if none shall; this process uses a
        socket in a private directory.  `heartbeat_idle`: it is asked for its statistics also while nothing
        is in flight here, because others send to it as well.  `secret`: with which the engine proves itself
        to those it registers with.  `cluster_secrets`: of which it makes its keys.  `starter`: one that
        others use as well, and close."""
        self._secret = secret
        self._cluster_secrets = cluster_secrets or NO_SECRETS
        self._starter = starter or Starter(config.executor, config.log_format)
        self._owns_starter = starter is None
        self._config = config
        self._client = client
        self._public = public
        self.public = ""
        """Where gateways of other hosts reach the running engine, once it has said so."""
        self._heartbeat_idle = heartbeat_idle
        self._max_restarts = max_restarts
        self._process: Process | None = None
        self.spawned = asyncio.Event()
        """What is slow about the first start happens in another process by now."""
        self.restarts = 0
        self._was_ready = asyncio.Event()
        self.has_served = False
        """Once, at least."""

    @property
    def name(self) -> str:
        return self._config.name

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None while none runs."""
        return self._process.pid if self._process else None

    async def run(self) -> None:
        """Serves until cancelled.  Raises `InstanceFailed` when it gives up."""
        try:
            directory = RuntimeDirectory()
        except OSError as error:
            reason = (
                f"cannot make a private directory for sockets: {error.strerror or error} ({error.filename})"
            )
            self._client.failed(reason)
            raise InstanceFailed(
                f"{reason}; make room there, or set TMPDIR to a place that has some"
            ) from None
        failures = 0
        was_killed = False
        images = ExitStack()
        try:
            if self._config.executor == "torch" and self._config.device == "cpu":
                server = images.enter_context(image_server())
                self._config = msgspec.structs.replace(self._config, weight_images=server)
            if self._config.executor == "torch" and self._config.tokenizer_files:
                path = directory.path / "vocabulary"
                self._config = msgspec.structs.replace(self._config, vocabulary=str(path))
                writing = asyncio.create_task(self._write_vocabulary(path), name="vocabulary")
                images.callback(writing.cancel)
            while True:
                served_s, reason = await self._run_once(directory.path)
                if self._client.closed:
                    await self._until_cancelled()
                failures = 0 if served_s > _HEALTHY_AFTER_S else failures + 1
                self.has_served = self.has_served or served_s > 0
                if not self.has_served and (was_killed or _KILLED not in reason):
                    self._client.failed(reason)
                    raise InstanceFailed(reason)
                was_killed = True
                if failures > self._max_restarts:
                    if failures > 1:
                        reason = f"the instance failed {failures} times in a row, the last time: {reason}"
                    self._client.failed(reason)
                    raise InstanceFailed(reason)
                pause = max(0.0, _backoff(failures) - served_s)
                when = f"in {pause:.1f} s" if pause else "now"
                log.error("%s: instance lost: %s; starting it again %s", self.name, reason, when)
                await asyncio.sleep(pause)
                self.restarts += 1
        finally:
            await self._stop()
            if self._owns_starter:
                self._starter.close()
            directory.remove()
            images.close()

    async def _write_vocabulary(self, path: Path) -> None:
        """Once the first incarnation is ready: its start needs the cores, and the tokenizer can wait."""
        await self._was_ready.wait()
        await write_vocabulary(self._config.tokenizer_files, path)

    def name_weights(self, weights: Weights) -> None:
        """The cluster calls the weights that the next incarnation loads so (`InstanceConfig.weights`)."""
        self._config = msgspec.structs.replace(self._config, weights=weights)

    def use_weights(self, weights: Weights) -> None:
        """The instance is to have other weights: the next incarnation loads them from the start."""
        self.name_weights(weights)
        if self._config.executor != "simulated":
            self._config = msgspec.structs.replace(self._config, model=weights.path)

    def kill(self) -> None:
        """Ends the instance at once, without waiting for anything."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def _run_once(self, directory: Path) -> tuple[float, str]:
        """One incarnation from start to death.  Returns (seconds it served, why it died)."""
        incarnation = secrets.token_hex(4)
        endpoint = f"ipc://{directory}/{incarnation}.sock"
        peers = _place(self._config.peer_endpoint, f"{directory}/{incarnation}.peer")
        config = msgspec.structs.replace(self._config, peer_endpoint=peers)
        told = _Told()
        with told.inherited() as told_fd:
            launch = InstanceLaunch(
                config, incarnation, endpoint, str(directory), os.getpid(), told_fd, self._public
            )
            environment = {
                **engine_environment(),
                SECRET_VARIABLE: self._secret,
                SECRETS_VARIABLE: self._cluster_secrets.dump(),
            }
            argument = msgspec.json.encode(launch).decode()
            self.spawned.set()  # (it is read when this task waits)
            self._process = await self._starter.start(_MODULE, argument, environment, [told_fd])
        died = asyncio.ensure_future(exit_of(self._process))
        ready = asyncio.ensure_future(self._attach(told, incarnation))
        ready_at: float | None = None
        try:
            await any_within((died, ready), self._config.startup_timeout_s)
            if ready.done() and not died.done():
                try:
                    ready.result()
                except InstanceUnavailable as error:
                    await self._stop()
                    return 0.0, error.message
                ready_at = time.monotonic()
                self._was_ready.set()
                await self._watch(self._process, died)
            elif not died.done():
                far = loading(self.name)
                await self._stop()
                return 0.0, (
                    f"not ready after {self._config.startup_timeout_s:g} s (--startup-timeout); "
                    + (f"{'loading was at' if far[0].isdigit() else 'it was'} {far}; " if far else "")
                    + "raise it if loading the model takes longer"
                )
            if not died.done() or died.result() >= 0:
                # The engine may have said why it goes down; let the client read it before it is asked.
                until = time.monotonic() + _LAST_WORDS_S
                while self._client.failure is None and time.monotonic() < until:
                    await asyncio.sleep(0.02)
            reason = self._client.failure or _how_it_ended(died)
            return (time.monotonic() - ready_at if ready_at else 0.0), reason
        finally:
            ready.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await ready
            if died.done() or ready_at is not None:
                self._client.lost(self._client.failure or _how_it_ended(died))
            died.cancel()
            told.close()
            for place in (endpoint, peers):
                with suppress(OSError):
                    os.unlink(place.removeprefix("ipc://"))

    async def _attach(self, told: _Told, incarnation: str) -> None:
        """Returns when the instance serves; the caller bounds the wait.  Raises `InstanceUnavailable`."""
        endpoint, self.public = await told.endpoints()
        if not endpoint:
            await asyncio.sleep(_LEAVE_S)  # it is about to end, and its exit says more
            raise InstanceUnavailable("the engine closed its pipe without saying where it listens")
        await self._client.attach(endpoint, incarnation)

    async def _watch(self, process: Process, died: asyncio.Future[int]) -> None:
        """Returns when the process is dead, or was killed and does not end; sees to it when it does not
        answer, or does not leave."""
        leaving: Silence | None = None
        while not died.done():
            now = time.monotonic()
            pause = HEARTBEAT_S if leaving is None else max(0.0, min(HEARTBEAT_S, leaving.deadline - now))
            await asyncio.wait((died,), timeout=pause)
            if died.done():
                return
            if self._client.closed:
                return await self._until_cancelled()  # the engine is stopped when its requests have ended
            if self._client.state != "ready":
                # It has said that it fails, or closed its connection: it is about to end.
                leaving = leaving or Silence(_LEAVE_S, time.monotonic())
                if leaving.look(time.monotonic()):
                    log.error("%s: the engine failed and did not leave; killing it", self.name)
                    await self._kill(process, died)
                    return
                continue
            leaving = None
            if (self._heartbeat_idle or self._client.in_flight) and await self._client.silent():
                self._client.lost(f"the engine process has not answered for {SILENT_S:.0f} s")
                await self._kill(process, died)
                return

    async def _until_cancelled(self) -> None:
        """The server shuts down, which ends with cancelling this; its last answers have a deadline there."""
        await asyncio.Event().wait()

    async def _kill(self, process: Process, died: asyncio.Future[int]) -> None:
        """Returns when the process has ended, or does not within `_KILL_S`."""
        process.kill()
        await asyncio.wait((died,), timeout=_KILL_S)
        if not died.done():
            log.critical(
                "%s: process %d was killed and does not end: it is stuck in the kernel (a device or a "
                "network disk that does not answer?); its memory stays taken",
                self.name,
                process.pid,
            )

    async def _stop(self) -> None:
        """Asks the engine to leave, waits a bounded time, then kills it."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        died = asyncio.ensure_future(exit_of(process))
        try:
            await asyncio.wait((died,), timeout=_STOP_DEADLINE_S)
            if not died.done():
                log.error("the engine did not leave within %.0f s; killing it", _STOP_DEADLINE_S)
                await self._kill(process, died)
        finally:
            died.cancel()
            with suppress(asyncio.CancelledError):
                await died


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

    async def endpoints(self) -> tuple[str, str]:
        """Waits until the engine has said where it listens, privately and publicly, or has closed its end
        (""), which it does at the latest when it dies.  The caller bounds the wait."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._read, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._read)
        endpoint, _, public = os.read(self._read, 4096).decode().partition(" ")  # a short line arrives whole
        return endpoint.strip(), public.strip()

    def close(self) -> None:
        os.close(self._read)


def _backoff(failures: int) -> float:
    """Seconds from when an instance began to serve to its next start, after so many that ended in a row."""
    return min(_FIRST_BACKOFF_S * 2 ** min(failures - 2, 16), _MAX_BACKOFF_S) if failures > 1 else 0.0


def _place(endpoint: str, path: str) -> str:
    """`ipc://*` → a socket at this path."""
    return f"ipc://{path}" if endpoint == "ipc://*" else endpoint


def _how_it_ended(died: asyncio.Future[int]) -> str:
    return _describe_exit(died.result()) if died.done() else "the engine process was killed and has not ended"


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"the engine process was killed by {signal.Signals(-code).name}"
    return f"the engine process exited with status {code} (its log says why)"
