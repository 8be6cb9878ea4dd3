"""How this process starts instances: forked by a fork server if that is possible, plainly if not.

One `Starter` for all instances of a server.  Belongs to one event loop.  The server is started with the first
instance, which waits until it has imported; a plain start would have to import the same.

| what happens | what becomes of the start |
| --- | --- |
| the fork server dies, or is silent for `_SILENT_S` | another one is asked, once; then a plain start |
| it says that it cannot fork here | a plain start, now and from then on, with one warning |
| the environment of this process has changed | another one is asked: libraries read it when they are loaded |
| this system has no fork server | a plain start |

A child that was forked begins only when it has been told so here (`fork_server.py`): none is started twice.

The fork server's imports are the longest part of a start.  So a command that will serve calls `begin` first,
before it imports the HTTP server and reads the model's files; the first `Starter` takes that fork server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from baton.ipc.processes.children import Child, Process
from baton.ipc.processes.forking import can_fork_for_parent
from baton.launch.instances.processes.environment import worker_environment
from baton.launch.instances.processes.fork_server import CANNOT, ROOM, Request

log = logging.getLogger(__name__)

_SILENT_S = 120.0
"""What a fork server may take to answer, its imports included."""
_TRIES = 2
_LASTING_S = 10.0
"""A fork server that has lived so long is replaced when it dies, one that has not when it is needed."""
_KILLED_S = 1.0
"""What one that has closed its sockets, or is killed, may take to end."""


_begun: dict[str, _Server] = {}
"""By executor: fork servers that `begin` started and no `Starter` has taken yet."""


def begin(executor: str, log_format: str = "text") -> None:
    """Starts the fork server that the first `Starter` of this executor will use.

    If this process ends before that, for a wrong flag or model, the kernel ends the fork server with it.  A
    fork server that cannot be started is the `Starter`'s to report.
    """
    if executor not in _begun and can_fork_for_parent():
        with suppress(OSError):
            _begun[executor] = _Server(executor, log_format)


class _Lost(RuntimeError):
    """The fork server did not start the process; the message says why."""


class Starter:
    """Starts processes; `close` in the end.  They are children of this process, and of the thread that runs
    the event loop."""

    def __init__(self, executor: str, log_format: str = "text") -> None:
        self._executor, self._log_format = executor, log_format
        self._plain = not can_fork_for_parent()
        self._server: _Server | None = None

    @property
    def fork_server(self) -> int | None:
        """Its process id."""
        return self._server.process.pid if self._server else None

    async def start(
        self, module: str, argument: str, environment: Mapping[str, str], fds: Sequence[int] = ()
    ) -> Process:
        """Starts `python -P -m MODULE ARGUMENT` in a process group of its own: Ctrl-C and signals to this
        process's group do not reach it, which is ended in its own time.  And in this process's session: Linux
        may share cores between sessions first (`CONFIG_SCHED_AUTOGROUP`), and then lets who has something
        short to do wait for another session, for tens of milliseconds.

        `fds` are the descriptors that it has besides stdin (nothing), stdout and stderr, under the same
        numbers.  Raises `OSError` if there is no way to start it.
        """
        command = _command(module, argument)
        for _ in range(_TRIES):
            if self._plain:
                break
            server = self._running()
            try:
                return await server.fork(
                    Request(
                        command=command,
                        module=module,
                        argument=argument,
                        environment=dict(environment),
                        directory=os.getcwd(),
                        mask=_file_mask(),
                        cores=sorted(os.sched_getaffinity(0)),
                        numbers=[0, 1, 2, *fds],
                    )
                )
            except (_Lost, OSError) as error:
                with suppress(TimeoutError):  # it closes its sockets some moments before it has ended
                    async with asyncio.timeout(_KILLED_S):
                        await exit_of(server.process)
                self._lost(server, "it has ended" if isinstance(error, ConnectionError) else str(error))
        return subprocess.Popen(
            _command(module, argument),
            stdin=subprocess.DEVNULL,
            process_group=0,
            pass_fds=fds,
            env=environment,
        )

    def close(self) -> None:
        """Ends the fork server, and no process that it has forked."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _running(self) -> _Server:
        """A fork server that has this process's environment."""
        if self._server is None and (begun := _begun.pop(self._executor, None)) is not None:
            self._use(begun)
        if self._server is not None and self._server.environment != os.environ:
            log.info("the environment has changed: the fork server of the instances is started anew")
            self.close()
        return self._server or self._use(_Server(self._executor, self._log_format))

    def _use(self, server: _Server) -> _Server:
        self._server = server
        server.watch = asyncio.create_task(self._watch(server), name="fork server")
        return server

    async def _watch(self, server: _Server) -> None:
        """When it dies between two starts, the next one shall not wait for another one's imports."""
        began = time.monotonic()
        await exit_of(server.process)
        self._lost(server, "it has ended")
        if not self._plain and self._server is None and time.monotonic() - began > _LASTING_S:
            self._running()

    def _lost(self, server: _Server, why: str) -> None:
        if server is not self._server:
            return  # that is known
        self._plain = server.process.poll() == CANNOT
        how = "instances are started without it" if self._plain else "there will be another one"
        log.warning("the fork server of the instances: %s; %s", why, how)
        self.close()


