"""A child process that was forked, with what the standard library's `Popen` has for one that was started."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import Protocol


class Process(Protocol):
    """A child of this process: `Child`, or `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Child:
    """A child of this process by its number.  Nobody else may wait for it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), None while it runs."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # a program that waits for all children has taken it: as Popen says
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.  Raises `subprocess.TimeoutExpired` if there is none after `timeout` seconds."""
        code = self.poll()
        if code is None:
            with suppress(ProcessLookupError):
                pidfd = os.pidfd_open(self.pid)
                try:
                    ended, _, _ = select.select([pidfd], [], [], timeout)
                finally:
                    os.close(pidfd)
                if not ended:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            code = self.poll()
        return 0 if code is None else code

    def send_signal(self, sig: int) -> None:
        """Does nothing once it has ended: its number may be another process's."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
