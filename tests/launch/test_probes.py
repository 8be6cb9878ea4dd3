"""What an instance without HTTP tells those who watch over it."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from baton.launch.instances import probes as module
from baton.launch.instances.probes import Probes
from baton.launch.limits import OptionError


async def get(port: int, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.request(method, f"http://127.0.0.1:{port}{path}")


async def test_the_reason_is_the_answer() -> None:
    why = {"health": "", "ready": "the instance is starting"}
    probes = Probes("127.0.0.1", 0, unhealthy=lambda: why["health"], unready=lambda: why["ready"])
    port = await probes.start()
    try:
        answer = await get(port, "/ready?verbose")
        assert (answer.status_code, answer.text) == (503, "the instance is starting\n")
        assert (await get(port, "/health")).status_code == 200
        why.update(health="gave up", ready="")
        assert (await get(port, "/health")).text == "gave up\n"
        assert (await get(port, "/ready")).status_code == 200
        head = await get(port, "/ready", "HEAD")
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", "3")
        assert (await get(port, "/ready", "POST")).status_code == 405
        other = await get(port, "/v1/models")
        assert other.status_code == 404
        assert "its server" in other.text
    finally:
        probes.close()


async def test_who_says_nothing_holds_up_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.2)
    probes = Probes("127.0.0.1", 0, unhealthy=str, unready=str)
    port = await probes.start()
    try:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * module._MOST)]
        long = await asyncio.open_connection("127.0.0.1", port)
        long[1].write(b"GET /health HTTP/1.1\r\nx: " + b"a" * 2 * module._LONGEST)
        assert (await get(port, "/health")).status_code == 200
        for reader, writer in (*silent, long):
            assert await reader.read() == b"", "closed without an answer"
            writer.close()
    finally:
        probes.close()


async def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"--probe-port {port}: .*give another port"):
            await Probes("127.0.0.1", port, unhealthy=str, unready=str).start()
