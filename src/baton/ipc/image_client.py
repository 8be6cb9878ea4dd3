"""A worker's side of the keeper of weight images (`protocol/messages/images.py`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from baton.protocol.messages.images import MOST_BYTES, Ask, Doing, Fill, Filled, Map

_MOMENT_S = 1.0


class KeeperGone(RuntimeError):
    """The keeper is not there, or said something else than it should."""


class ImageClient:
    """Asks for one image, and holds it until `close`."""

    def __init__(self, path: str) -> None:
        """Raises `KeeperGone`."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise KeeperGone(f"the keeper of weight images does not answer: {error.strerror}") from None

    def ask(
        self, key: str, place: str, timeout_s: float, on_wait: Callable[[], None] = lambda: None
    ) -> tuple[bool, int]:
        """Waits until the image is there, or is to be filled by this process; `on_wait` is called if that
        takes more than a moment.

        Returns whether it is to be filled, and the descriptor of the memory, which is the caller's.  Raises
        `TimeoutError`, or `KeeperGone`.
        """
        self._socket.settimeout(min(timeout_s, _MOMENT_S))
        fds: list[int] = []
        try:
            self._socket.send(msgspec.json.encode(Ask(key, place)))
            try:
                message, fds = self._receive()
            except TimeoutError:
                if timeout_s <= _MOMENT_S:
                    raise
                on_wait()
                self._socket.settimeout(timeout_s - _MOMENT_S)
                message, fds = self._receive()
            if len(fds) != 1:
                raise KeeperGone("the keeper of weight images left")
            answer = msgspec.json.decode(message, type=Fill | Map)
        except TimeoutError:
            raise
        except (OSError, msgspec.MsgspecError, KeeperGone) as error:
            for fd in fds:
                os.close(fd)
            raise KeeperGone(str(error)) from None
        return isinstance(answer, Fill), fds[0]

    def _receive(self) -> tuple[bytes, list[int]]:
        message, fds, _, _ = socket.recv_fds(self._socket, MOST_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        return message, fds

    def filled(self, fd: int | None) -> None:
        """The memory that was to be filled is sealed; or the image is this file.  A keeper that has gone
        needs not know."""
        with suppress(OSError):
            message = msgspec.json.encode(Filled())
            if fd is None:
                self._socket.send(message)
            else:
                socket.send_fds(self._socket, [message], [fd])

    def doing(self, instance: str, what: str) -> None:
        """The worker of `instance` that fills the image is so far."""
        with suppress(OSError):
            self._socket.send(msgspec.json.encode(Doing(instance, what)))

    def close(self) -> None:
        """The image is not used here any more."""
        self._socket.close()
