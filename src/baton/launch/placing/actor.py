"""What Ray runs on a node: an actor that owns the resources of an instance there, and its process.

The constructor starts the process, from a thread that lives as long as the actor's process: the kernel ends
the instance when that is gone, however it ended (`die_with_parent`), so no instance outlives its resources.
The instance restarts its engine by itself; if it gives up, or ends without being told to, the actor's process
exits, and Ray makes the actor again, on this node or on another one; of an instance on several hosts the
driver does so with all of them (`gang.py`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import ray

from baton.ipc.processes.process import die_with_parent
from baton.launch.planning.cluster_options import bracketed

_SOON_S = 30.0
_PAUSE_S = 5.0
"""Before an instance that lived for less than `_SOON_S` is tried again."""


class InstanceActor:
    """One instance, or what one of its hosts has.  A method runs beside the constructor's thread
    (`max_concurrency` 2)."""

    def __init__(
        self,
        arguments: list[str],
        *,
        loopback: bool,
        secrets: tuple[str, ...],
        stop_after_s: float,
        node: int = 0,
        nodes: int = 1,
        leader: str = "",
    ) -> None:
        """`leader`: where the actor of node 0 waits for this one."""
        self._stop_after_s = stop_after_s
        self._stopping = False
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._leader = leader
        if nodes > 1 and not node:
            self._leader = f"{bracketed(host)}:{_free_port(host)}"
            arguments = [*arguments, "--nodes", str(nodes)]
        if nodes > 1:
            arguments = [*arguments, "--node", str(node), "--leader", self._leader]
        parent = os.getpid()
        files = [_without_name(secret) for secret in secrets]
        given = [word for file in files for word in ("--cluster-secret", f"/proc/self/fd/{file}")]
        command = [sys.executable, "-m", "baton", "serve", "--instance", *arguments, "--host", host]
        self._process = subprocess.Popen(
            [*command, *given],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )
        for file in files:
            os.close(file)
        threading.Thread(target=self._watch, name="instance", daemon=True).start()

    def place(self) -> str:
        """Where it runs, for people; returns once the process has been started."""
        return str(ray.util.get_node_ip_address())

    def leads(self) -> str:
        """Where it waits for the other hosts of its instance."""
        return self._leader

    def stop(self) -> int:
        """Drains the instance, and ends it after `stop_after_s` at the latest.  Returns its exit code."""
        self._stopping = True
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(self._stop_after_s)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def _watch(self) -> None:
        started = time.monotonic()
        code = self._process.wait()
        if self._stopping:
            return
        print(f"the instance ended with {code}; it is started again", file=sys.stderr, flush=True)
        if time.monotonic() - started < _SOON_S:
            time.sleep(_PAUSE_S)
        os._exit(1)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as taken:
        return int(taken.getsockname()[1])


def _without_name(secret: str) -> int:
    """A file with the secret, for the child alone: arguments and variables can be read by others."""
    file = os.memfd_create("cluster-secret", 0)
    os.write(file, secret.encode())
    os.fchmod(file, 0o400)
    return file
