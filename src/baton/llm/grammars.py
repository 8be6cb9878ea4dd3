"""Grammars for Python programs: made and tried in a process of their own, within limits of time and memory.

It is the helper that a server has (`gateway/helpers`), asked by whichever thread needs a grammar.  Whatever a
schema does to the library that compiles it, the program goes on: a description that ends the process is
refused, and the next one gets another process.  What a worker compiles has been through this.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock

import msgspec

from baton.gateway.errors import BadRequest, InternalError
from baton.gateway.helpers.link import WALL_S
from baton.gateway.helpers.wire import ANSWER, ENDS, HELLO, JOB, PROMPT
from baton.gateway.reading.constraints.structured import Asked
from baton.gateway.reading.jobs import JOBS
from baton.gateway.reading.reader import decode_grammar
from baton.gateway.reading.settings import Settings

_KEPT = 256


class CheckedGrammars:
    """Of one vocabulary.  From any thread."""

    def __init__(self, special_names: Mapping[str, int], *, wall_s: float = WALL_S) -> None:
        """`wall_s`: the longest wait for one grammar."""
        # (nice=0: its program waits for it, so it has a share of a busy machine.)
        self._settings = Settings(max_model_len=1, special_names=dict(special_names), nice=0)
        self._wall_s = wall_s
        self._kept: OrderedDict[bytes, str | BadRequest] = OrderedDict()
        self._lock = Lock()
        self._process: _Process | None = None

    def of(self, asked: Asked) -> str:
        """The grammar of a description.  Raises `BadRequest`, `InternalError` if no process answers."""
        key = msgspec.msgpack.encode(asked)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = self._checked(asked, key)
                self._kept[key] = found
                if len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(key)
        if isinstance(found, BadRequest):
            raise BadRequest(found.message, param=found.param, code=found.code)
        return found

    def close(self) -> None:
        """Ends the process, if there is one; another call begins another."""
        with self._lock:
            self._end()

    def _checked(self, asked: Asked, body: bytes) -> str | BadRequest:
        for _ in range(2):  # (one that was there may have died without a fault of this description)
            fresh = self._process is None or not self._process.is_ours
            if fresh:
                self._end()
                self._process = _Process(self._settings)
            assert self._process is not None
            try:
                answer, ends = self._process.answer(body, time.monotonic() + self._wall_s)
            except TimeoutError:
                self._end()
                raise InternalError(
                    f"{asked.field}: compiling it took more than {self._wall_s:g} s; the machine is busy",
                    code="helper_overdue",
                ) from None
            except OSError:
                self._end()
                if not fresh:
                    continue
                return lost(asked.field)
            if ends:
                self._process.end_helper()
            try:
                return decode_grammar(answer)
            except BadRequest as error:
                return error if error.param != "structured_outputs" else _named(error, asked.field)
        return lost(asked.field)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()


def lost(field: str) -> BadRequest:
    """A description that ended the process which compiled it."""
    return BadRequest(
        f"{field}: compiling it ended the process that did; give a simpler one",
        param=field,
        code="too_costly",
    )


def _named(error: BadRequest, field: str) -> BadRequest:
    message = error.message.replace("structured_outputs", field, 1)
    return BadRequest(message, param=field, code=error.code)


class _Process:
    """The parent of helpers, and its one helper."""

    def __init__(self, settings: Settings) -> None:
        self._pid = os.getpid()
        ours, theirs = socket.socketpair()
        settings_file = os.memfd_create("baton-grammars")
        try:
            os.write(settings_file, msgspec.msgpack.encode(settings))
            os.lseek(settings_file, 0, os.SEEK_SET)
            arguments = [str(theirs.fileno()), str(settings_file), str(self._pid)]
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "baton.gateway.helpers.main", *arguments],
                pass_fds=(theirs.fileno(), settings_file),
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
            os.close(settings_file)
        self._control = ours
        self._helper: socket.socket | None = None
        self._ended = weakref.finalize(self, _end, self._parent, ours)

    @property
    def is_ours(self) -> bool:
        """It lives, and is not that of the process that this one was forked from."""
        return self._pid == os.getpid() and self._parent.poll() is None

    def answer(self, body: bytes, deadline: float) -> tuple[bytes, bool]:
        """(the helper's answer to a description, whether it ends now).  Raises `TimeoutError`, `OSError` if
        the helper ended without one."""
        if self._helper is None:
            self._helper, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(self._control, [PROMPT], [theirs.fileno()])
            self._receive(HELLO.size, deadline)
        self._helper.settimeout(max(0.01, deadline - time.monotonic()))
        self._helper.sendall(JOB.pack(JOBS.index("structure"), len(body)) + body)
        ends, size = ANSWER.unpack(self._receive(ANSWER.size, deadline))
        return self._receive(size, deadline), ends == ENDS

    def end_helper(self) -> None:
        """The next description gets another one."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def close(self) -> None:
        if self._pid == os.getpid():
            self.end_helper()
            self._ended()
        else:
            self._ended.detach()

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._helper is not None
        data = bytearray()
        while len(data) < size:
            self._helper.settimeout(max(0.01, deadline - time.monotonic()))
            piece = self._helper.recv(size - len(data))
            if not piece:
                raise ConnectionError("it ended without an answer")
            data += piece
        return bytes(data)


def _end(parent: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    parent.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        parent.wait(5.0)
