"""Notes calls of some of Baton's functions, in every process of a server.

Python imports this file at its start where this directory is in PYTHONPATH.  `test_tour.py` starts such a
server, with the arguments of `Tracer` in `TRACED_CALLS`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, TextIO


class Tracer:
    """Appends a line (nanoseconds, file, function) for each call to the file of its process in `directory`.

    `functions`: (path below `root`, qualified name) of the functions that count.
    """

    def __init__(self, directory: str, root: str, functions: list[list[str]]) -> None:
        self._directory = directory
        self._root = root
        self._functions = {(path, name) for path, name in functions}
        self._known: dict[CodeType, str] = {}
        """The line's end for each code object; "" for those that do not count."""
        self._files: dict[int, TextIO] = {}
        """By process id: helpers are forked, and have one of their own."""

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        line = self._known.get(frame.f_code)
        if line is None:
            line = self._known[frame.f_code] = self._line(frame.f_code)
        if not line:
            return
        pid = os.getpid()
        if pid not in self._files:
            path = os.path.join(self._directory, f"calls.{pid}")
            self._files[pid] = open(path, "a", buffering=1)  # noqa: SIM115 (closed by the end of the process)
        self._files[pid].write(f"{time.monotonic_ns()} {line}\n")

    def _line(self, code: CodeType) -> str:
        path = code.co_filename.removeprefix(self._root)
        name = code.co_qualname.replace(".<locals>", "")
        return f"{path} {name}" if (path, name) in self._functions else ""


if "TRACED_CALLS" in os.environ:
    _tracer = Tracer(**json.loads(os.environ["TRACED_CALLS"]))
    threading.setprofile(_tracer.note)
    sys.setprofile(_tracer.note)
