"""What is no attack, to judge the others by: work that a server does for anybody, and a shared machine.

Their rows say what the same cores do to the streams when nothing is wrong.
"""

from __future__ import annotations

import json
import selectors
import socket
import time

from _attacks import Attack


def _busy(host: str, port: int, seconds: float) -> None:
    """A process that computes and asks the server for nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def _ordinary(clients: int, prompt_tokens: int) -> Attack:
    """As many clients at once, each with one prompt after the other: what an attack asks for in a request."""
    body = json.dumps({"prompt": [17] * prompt_tokens, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    data = head + b"content-length: %d\r\n\r\n" % len(body) + body

    def attack(host: str, port: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for _ in range(clients):
                connection = socket.create_connection((host, port), timeout=5.0)
                connection.sendall(data)
                selector.register(connection, selectors.EVENT_READ)
            while time.monotonic() < end and selector.get_map():
                for key, _ in selector.select(0.1):
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    answer = connection.recv(65536)  # (an answer is short: it comes in one piece)
                    if answer:
                        connection.sendall(data)
                    else:
                        selector.unregister(connection)

    return attack


ATTACKS: dict[str, Attack] = {
    "control: a busy process": _busy,
    "control: 128 x 500 tokens": _ordinary(128, 500),
    "control: 16 x 20 tokens": _ordinary(16, 20),
}
