"""`baton serve --ray` as a process, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
from ray._private import services
from ray.cluster_utils import Cluster

from tests.deploy.started import free_ports, until_ok

NODE = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
PATIENCE_S = 300
PATIENT = {"health_check_timeout_ms": 120_000, "worker_register_timeout_seconds": 300}
"""Ray gives up nothing because the machine is busy.  A node that was killed closes its connections."""


@contextlib.contextmanager
def ray_cluster(places: int, *, port: int | None = None) -> Iterator[Cluster]:
    """A Ray whose head has so many places for an instance."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    given = {} if port is None else {"gcs_server_port": port}
    made = Cluster()
    add_node(made, **given, num_cpus=places, _system_config=PATIENT)
    try:
        yield made
    finally:
        made.shutdown()


def add_node(cluster: Cluster, **given: Any) -> Any:
    """A node with one place.  Ray waits 30 s for a node that it starts; a busy machine may take longer."""
    ask = services.get_node

    def wait(*which: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return ask(*which)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    with mock.patch.object(services, "get_node", wait):
        return cluster.add_node(wait=False, **{**NODE, **given})


class Server:
    """`baton serve --ray` as a process."""

    def __init__(self, address: str, folder: Path, *flags: str, port: int | None = None) -> None:
        self.port = free_ports(1)[0] if port is None else port
        folder.mkdir(exist_ok=True)
        self.log = folder / f"log-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "baton", "serve", "--port", str(self.port)]
        command += ["--ray", address, "--instance-cpus", "1", "--kv-cache-memory-bytes", "64MB"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=120)

    def until_ready(self) -> None:
        until_ok(f"{self.url}/ready", self.process, self.log)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)

    def instances(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.http.get("/cluster/instances").json()
        return shown

    def ready(self) -> list[str]:
        return [one["name"] for one in self.instances()["instances"] if one["state"] == "ready"]

    def until(self, holds: Callable[[], object]) -> float:
        """Returns after how many seconds it did."""
        started = time.monotonic()
        while not holds():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() - started < PATIENCE_S, self.log.read_text()
            time.sleep(0.2)
        return time.monotonic() - started

    def driver(self) -> int:
        """The process with Ray's driver."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [pid for pid in children if b"placing.driver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return int(pid)


def processes_of(port: int) -> list[int]:
    """Of instances that join that server."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
            parent = int((entry.parent / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if b"--instance" in words and f"127.0.0.1:{port}".encode() in words:
            found[int(entry.parent.name)] = parent
    # (A child has the words of its parent until it executes a program.)
    return sorted(pid for pid, parent in found.items() if parent not in found)


def answer(http: httpx.Client, seed: int) -> str:
    body = {
        "prompt": f"{seed}: The old man",
        "max_tokens": 300,
        "ignore_eos": True,
        "seed": seed,
        "stream": True,
    }
    text = []
    with http.stream("POST", "/v1/completions", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += [choice["text"] for choice in event["choices"]]
    return "".join(text)
