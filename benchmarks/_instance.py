"""One instance (engine and worker processes) without a gateway, for benchmarks that speak to it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq

from baton.launch.instances.processes.instance import InstanceLaunch
from baton.protocol.config import InstanceConfig
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Hello, Welcome


@contextmanager
def instance(config: InstanceConfig, deadline_s: float) -> Iterator[tuple[int, zmq.Socket[bytes]]]:
    """The engine's process id, and a socket on which it has said `Welcome`; `deadline_s`: of a read."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        endpoint = f"ipc://{directory}/engine.sock"
        told, tell = os.pipe()
        launch = InstanceLaunch(config, "bench", endpoint, directory, os.getpid(), tell)
        argv = [
            sys.executable,
            "-m",
            "baton.launch.instances.processes.instance",
            msgspec.json.encode(launch).decode(),
        ]
        engine = subprocess.Popen(argv, env={**os.environ, "OMP_NUM_THREADS": "1"}, pass_fds=[tell])
        os.close(tell)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gateway = context.socket(zmq.DEALER)
        gateway.setsockopt(zmq.RCVHWM, 0)
        gateway.setsockopt(zmq.RCVTIMEO, int(deadline_s * 1000))
        gateway.connect(endpoint)
        gateway.send(TO_ENGINE.encode(Hello("bench")))
        try:
            if not isinstance(FROM_ENGINE.decode(gateway.recv()), Welcome):
                raise RuntimeError("the instance did not start")
            yield engine.pid, gateway
        finally:
            engine.terminate()
            engine.wait()
            gateway.close(0)
            context.term()
            os.close(told)
