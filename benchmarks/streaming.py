"""What streaming costs the gateway: CPU time of its process for each token and for each request.

    python benchmarks/streaming.py [--streams 64] [--step-ms 20] [--rounds 3] [--out streaming.json]

Starts `baton serve` with the simulated executor, which gives every running sequence one token a step, and
keeps `--streams` streamed requests running over persistent connections.  The client reads bytes and looks for
the end mark only.  A round has answers of two lengths, as many requests of each: the longer ones cost more by
so many tokens, and what then remains of the shorter ones is the cost of a request,

    token = (cpu_long - cpu_short) / (tokens_long - tokens_short)
    request = (cpu_short - token * tokens_short) / requests

where cpu is that of all threads of the gateway, ZeroMQ's included, by the kernel's count.

Limit: a server of a few lines on the same event loop (uvloop) that writes the same chunk to as many
connections at the same pace, without having anything to do for it: no request is parsed, no token becomes
text.  What lies between is Baton's.  Rounds alternate, and medians are printed.

Read absolute numbers with care: a core that sleeps between the steps loses its caches and runs at a lower
clock, so the same work takes up to 1.7 times as long as on a busy one (`--step-ms 5` keeps it busier).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import uvloop

from _clients import serving
from _common import Table, machine, print_machine, write_json
from idle import cpu_seconds

_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_ROUND_S = 120.0
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


class _Stream(asyncio.Protocol):
    """Sends the same request again and again over one connection, and counts events."""

    def __init__(self, request: bytes, count: int) -> None:
        self.events = self.size = 0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._left = count
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200 "):
            self.over.set_exception(RuntimeError(f"the server says {data.decode(errors='replace')}"))
            return
        self.events += data.count(b"data: ")
        self.size += len(data)
        self._tail = (self._tail + data)[-len(_END) :]
        if self._tail == _END:
            self._tail = b""
            self._left -= 1
            if self._left:
                self._transport.write(self._request)
            else:
                self.over.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(error or RuntimeError("the server closed a connection"))


async def _load(host: str, port: int, request: bytes, streams: int, count: int) -> tuple[int, int]:
    """`streams` connections with `count` requests each, one after the other.  Returns (events, bytes)."""
    loop = asyncio.get_running_loop()
    connections = [
        await loop.create_connection(lambda: _Stream(request, count), host, port) for _ in range(streams)
    ]
    async with asyncio.timeout(_ROUND_S):
        await asyncio.gather(*(stream.over for _, stream in connections))
    for transport, _ in connections:
        transport.close()
    return sum(stream.events for _, stream in connections), sum(stream.size for _, stream in connections)


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data


def _completion(model: str, tokens: int) -> bytes:
    return _request("/v1/completions", {"prompt": "Once upon a time", **_sampling(model, tokens)})


def _chat(model: str, tokens: int) -> bytes:
    messages = [{"role": "user", "content": "Once upon a time"}]
    return _request("/v1/chat/completions", {"messages": messages, **_sampling(model, tokens)})


def _sampling(model: str, tokens: int) -> dict[str, Any]:
    return {"model": model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}


# -- the limit


class _BareConnection(asyncio.Protocol):
    """Answers whatever arrives with so many events as stand in it, one a tick."""

    running: set[_BareConnection] = set()  # noqa: RUF012 (one server a process)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._left = int(data)
        self._transport.write(_HEAD)
        self.running.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.running.discard(self)

    def tick(self, chunk: bytes) -> None:
        self._left -= 1
        if self._left:
            self._transport.write(chunk)
        else:
            self._transport.write(chunk[:-2] + _END)
            self.running.discard(self)


async def _bare_server(step_s: float, chunk: bytes) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_BareConnection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    at = loop.time()
    while True:
        at = max(at + step_s, loop.time())
        await asyncio.sleep(at - loop.time())
        for connection in list(_BareConnection.running):
            connection.tick(chunk)


@contextmanager
def _bare(step_s: float, size: int) -> Iterator[tuple[int, int]]:
    """A process with the bare server, whose events have `size` bytes.  Its process id and port."""
    command = [sys.executable, __file__, "--bare", str(size), "--step-ms", str(step_s * 1e3)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _chunk(size: int) -> bytes:
    body = b"data: " + b"x" * (size - 8) + b"\n\n"
    return b"%x\r\n" % len(body) + body + b"\r\n"


# -- measuring


def _round(
    pid: int, address: tuple[str, int], make: Callable[[int], bytes], options: argparse.Namespace
) -> dict[str, float]:
    """Answers of both lengths; microseconds for each token and each request."""
    streams, count = options.streams, options.requests
    spent: list[float] = []
    for tokens in (options.short, options.long):
        before, began = cpu_seconds(pid), time.monotonic()
        events, size = uvloop.run(_load(*address, make(tokens), streams, count))
        spent.append(cpu_seconds(pid) - before)
        took = time.monotonic() - began
    requests = streams * count
    token = (spent[1] - spent[0]) / (requests * (options.long - options.short))
    return {
        "us_per_token": token * 1e6,
        "us_per_request": (spent[0] / requests - token * options.short) * 1e6,
        "tokens_per_event": requests * options.long / events,
        "bytes_per_event": size / events,
        "tokens_per_s": requests * options.long / took,
    }


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Rounds of each kind, alternating."""
    found: dict[str, list[dict[str, float]]] = {"completions": [], "chat": [], "limit": []}
    step_s = options.step_ms / 1e3
    flags = [] if options.real else ["--executor", "simulated", "--simulated-cost", str(step_s)]
    with serving(*flags, "--max-num-seqs", str(options.streams)) as server:
        pid, address = server.process.pid, (server.host, server.port)
        warm = _completion(server.model, 8), _chat(server.model, 8)
        for request in warm:
            uvloop.run(_load(*address, request, options.streams, 2))
        for number in range(options.rounds):
            for name, make in (("completions", _completion), ("chat", _chat)):
                found[name].append(
                    _round(pid, address, lambda tokens, make=make: make(server.model, tokens), options)
                )
            if not number:
                size = round(found["completions"][0]["bytes_per_event"])
            with _bare(step_s, size) as (bare_pid, port):
                found["limit"].append(_round(bare_pid, ("127.0.0.1", port), lambda n: b"%d" % n, options))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the simulated model")
    parser.add_argument("--requests", type=int, default=2, help="one after the other, for each stream")
    parser.add_argument("--short", type=int, default=8, help="tokens of a short answer")
    parser.add_argument("--long", type=int, default=136, help="tokens of a long answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="the embedded model computes, as fast as it can")
    parser.add_argument("--out")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare is not None:
        uvloop.run(_bare_server(options.step_ms / 1e3, _chunk(options.bare)))
        return
    facts = machine()
    print_machine(facts)
    found = measure(options)
    pace = "the embedded model" if options.real else f"a step each {options.step_ms:g} ms"
    title = f"CPU of the gateway, {options.streams} streams, {pace}"
    columns = ("", "us a token", "us a request", "tokens an event", "bytes an event", "tokens/s")
    table = Table(title, columns)
    rows: dict[str, dict[str, float]] = {}
    for name, rounds in found.items():
        row = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        row["min_us_per_token"] = min(one["us_per_token"] for one in rounds)
        row["max_us_per_token"] = max(one["us_per_token"] for one in rounds)
        rows[name] = row
        table.row(
            name,
            f"{row['us_per_token']:.1f} ({row['min_us_per_token']:.1f} to {row['max_us_per_token']:.1f})",
            f"{row['us_per_request']:.0f}",
            f"{row['tokens_per_event']:.2f}",
            f"{row['bytes_per_event']:.0f}",
            f"{row['tokens_per_s']:,.0f}",
        )
    table.print()
    print("limit: a bare server on the same event loop that writes the same bytes")
    write_json(options.out, {"benchmark": "streaming", "machine": facts, "medians": rows, "rounds": found})


if __name__ == "__main__":
    main()