class _Server:
    """A fork server's process, and what was true when it was started."""

    def __init__(self, executor: str, log_format: str) -> None:
        """Raises `OSError`."""
        self.environment = dict(os.environ)
        self.watch: asyncio.Task[None] | None = None
        self._control, theirs = socket.socketpair()
        with theirs:
            command = _command("baton.launch.instances.processes.fork_server", str(theirs.fileno()))
            try:
                self.process = subprocess.Popen(
                    [*command, str(os.getpid()), executor, log_format, " " * ROOM],
                    stdin=subprocess.DEVNULL,
                    process_group=0,
                    pass_fds=(theirs.fileno(),),
                    # NumPy's pool of threads would be made by the import.
                    env={**worker_environment(), "OPENBLAS_NUM_THREADS": "1"},
                )
            except BaseException:
                self._control.close()
                raise
        self._control.setblocking(False)

    async def fork(self, request: Request) -> Child:
        """Raises `_Lost` or `OSError`; then there is no such process, or it ends without doing anything."""
        mine = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), _open_or_null(1), _open_or_null(2)]
        ours, theirs = socket.socketpair()
        try:
            what = os.memfd_create("baton-start", os.MFD_CLOEXEC)
            mine.insert(0, what)
            with open(what, "wb", closefd=False) as file:
                file.write(msgspec.msgpack.encode(request))
            os.lseek(what, 0, os.SEEK_SET)
            sent = [what, theirs.fileno(), *mine[1:], *request.numbers[3:]]
            socket.send_fds(self._control, [b"f"], sent)
            theirs.close()
            return await self._told(ours)
        finally:
            ours.close()
            theirs.close()
            for one in mine:
                os.close(one)

    async def _told(self, asked: socket.socket) -> Child:
        asked.setblocking(False)
        try:
            async with asyncio.timeout(_SILENT_S):
                said = await asyncio.get_running_loop().sock_recv(asked, 256)
        except TimeoutError:
            raise _Lost(f"it has not answered for {_SILENT_S:g} s") from None
        if not said:
            raise _Lost("it has ended")
        if said.startswith(b"!"):
            raise _Lost(said[1:].decode())
        with suppress(OSError):  # (it has been killed just now, and that is seen as any death is)
            asked.send(b"g")
        return Child(int(said))

    def close(self) -> None:
        if self.watch is not None and self.watch is not asyncio.current_task():
            self.watch.cancel()
        self._control.close()
        if self.process.poll() is None:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_KILLED_S)


async def exit_of(process: Process) -> int:
    """Waits for the process without polling; returns its exit code (negative: the signal)."""
    if (code := process.poll()) is not None:
        return code
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


def _command(module: str, argument: str) -> list[str]:
    """`-P`: the working directory must not shadow installed packages."""
    return [sys.executable, "-P", "-m", module, argument]


def _open_or_null(descriptor: int) -> int:
    """A copy of it; of /dev/null if this process has closed it."""
    try:
        return os.dup(descriptor)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def _file_mask() -> int:
    found = re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.M)
    return int(found[1], 8) if found else 0o022
