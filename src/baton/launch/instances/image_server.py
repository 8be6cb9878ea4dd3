"""The memory and the socket of the keeper of weight images: in a thread, so that imports delay no worker.

A memfd has no name and goes with the last process that has it: whichever processes are killed, nothing of an
image stays behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import socket
import threading
from collections.abc import Iterator

import msgspec

from baton.launch.instances.image_keeper import Drop, Effect, Keeper
from baton.launch.instances.runtime_dir import RuntimeDirectory
from baton.protocol.messages.images import MOST_BYTES, Ask, Doing, Fill, FromWorker, Map

log = logging.getLogger(__name__)

_MOST_WORKERS = 4096
_SEALED = 8
"""F_SEAL_WRITE, which only Linux has."""


class ImageServer:
    """Serves until `close`."""

    def __init__(self) -> None:
        """Raises `OSError` where there is no room for a socket, or no memfd."""
        os.close(os.memfd_create("probe", os.MFD_CLOEXEC))
        self._directory = RuntimeDirectory()
        self.path = str(self._directory.path / "images.sock")
        """Of the socket."""
        self._keeper = Keeper()
        self._memory: dict[str, int] = {}
        self._workers: dict[int, socket.socket] = {}
        self._doing: dict[int, Doing] = {}
        self._next = 0
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._listener.bind(self.path)
        self._listener.listen(_MOST_WORKERS)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._selector.register(self._listener, selectors.EVENT_READ, -1)
        self._selector.register(self._wake, selectors.EVENT_READ, -2)
        self._thread = threading.Thread(target=self._run, name="weight images", daemon=True)
        self._thread.start()

    def doing(self, instance: str) -> str:
        """What a worker of `instance` that fills an image last said of that; "" if there is none."""
        return next((said.what for said in tuple(self._doing.values()) if said.instance == instance), "")

    def close(self) -> None:
        """Lets go of all images: they live on in processes that have mapped them."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for worker in self._workers.values():
            worker.close()
        for fd in (*self._memory.values(), self._wake):
            os.close(fd)
        self._selector.close()
        self._listener.close()
        self._directory.remove()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("weight images are not shared any more: each worker makes its own copy")
            # Nobody waits for an answer that does not come: those who asked hear that the keeper left.
            self._listener.close()
            for worker in self._workers.values():
                worker.close()

    def _serve(self) -> None:
        while True:
            for ready, _ in self._selector.select():
                if ready.data == -2:
                    return
                if ready.data == -1:
                    self._accept()
                elif ready.data in self._workers:
                    self._hear(ready.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.settimeout(1.0)  # (messages are short and few: it never comes to that)
            number, self._next = self._next, self._next + 1
            self._workers[number] = connection
            self._selector.register(connection, selectors.EVENT_READ, number)

    def _hear(self, number: int) -> None:
        fds: list[int] = []
        try:
            message, fds, _, _ = socket.recv_fds(
                self._workers[number], MOST_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
            if not message:
                self._leave(number)
                return
            said = msgspec.json.decode(message, type=FromWorker)
            if isinstance(said, Doing):
                self._doing[number] = said
                return
            if isinstance(said, Ask):
                effects = self._keeper.ask(number, said.key, said.place)
            else:
                self._take(self._keeper.asked(number), fds)
                effects = self._keeper.filled(number)
                self._doing.pop(number, None)
            self._do(effects)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("a worker is not heard about weight images any more: %s", error)
            self._leave(number)
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, key: str, fds: list[int]) -> None:
        """The image has been filled: it is the memory that was given, or the file that came with the
        message.  Raises `ValueError` if that is not sealed."""
        if fds and key in self._memory:
            os.close(self._memory[key])
            self._memory[key] = os.dup(fds[0])
        elif key not in self._memory or not fcntl.fcntl(self._memory[key], fcntl.F_GET_SEALS) & _SEALED:
            raise ValueError("what it filled is not sealed")

    def _leave(self, number: int) -> None:
        connection = self._workers.pop(number)
        self._doing.pop(number, None)
        self._selector.unregister(connection)
        connection.close()
        self._do(self._keeper.gone(number))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Drop):
                os.close(self._memory.pop(effect.key))
                continue
            if effect.fill:
                self._memory[effect.key] = os.memfd_create(
                    "baton-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
                )
            message = msgspec.json.encode(Fill() if effect.fill else Map())
            with contextlib.suppress(OSError):  # it has gone: that is read next
                socket.send_fds(self._workers[effect.worker], [message], [self._memory[effect.key]])


_shared: ImageServer | None = None
_users = 0
_lock = threading.Lock()


def loading(instance: str) -> str:
    """How far a worker of `instance` is with filling an image; "" if that is not known."""
    with _lock:
        return _shared.doing(instance) if _shared is not None else ""


@contextlib.contextmanager
def image_server() -> Iterator[str]:
    """The path of this process's server of weight images, of which there is one as long as anybody is
    inside; "" where there can be none (no memfd)."""
    global _shared, _users
    with _lock:
        _users += 1
        if _shared is None:
            try:
                _shared = ImageServer()
            except (OSError, AttributeError) as error:
                log.warning("each worker has its own copy of the weights: %s", error)
        path = "" if _shared is None else _shared.path
    try:
        yield path
    finally:
        with _lock:
            _users -= 1
            if not _users and _shared is not None:
                _shared.close()
                _shared = None
