"""The client against servers that do well, badly, and strangely: raw bytes, so that framing is tested too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.bench.client import Endpoint, Outcome, send
from baton.bench.serve import run
from baton.bench.workload import Request

Handler = Callable[[dict, asyncio.StreamWriter], "asyncio.Future | object"]
REQUEST = Request([11, 12, 13], 3)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def event(text: str) -> bytes:
    return b'data: {"id":"x","choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % text.encode()


def usage(tokens: int, prompt: int = 3) -> bytes:
    return b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (prompt, tokens)


DONE = b"data: [DONE]\n\n"


def chunked(body: bytes, size: int) -> bytes:
    """HTTP chunks of `size` bytes, wherever they cut."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@asynccontextmanager
async def server(
    answer: bytes, seen: list[tuple[str, dict]] | None = None, pause: float = 0.0
) -> AsyncIterator[str]:
    """Answers every request with these bytes after a pause, and closes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        if seen is not None:
            seen.append((head, body))
        await asyncio.sleep(pause)
        writer.write(answer)
        await writer.drain()
        writer.close()

    running = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"


async def ask(answer: bytes, seen: list[tuple[str, dict]] | None = None, suffix: str = "") -> Outcome:
    async with server(answer, seen) as url:
        return await send(Endpoint(url + suffix, "m", api_key="secret"), REQUEST)


async def test_a_stream_whatever_the_framing() -> None:
    body = b": comment\n\n" + event("a") + event("b") + event("c") + usage(3) + DONE
    for size in (1, 7, 10_000):
        outcome = await ask(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(body, size))
        assert outcome.error == ""
        assert (len(outcome.times), outcome.output_tokens, outcome.input_tokens) == (3, 3, 3)
        assert len(outcome.itls) == 2
        assert 0 < outcome.ttft <= outcome.e2el
    plain = await ask(HEAD + b"\r\n" + body.replace(b"\n", b"\r\n"))
    assert (plain.error, plain.output_tokens) == ("", 3)


async def test_what_is_sent() -> None:
    seen: list[tuple[str, dict]] = []
    await ask(HEAD + b"\r\n" + event("a") + usage(1) + DONE, seen, suffix="/v1/")
    head, body = seen[0]
    assert head.startswith("post /v1/completions http/1.1")
    assert "authorization: bearer secret" in head
    assert body["prompt"] == [11, 12, 13]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (3, True, True)


async def test_events_are_counted_where_no_usage_comes() -> None:
    outcome = await ask(HEAD + b"\r\n" + event("a") + event("b") + DONE)
    assert (outcome.error, outcome.output_tokens, outcome.counted_events) == ("", 2, True)


async def test_failures_are_errors_that_say_why() -> None:
    cut = await ask(HEAD + b"\r\n" + event("a"))
    refused = await ask(b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull")
    inside = await ask(HEAD + b"\r\n" + event("a") + b'data: {"error":{"message":"lost"}}\n\n' + DONE)
    nothing = await ask(HEAD + b"\r\n" + DONE)
    not_http = await ask(b"SSH-2.0 hello\r\n\r\n")
    strange = await ask(HEAD + b"\r\n" + b"data: hello\n\n")
    assert "[DONE]" in cut.error or "connection lost" in cut.error
    assert refused.error == "HTTP 429: full"
    assert "lost" in inside.error
    assert nothing.error == "an answer without tokens"
    assert "not HTTP" in not_http.error
    assert "no completion" in strange.error
    closed = await send(Endpoint("http://127.0.0.1:1", "m"), REQUEST)
    assert "no connection" in closed.error


async def test_a_silent_server_has_a_limit() -> None:
    async with server(b"", pause=5.0) as url:
        outcome = await send(Endpoint(url, "m", timeout_s=0.1), REQUEST)
    assert "within 0.1 s" in outcome.error


async def test_concurrency_and_arrivals() -> None:
    answer = HEAD + b"\r\n" + event("a") + usage(1) + DONE
    async with server(answer, pause=0.02) as url:
        endpoint = Endpoint(url, "m")
        outcomes, duration = await run(endpoint, [REQUEST] * 6, [0.0] * 6, max_concurrency=2)
        starts = sorted(outcome.start for outcome in outcomes)
        assert all(outcome.succeeded for outcome in outcomes)
        assert starts[2] - starts[0] >= 0.02  # the third waits for one of the first two
        assert duration >= 0.06
        outcomes, duration = await run(endpoint, [REQUEST] * 3, [0.0, 0.05, 0.1])
        first, _, last = (outcome.start for outcome in outcomes)
        assert last - first >= 0.09
