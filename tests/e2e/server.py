"""A real `baton serve` for tests: started on a free port, stopped by process id, logs kept."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

START_DEADLINE_S = 180.0


class Server:
    """One `baton serve` process with the given flags; a context manager.  `module`: what runs it."""

    def __init__(self, *flags: str, model: str | None = None, module: str = "baton") -> None:
        self.flags = flags
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (tests read it when the server is gone, too)
        python = os.environ.get("BATON_PYTHON", sys.executable)  # (`make clients`: tests have another one)
        command = [python, "-m", module, "serve", *([model] if model else [])]
        self.process = subprocess.Popen(
            [*command, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )
        try:
            self.url = self._wait_for_address()
        except BaseException:
            self.stop()
            raise
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _wait_for_address(self) -> str:
        """Reads stdout until the address is printed; fails with the log if the server leaves first."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + START_DEADLINE_S
        text = b""
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self.process.stdout], [], [], 1.0)
            if ready:
                piece = os.read(self.process.stdout.fileno(), 65536)
                text += piece
                found = re.search(rb"(http://[0-9.:]+)/v1", text)
                if found:
                    self.banner = text.decode()
                    return found[1].decode()
                if not piece:
                    break
        raise RuntimeError(f"the server did not start; stdout {text!r}; log:\n{self.log()}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """SIGTERM, then SIGKILL after a while.  Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        return self.process.returncode

    def log(self) -> str:
        handle = self._log.fileno()  # (to seek in it would move the server's own place)
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")

    def warnings(self) -> list[str]:
        """Log lines of level WARNING or worse."""
        return [line for line in self.log().splitlines() if re.search(r" (WARNING|ERROR|CRITICAL) ", line)]

    def client(self, **kwargs: Any) -> OpenAI:
        from openai import OpenAI  # (where there is a GPU this may be missing)

        return OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=200, **kwargs)

    def async_client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=300)

    def ledger(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(self.http.get("/debug/ledger").raise_for_status().text)
        return result

    def metric(self, name: str) -> float:
        """The sum over a metric's samples."""
        values = re.findall(
            rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", self.http.get("/metrics").text, re.M
        )
        return sum(map(float, values))

    def wait_ready(self, deadline_s: float = 120.0) -> float:
        """Waits until /ready is 200; returns the seconds it took."""
        start = time.monotonic()
        while time.monotonic() - start < deadline_s:
            if self.http.get("/ready").status_code == 200:
                return time.monotonic() - start
            time.sleep(0.05)
        raise TimeoutError(f"not ready within {deadline_s} s; log:\n{self.log()}")

    def children(self) -> dict[str, list[int]]:
        """Process ids by role, from the process tree: {'engine': [...], 'worker': [...], 'helper': [...]}.

        Helpers read long bodies and render templates for the gateway.
        """
        children = child_pids(self.process.pid)
        engines = [pid for pid in children if is_engine(pid)]
        workers = [pid for engine in engines for pid in child_pids(engine)]
        parents = [pid for pid in children if pid not in engines]
        helpers = [pid for parent in parents for pid in (parent, *child_pids(parent))]
        return {"engine": engines, "worker": workers, "helper": helpers}


def child_pids(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def is_engine(pid: int) -> bool:
    try:
        return b"baton.launch.instances.processes.instance" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def alive(pid: int) -> bool:
    """True while the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
