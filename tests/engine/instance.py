"""A whole instance for tests of the engine: its loop in a thread of this process, workers as processes."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from pathlib import Path

import zmq
from msgspec import structs

from baton.engine.shell.loop import EngineLoop
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.requests import (
    FROM_ENGINE,
    TO_ENGINE,
    FromEngine,
    Hello,
    Load,
    Outputs,
    ToEngine,
    Welcome,
)
from baton.worker.wiring import GroupWiring, worker_argv

DEADLINE_S = 60.0


class Gateway:
    """A DEALER that waits for answers, with a deadline."""

    def __init__(self, endpoint: str, name: str = "gate", identity: bytes | None = None) -> None:
        self.loads: list[Load] = []
        self.welcome: Welcome | None = None
        """The last one."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        if identity is not None:
            self.socket.setsockopt(zmq.ROUTING_ID, identity)
        self.socket.connect(endpoint)
        self.send(Hello(name))

    def send(self, message: ToEngine) -> None:
        self.socket.send(TO_ENGINE.encode(message))

    def receive(self, timeout_s: float = DEADLINE_S) -> FromEngine:
        """The next message of interest.  No `Load` is, these are kept aside; nor a later `Welcome` that tells
        of a pause, or that the gateway before this one has gone; nor the empty `Outputs` by which an engine
        finds out who is there."""
        while True:
            if not self.socket.poll(int(timeout_s * 1000)):
                raise TimeoutError(f"nothing from the engine within {timeout_s} s")
            message = FROM_ENGINE.decode(self.socket.recv())
            if isinstance(message, Load):
                self.loads.append(message)
                continue
            if message == Outputs():
                continue
            if not isinstance(message, Welcome):
                return message
            known, self.welcome = self.welcome, message
            if known is None or structs.replace(known, paused=message.paused, first=message.first) != message:
                return message

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


class Instance:
    """Worker processes and an engine in a thread of this process."""

    def __init__(
        self,
        config: InstanceConfig,
        endpoint: str | None = None,
        incarnation: str = "i1",
        public: str = "",
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="baton-test-")
        root = Path(self._directory.name)
        self.group = GroupWiring(config, str(root / "rendezvous"))
        self.workers: list[subprocess.Popen[bytes]] = []
        for rank in range(config.tensor_parallel_size):
            wiring = self.group.worker(rank, self.workers[0].pid if rank else None)
            command = worker_argv(wiring)
            self.workers.append(subprocess.Popen(command, pass_fds=wiring.descriptors()))
        self.group.close_worker_ends()
        self.loop = EngineLoop(
            config,
            incarnation=incarnation,
            endpoint=endpoint or f"ipc://{root}/engine.sock",
            commands=self.group.commands,
            transfers=self.group.transfers,
            reports=self.group.reports,
            doorbell=self.group.doorbell,
            worker_pids=[worker.pid for worker in self.workers],
            public=public,
        )
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, name="engine")
        self._thread.start()

    def _run(self) -> None:
        self.code = self.loop.run()

    def wait(self) -> int:
        """The exit code of the loop, which is to end by itself."""
        self._thread.join(DEADLINE_S)
        if self._thread.is_alive():
            raise TimeoutError("the engine does not end")
        return self.code

    def close(self) -> None:
        if self._thread.is_alive():
            self.loop.stop()
            self._thread.join(DEADLINE_S)
        for worker in self.workers:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        self.group.close()
        self._directory.cleanup()
