"""Processes that answer HTTP, for tests."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import httpx

PATIENCE_S = 300


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


def until_ok(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, f"{url}: {log.read_text()}"
        time.sleep(0.1)
