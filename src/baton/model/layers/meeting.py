"""How ranks on several hosts find each other: a store of `torch.distributed` behind one socket.

Theory.  Ranks that make a process group tell each other, once, where they listen: each writes a key and waits
for those of the others.  On one host a file is enough.  Between hosts PyTorch has a server of its own, on a
port that is open to everybody, who could then tell a rank to connect elsewhere.  So a rank has a socket to
the process that looks after the ranks of its host (the link, or the relay), and what it says takes the way of
the command log: encrypted, between members of the cluster alone.

Packets: `s KEY \\0 VALUE` says a value; `w KEY` is answered with the value of the key as soon as it is known.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Store: Any = dist.Store  # type: ignore[attr-defined,unused-ignore]


class MeetingStore(Store):  # type: ignore[misc]
    """One rank's end.  A key is written once.  Raises `TimeoutError` for a rank that does not come, and
    `ConnectionError` when the process at the other end is gone."""

    def __init__(self, descriptor: int, timeout_s: float) -> None:
        super().__init__()
        self._socket = socket.socket(fileno=descriptor)
        self._timeout_s = timeout_s
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._socket.settimeout(self._timeout_s)
        self._socket.send(b"s" + key.encode() + b"\0" + data)

    def get(self, key: str) -> bytes:
        return self._wait_for(key, self._timeout_s)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._wait_for(key, self._timeout_s if timeout is None else timeout.total_seconds())

    def _wait_for(self, key: str, timeout_s: float) -> bytes:
        if key not in self._known:
            self._socket.settimeout(timeout_s)
            try:
                self._socket.send(b"w" + key.encode())
                value = self._socket.recv(1 << 16)
            except TimeoutError:
                raise TimeoutError(f"the other ranks did not say {key!r} within {timeout_s:.0f} s") from None
            if not value:
                raise ConnectionError("the process that looks after the ranks of this host is gone")
            self._known[key] = value
        return self._known[key]
