"""The HTTP side of `baton serve` with its limits, in a thread, in front of an `EchoEngine`."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from baton.gateway.access import Access
from baton.gateway.instances.client import ClusterClient
from baton.gateway.served_model import ServedModel
from baton.gateway.sharing import SharingOptions
from baton.launch.http.http_server import HttpServer, make_http
from baton.launch.http.listening import listen, listen_unix
from baton.launch.options import HttpOptions
from tests.gateway.echo_engine import EchoEngine

DEADLINE_S = 60.0


class Site:
    """Use as a context manager."""

    def __init__(
        self,
        tokenizer: Path,
        *,
        access: Access | None = None,
        limits: HttpOptions | None = None,
        descriptors: int = 1000,
        shutdown_timeout_s: float = 1.0,
        vocab: int = 300,
        uds: str | None = None,
        **http: Any,
    ) -> None:
        """`http`: more arguments of `make_http`."""
        self._uds, self._http = uds, http
        self.engine = EchoEngine(vocab=vocab)
        self._served = ServedModel(
            names=("tiny",), tokenizer=tokenizer, max_model_len=4096, eos_token_ids=(), vocab_size=vocab
        )
        self._access = access or Access()
        self._limits = limits or HttpOptions()
        self._descriptors = descriptors
        self._shutdown_timeout_s = shutdown_timeout_s
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="site", daemon=True)
        self._thread.start()
        if not self._started.wait(DEADLINE_S):
            raise TimeoutError(f"not listening after {DEADLINE_S:g} s; it is here:\n{self._where()}")
        if self._error is not None:
            raise RuntimeError("the site did not start") from self._error

    def _where(self) -> str:
        """What its thread and its tasks do."""
        assert self._thread.ident is not None
        lines = traceback.format_stack(sys._current_frames().get(self._thread.ident))
        if hasattr(self, "_loop"):
            for task in asyncio.all_tasks(self._loop):
                lines += [f"{task!r}\n", *(f"  {frame!r}\n" for frame in task.get_stack())]
        return "".join(lines) + f"hellos that the engine has heard: {self.engine.hellos}"

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join()

    def call(self, function: Callable[[], Any]) -> Any:
        """Calls it on the event loop."""

        async def there() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(there(), self._loop).result(DEADLINE_S)

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)

    def join(self) -> None:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self.engine.die()

    def connect(self, data: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
        """Where times are short, the server sees the connection together with `data`, however slow we are."""
        if self._limits.timeout_head < 1.0:
            return self.call(lambda: self._connect(data, receive_buffer))
        return self._connect(data, receive_buffer)

    def _connect(self, data: bytes, receive_buffer: int | None) -> socket.socket:
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(DEADLINE_S)
        connection.connect(("127.0.0.1", self.port))
        if data:
            connection.sendall(data)
        return connection

    def ask(self, data: bytes) -> bytes:
        """All that the server says to this until it closes the connection."""
        with self.connect(data) as connection:
            return read_all(connection)

    def health(self) -> int:
        return status(self.ask(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))

    def complete(self, **fields: bytes) -> bytes:
        return self.ask(completion(b'{"prompt": [5, 6], "max_tokens": 3}', close=True))

    def metric(self, name: str, **labels: str) -> float:
        text = self.ask(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").decode()
        inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"baton:{name}{{{inside}}}" if labels else f"baton:{name}"
        found = [line.split()[-1] for line in text.splitlines() if line.split(" ")[0] == wanted]
        return float(found[0]) if found else 0.0

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self.client = ClusterClient(on_fatal=lambda reason: None)
        instance = self.client.add("instance-0")
        self.http: HttpServer = make_http(
            self._served,
            self.client,
            self._stopping,
            access=self._access,
            limits=self._limits,
            descriptors=self._descriptors,
            sharing=SharingOptions(),
            shutdown_timeout_s=self._shutdown_timeout_s,
            started_with={},
            **self._http,
        )
        await instance.attach(self.engine.endpoint, self.engine.incarnation)
        if self._uds is None:
            self.listener = listen("127.0.0.1", 0)
            self.port = self.listener.getsockname()[1]
        else:
            self.listener = listen_unix(self._uds)
        self._started.set()
        ending = asyncio.create_task(self._end_requests())
        await self.http.serve(sockets=[self.listener])
        ending.cancel()
        await self.client.close()
        self.http.close()

    async def _end_requests(self) -> None:
        await self._stopping.wait()
        await asyncio.sleep(self._shutdown_timeout_s)
        await self.client.close()


def completion(body: bytes, *, close: bool = False, version: bytes = b"1.1", extra: bytes = b"") -> bytes:
    head = b"POST /v1/completions HTTP/%b\r\nhost: localhost\r\ncontent-type: application/json\r\n" % version
    if close:
        extra += b"connection: close\r\n"
    return head + extra + b"content-length: %d\r\n\r\n" % len(body) + body


def read_all(connection: socket.socket) -> bytes:
    """Until the end, or the reset, of the connection."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    return data


def read_answer(connection: socket.socket) -> bytes:
    """One answer with a content-length, in however many segments it comes."""
    data = b""
    while True:
        head, end, body = data.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            return data
        piece = connection.recv(1 << 16)
        if not piece:
            return data
        data += piece


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0
