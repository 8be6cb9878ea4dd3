"""What is no attack, to judge the others by: work that a server does for anybody, and a shared machine.

Their rows say what the same cores do to the streams when nothing is wrong: ordinary requests for the same
work, the same bytes sent to a process that reads them and does nothing, and a process that computes as a
helper does, with the bytes of nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import time
from typing import Any

from _attacks import Attack
from baton.ipc.processes.process import die_with_parent

_DROPPED = 4 << 20
"""Bytes: of a long body."""
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)


def _busy(host: str, port: int, seconds: float) -> None:
    """A process that computes and asks the server for nothing."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


def _drop(listener: socket.socket) -> None:
    """Reads what comes, from one connection after the other, and answers when it has had `_DROPPED` bytes."""
    memory = bytearray(1 << 18)
    while True:
        connection, _ = listener.accept()
        with connection:
            size = 0
            while size < _DROPPED and (count := connection.recv_into(memory)):
                size += count
            if size >= _DROPPED:
                connection.sendall(b"done")


def _dropped(host: str, port: int, seconds: float) -> None:
    """Sends 4 MiB over and over to a process that drops them; the server hears nothing."""
    data, end = b"17," * (_DROPPED // 3 + 1), time.monotonic() + seconds
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent = os.getpid()
        if not os.fork():
            with contextlib.suppress(OSError):
                die_with_parent(parent)
                _drop(listener)
            os._exit(0)
        while time.monotonic() < end:
            with socket.create_connection(listener.getsockname()) as connection:
                connection.sendall(data[:_DROPPED])
                connection.recv(4)


class _Client:
    """One request after the other over one connection."""

    def __init__(self, host: str, port: int, request: bytes) -> None:
        self.connection = socket.create_connection((host, port), timeout=5.0)
        self._request = request
        self._begin()

    def _begin(self) -> None:
        self.connection.sendall(self._request)
        self._head = b""
        self._left: int | None = None
        """Bytes of the answer to come; None: not known yet, -1: it ends with an empty chunk."""

    def receive(self) -> bool:
        """What there is of an answer.  False: the server has closed the connection."""
        data = self.connection.recv(1 << 18)
        if not data:
            return False
        if self._left is None:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return True
            length = _LENGTH.search(head)
            self._left = int(length[1]) if length else -1
        if self._left >= 0:
            self._left -= len(data)
        if self._left == 0 or (self._left < 0 and data.endswith(b"0\r\n\r\n")):
            self._begin()
        return True


def _ordinary(clients: int, body: dict[str, Any], path: str = "completions") -> Attack:
    """As many clients at once, each with one request after the other: what an attack asks for in one."""
    content = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n".encode()
    request = head + b"content-length: %d\r\n\r\n" % len(content) + content

    def attack(host: str, port: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for _ in range(clients):
                client = _Client(host, port, request)
                selector.register(client.connection, selectors.EVENT_READ, client)
            while time.monotonic() < end and selector.get_map():
                for key, _ in selector.select(0.1):
                    if not key.data.receive():
                        selector.unregister(key.fileobj)

    return attack


_LONG, _WORDS = [17] * 500, "a b c " * 50
_ANSWER = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True}


def _busy_helper(host: str, port: int, seconds: float) -> None:
    """Gives way as helpers do."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _busy(host, port, seconds)


ATTACKS: dict[str, Attack] = {
    "control: a busy process": _busy,
    "control: a busy process of a helper's priority": _busy_helper,
    "control: 4 MiB bodies, dropped": _dropped,
    "control: 128 x 500 tokens": _ordinary(128, {"prompt": _LONG, "max_tokens": 1}),
    "control: 128 x 20 tokens": _ordinary(128, {"prompt": [17] * 20, "max_tokens": 1}),
    "control: 128 x one text": _ordinary(128, {"prompt": _WORDS, "max_tokens": 1}),
    "control: 16 x 20 tokens": _ordinary(16, {"prompt": [17] * 20, "max_tokens": 1}),
    "control: 16 x log-probabilities of a prompt": _ordinary(
        16, {"prompt": _LONG, "max_tokens": 1, "echo": True, "logprobs": 5}
    ),
    "control: 16 x log-probabilities": _ordinary(16, {**_ANSWER, "logprobs": 5}),
    "control: 16 x streams": _ordinary(16, {**_ANSWER, "temperature": 0, "stream": True}),
    "control: 2 x short chats": _ordinary(
        2, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}, "chat/completions"
    ),
    "control: 50 x streams with log-probabilities": _ordinary(50, {**_ANSWER, "stream": True, "logprobs": 5}),
}
