"""What `hostile.py` has, sent over and over: what agents get wrong, or somebody makes expensive."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator

from _attacks import Attack
from _attacks.costs import post
from _attacks.hostile import HOSTILE, Hostile, thrash

_CLIENTS = 2


def _send(requests: Iterable[Hostile]) -> Attack:
    """Two clients at a time take the next request."""

    def attack(host: str, port: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        left: Iterator[Hostile] = iter(requests)
        lock = threading.Lock()

        def one() -> None:
            while time.monotonic() < end:
                with lock:
                    request = next(left)
                post(host, port, request.path, request.body())

        threads = [threading.Thread(target=one, daemon=True) for _ in range(_CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()) + 1.0)

    return attack


ATTACKS: dict[str, Attack] = {
    **{f"agents: {name}": _send(itertools.cycle(requests)) for name, requests in HOSTILE.items()},
    "agents: new schemas all the time": _send(thrash()),
}

_HELPER, _BYTES = "control: a busy process of a helper's priority", "control: 4 MiB bodies, dropped"
_ORDINARY = "control: 2 x short chats"

CONTROLS = {
    **{f"agents: {name}": _ORDINARY for name in HOSTILE},
    "agents: new schemas all the time": _HELPER,
    "agents: a 10 MB schema": _BYTES,
    "agents: enum of 100,000": _BYTES,
    "agents: 10,000 tools": _BYTES,
    "agents: recursion": _BYTES,
    "agents: templates' arguments": _HELPER,
    "agents: wide schemas": _HELPER,
    "agents: regexes that explode": _HELPER,
    "agents: grammars that explode": _HELPER,
}
