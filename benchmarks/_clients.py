"""A server for a benchmark, and clients of it that cost little, so that the cores are left to the server.

A client is a streamed completion over a plain socket.  Of each line only what is needed is looked at: how
many tokens it brings, and whether it is the last one.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _ideal import Timed
from baton.model.checkpoint.hub import resolve_model

_START_S = 180.0
_ANSWER_S = 600.0
_TOKENS = b'"token_ids":['


class Server:
    """The address of a running `baton serve`."""

    def __init__(self, process: subprocess.Popen[bytes], host: str, port: int, model: str) -> None:
        self.process = process
        self.host = host
        self.port = port
        self.model = model

    def get(self, path: str, *, timeout_s: float = 30.0) -> Any:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=timeout_s) as answer:
            return json.load(answer)

    def get_text(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"http://{self.host}:{self.port}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each engine counts."""
        found: dict[str, dict[str, Any]] = self.get("/stats")["instances"]
        return found


@contextmanager
def long_model(context: int) -> Iterator[str]:
    """A directory with the embedded model's tokenizer and a longer context, for the simulated executor."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        for file in resolve_model(None).iterdir():
            (Path(directory) / file.name).write_bytes(file.read_bytes())
        config = Path(directory) / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": context}))
        yield directory


@contextmanager
def serving(*flags: str, python: str = sys.executable, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`baton serve` on a free port; the end of its log is shown if something fails.

    `python` and `env`: of another checkout than this one."""
    command = [
        python,
        "-m",
        "baton",
        "serve",
        "--port",
        "0",
        "--log-level",
        "warning",
        *flags,
    ]
    with tempfile.NamedTemporaryFile(prefix="baton-bench-", suffix=".log") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, env=env
        )
        assert process.stdout is not None
        try:
            text = b""
            while not (found := re.search(rb"http://([0-9.]+):([0-9]+)/v1", text)):
                piece = process.stdout.readline()
                if not piece:
                    raise RuntimeError("the server did not start")
                text += piece
            server = Server(process, found[1].decode(), int(found[2]), "")
            _wait_ready(server)
            server.model = server.get("/v1/models")["data"][0]["id"]
            yield server
        except BaseException:
            print("".join(Path(log.name).read_text(errors="replace").splitlines(True)[-30:]), file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def _wait_ready(server: Server) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            server.get("/ready")
            return
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"not ready within {_START_S:g} s: {error}") from None
            time.sleep(0.1)


def random_sizes(count: int, mean_prompt: int, mean_output: int, rng: random.Random) -> list[tuple[int, int]]:
    """(prompt, output): uniform between half of the mean and one and a half of it."""

    def around(mean: int) -> int:
        return rng.randint(mean // 2, mean + mean // 2)

    return [(around(mean_prompt), around(mean_output)) for _ in range(count)]


def random_prompt(length: int, rng: random.Random) -> list[int]:
    """Token ids of the embedded model; no two prompts have a beginning in common."""
    return [rng.randrange(10, 500) for _ in range(length)]


class _Answer(asyncio.Protocol):
    """Reads one answer.  (A `StreamReader` would cost as much as the server.)"""

    def __init__(self, num_prompt: int, num_output: int) -> None:
        self.timed = Timed(num_prompt, num_output, time.perf_counter())
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            for line in lines:
                if line.startswith(b"data: {"):
                    self.timed.times += [now] * _num_tokens(line)
                elif line.startswith(b"data: [DONE]") and not self.over.done():
                    self.over.set_result(None)
                elif line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                    raise RuntimeError(f"the server says {data.decode(errors='replace')}")
        except (RuntimeError, ValueError) as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or RuntimeError("the server closed the connection in the middle of an answer"))

    def _fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)


async def stream(server: Server, prompt: Sequence[int], num_output: int, **more: Any) -> Timed:
    """One request; `more`: further fields of its body.  `times` has an entry for each token, and those that
    came together have the same.

    Raises `RuntimeError` if the answer is not complete, `TimeoutError` if it takes too long."""
    body = json.dumps(
        {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **more,
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    answer = _Answer(len(prompt), num_output)
    connection, _ = await asyncio.get_running_loop().create_connection(
        lambda: answer, server.host, server.port
    )
    try:
        connection.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await asyncio.wait_for(answer.over, _ANSWER_S)
    finally:
        connection.close()
    timed = answer.timed
    if len(timed.times) != num_output:
        raise RuntimeError(f"{len(timed.times)} tokens came instead of {num_output}")
    return timed


def _num_tokens(line: bytes) -> int:
    start = line.find(_TOKENS)
    if start < 0:
        if b'"error"' in line:
            raise RuntimeError(f"the server says {line.decode().strip()}")
        return 0
    start += len(_TOKENS)
    ids = line[start : line.index(b"]", start)]
    return ids.count(b",") + 1 if ids else 0
