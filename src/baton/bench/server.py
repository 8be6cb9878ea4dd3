"""`baton serve` as a child process, for a benchmark that has no server to ask."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

_START_S = 300.0
_STOP_S = 30.0


class ServerFailed(RuntimeError):
    """The server did not start, or does not answer.  One line."""


@contextmanager
def own_server(model: str | None, flags: Sequence[str]) -> Iterator[tuple[str, float]]:
    """(address, seconds until ready) of a server of its own on a free port; stopped in the end.

    What it logs, warnings and errors, goes to stderr.  Raises `ServerFailed`.
    """
    command = [sys.executable, "-m", "baton", "serve", *([model] if model else [])]
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, "--port", "0", "--log-level", "warning", *flags],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = _address(process)
        _wait_ready(address, process)
        yield address, time.monotonic() - start
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _address(process: subprocess.Popen[str]) -> str:
    """Reads the lines that `baton serve` prints until one names its address."""
    assert process.stdout is not None
    for line in process.stdout:
        for word in line.split():
            if word.startswith("http://") and word.endswith("/v1"):
                return word.removesuffix("/v1")
    raise ServerFailed("the server did not start; see its messages above")


def _wait_ready(address: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerFailed(f"the server left with code {process.returncode} before it was ready")
        with suppress(OSError):
            get_json(f"{address}/ready")
            return
        time.sleep(0.02)
    raise ServerFailed(f"the server was not ready within {_START_S:g} s")


def get_json(url: str, api_key: str | None = None, timeout_s: float = 30.0) -> Any:
    """Raises `OSError`, or `ValueError` for what is not JSON."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s) as answer:
        return json.load(answer)


def first_model(base_url: str, api_key: str | None) -> str:
    """The first model that a server lists.  Raises `ServerFailed`."""
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/models"
    try:
        return str(get_json(url, api_key)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ServerFailed(f"{url}: {error}") from None
