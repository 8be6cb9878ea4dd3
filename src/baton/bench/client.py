"""A client of a streaming `/v1/completions` that costs little, so that the cores are left to the server.

One request is one connection, read by a protocol object: httptools takes HTTP apart (chunked or not),
msgspec the JSON of an event, and of an event only what is measured is kept.  All that comes with one read of
the socket has one time.  Works with every OpenAI-compatible server; the number of output tokens is what the
server says in `usage` (asked for with `stream_options`), or the number of events where it says nothing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools
import msgspec

from baton.bench.workload import Request

DATA = b"data:"
DONE = b"[DONE]"


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """One line of the stream; what a choice says is not looked at."""

    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Outcome:
    """What one request came to.  Times are seconds on `time.perf_counter`."""

    request: Request
    start: float = 0.0
    """When the connection was asked for."""
    times: list[float] = field(default_factory=list)
    """Of each event that brought tokens."""
    output_tokens: int = 0
    counted_events: bool = False
    """The server did not say how many tokens there were."""
    input_tokens: int | None = None
    """As the server counts them, if it says."""
    error: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first event with tokens."""
        return self.times[0] - self.start

    @property
    def e2el(self) -> float:
        """End-to-end latency: from sending to the last event with tokens."""
        return self.times[-1] - self.start

    @property
    def tpot(self) -> float:
        """Time per output token after the first; 0 for a single one."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between events."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


def split_url(base_url: str) -> SplitResult:
    """Raises `ValueError` for an address that is none."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--base-url {base_url}: give http://HOST:PORT")
    return parts


class Endpoint:
    """Where requests go, and what every request says."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        path: str = "/v1/completions",
        extra: dict[str, Any] | None = None,
        timeout_s: float = 6 * 3600.0,
    ) -> None:
        """`extra`: more fields of the request.  Raises `ValueError` for an address that is none."""
        parts = split_url(base_url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.timeout_s = timeout_s
        self._model = model
        self._extra = {"temperature": 0.0, "ignore_eos": True, **(extra or {})}
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        base = parts.path.rstrip("/").removesuffix("/v1")
        self._head = (
            f"POST {base}{path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n{key}"
            "content-type: application/json\r\naccept: text/event-stream\r\nconnection: close\r\n"
        ).encode()

    def encode(self, request: Request) -> bytes:
        """The bytes of one HTTP request."""
        body = msgspec.json.encode(
            {
                "model": self._model,
                "prompt": request.prompt,
                "max_tokens": request.output_len,
                "stream": True,
                "stream_options": {"include_usage": True},
                **self._extra,
            }
        )
        return b"%bcontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)


class _Answer(asyncio.Protocol):
    """Reads one answer into an `Outcome`; `over` is done when the answer is, well or badly."""

    def __init__(self, outcome: Outcome) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcome = outcome
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {error}")
        except httptools.HttpParserUpgrade:
            self._end("the server wants another protocol")

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if self._parser.get_status_code() != 200:
            self._rest += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                self._event(line[len(DATA) :].strip())

    def on_message_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"HTTP {status}: {self._rest[:300].decode(errors='replace')}")
        else:
            self._end("the answer ended without [DONE]")

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"connection lost: {error or 'closed by the server'}")

    def _event(self, data: bytes) -> None:
        if data == DONE:
            self._end("")
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            self._end(f"an event that is no completion: {error}: {data[:200].decode(errors='replace')}")
            return
        outcome = self._outcome
        if event.error:
            self._end(f"error in the stream: {event.error}")
        if event.choices:
            outcome.times.append(self._now)
        if event.usage is not None:
            outcome.output_tokens = event.usage.completion_tokens
            outcome.input_tokens = event.usage.prompt_tokens

    def _end(self, error: str) -> None:
        """The first reason counts."""
        if self.over.done():
            return
        outcome = self._outcome
        if not error and not outcome.times:
            error = "an answer without tokens"
        if not error and not outcome.output_tokens:
            outcome.output_tokens, outcome.counted_events = len(outcome.times), True
        outcome.error = error
        self.over.set_result(None)


async def send(endpoint: Endpoint, request: Request) -> Outcome:
    """One request to its end.  Never raises for what the server does: see `Outcome.error`."""
    data = endpoint.encode(request)
    outcome = Outcome(request, start=time.perf_counter())
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            transport, answer = await asyncio.get_running_loop().create_connection(
                lambda: _Answer(outcome), endpoint.host, endpoint.port, ssl=endpoint.tls
            )
            transport.write(data)
            await answer.over
    except TimeoutError:
        outcome.error = f"no complete answer within {endpoint.timeout_s:g} s"
    except OSError as error:
        outcome.error = f"no connection to {endpoint.host}:{endpoint.port}: {error}"
    finally:
        if transport is not None:
            transport.close()
    return outcome
