"""A whole server with few descriptors, and clients that hold what they can get; and starts that cannot be."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import subprocess
import sys

import pytest

from baton.gateway.instances.client import ClusterClient
from baton.launch.instances.supervisor import InstanceFailed, Supervisor
from baton.launch.planning.instance_config import instance_config
from tests.e2e.server import Server

SIMULATED = ("--executor", "simulated", "--max-model-len", "512")
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def test_half_open_connections_with_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 of them and 300 descriptors: others are served as if they were not there."""
    command = 'ulimit -n 300; exec "$@"'
    popen = subprocess.Popen
    monkeypatch.setattr(
        "tests.e2e.server.subprocess.Popen",
        lambda arguments, **rest: popen(["bash", "-c", command, "bash", *arguments], **rest),
    )
    with Server(*SIMULATED) as server:
        host, port = server.url.removeprefix("http://").split(":")
        held = []
        openings = (b"", b"GET /", HEAD, HEAD + b"content-length: 1000\r\n\r\n{")
        for number in range(400):
            connection = socket.create_connection((host, int(port)), 60)
            connection.sendall(openings[number % 4])
            held.append(connection)
        assert server.http.get("/health").status_code == 200
        answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert server.metric("baton:http_connections") < 300
        assert server.process.poll() is None
        for connection in held:
            connection.close()
        assert not [line for line in server.warnings() if "Traceback" in line]


def start(limit: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    def few_files() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-m", "baton", "serve", "--port", "0", *SIMULATED],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=few_files,
        env={**os.environ, **environment},
    )


def test_too_few_descriptors_are_one_line() -> None:
    result = start(limit=64)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: only 64 open files are allowed")
    assert "ulimit -n" in last


def test_no_room_for_sockets_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /tmp, say."""

    def full(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp")

    async def run() -> None:
        client = ClusterClient()
        try:
            supervisor = Supervisor(instance_config(max_model_len=64), client.add(), max_restarts=5)
            with pytest.raises(InstanceFailed, match=r"No space left on device.*TMPDIR"):
                await supervisor.run()
        finally:
            await client.close()

    monkeypatch.setattr("tempfile.mkdtemp", full)
    asyncio.run(run())
