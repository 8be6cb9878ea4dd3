"""The application on an event loop whose clock jumps: minutes of silence take milliseconds."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from baton.gateway.access import Access
from baton.gateway.http.alive import SignsOfLife
from baton.gateway.http.app import create_app
from baton.gateway.instances.client import ClusterClient
from baton.gateway.served_model import ServedModel
from baton.protocol.codec import pack_int32, pack_int64
from baton.protocol.messages.requests import Finished, FromEngine, Outputs, Submit
from tests.gateway.fake_cluster import welcome

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Waits for nothing: where it would sleep, its clock goes on instead.  Only for what needs no threads and
    no other process."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("everything waits, and nothing will come")
        self._loop.now += max(0.0, timeout)
        return super().select(0)


def run(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class Answer:
    """What a client gets, and when (seconds after it asked)."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    began: float | None = None
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float | None = None

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """The data of its events, and when they came; comments and end marks are none."""
        found = []
        for at, data in self.pieces:
            lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
            found += [(at, json.loads(line[6:])) for line in lines]
        return found


class Gateway:
    """An application with one instance, of which a test says what it says and when."""

    def __init__(self, tokenizer: Path, signs: SignsOfLife, **served: Any) -> None:
        """Within a running loop."""
        self.client = _Client()
        model = ServedModel(
            **{
                "names": ("tiny",),
                "tokenizer": tokenizer,
                "max_model_len": 4096,
                "eos_token_ids": (2,),
                "vocab_size": 512,
                **served,
            }
        )
        self.app = create_app(model, self.client, access=Access(), signs=signs)
        gateway = self.app.state.gateway

        async def answer(job: Any, *pieces: bytes) -> bytes:
            return gateway._reader.answer(job, b"".join(pieces))

        gateway.helpers.answer = answer  # (a helper is another process)
        cluster = self.client.cluster
        cluster.add("a", "mixed")
        cluster.attach("a", "a.1", asyncio.get_running_loop().time())
        self.say(welcome("a.1"))

    def say(self, message: FromEngine) -> None:
        """The instance says this."""
        self.client.cluster.receive("a", message, asyncio.get_running_loop().time())
        self.client.settle()

    @property
    def submit(self) -> Submit:
        """The last request that came to the instance."""
        return self.client.submits[-1]

    def tokens(self, *tokens: int, end: bool = True) -> None:
        """It computes these of the last request, which ends with them."""
        number = self.submit.id
        finished = [Finished(number, "length")] if end else []
        self.say(Outputs(pack_int64([number] * len(tokens)), pack_int32(tokens), finished=finished))

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        meanwhile: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The whole answer.  `meanwhile`: what the instance does once it was asked."""
        loop = asyncio.get_running_loop()
        asked, answer, over = loop.time(), Answer(), asyncio.Event()
        content = b"" if body is None else json.dumps(body).encode()
        messages = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            at = loop.time() - asked
            if message["type"] == "http.response.start":
                answer.status, answer.began = message["status"], at
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            if message.get("body"):
                answer.pieces.append((at, message["body"]))
            if not message.get("more_body"):
                answer.ended = at

        given = {"host": "127.0.0.1", "content-type": "application/json", **(headers or {})}
        if body is None:
            del given["content-type"]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "scheme": "http",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 40_000),
            "server": ("127.0.0.1", 8000),
        }
        answering = asyncio.create_task(self.app(scope, receive, send))
        before = len(self.client.submits)
        if meanwhile is not None:
            while len(self.client.submits) == before:
                await asyncio.sleep(0.001)
            await meanwhile()
        await answering
        over.set()
        return answer


class _Client(ClusterClient):
    """Keeps what it would send."""

    def __init__(self) -> None:
        super().__init__()
        self.submits: list[Submit] = []

    def _send(self) -> None:
        for _, message in self.cluster.take_outgoing():
            if isinstance(message, Submit):
                self.submits.append(message)
