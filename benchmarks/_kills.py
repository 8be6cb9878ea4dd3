"""Kills processes of a running server, and says what its clients noticed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from _clients import Server

_READY_S = 60.0


@dataclass
class Kill:
    """One SIGKILL."""

    name: str
    """Of the process; its first word is its instance."""
    at: float
    """On the monotonic clock."""
    ready_s: float | None = None
    """Until the instance was ready again; None: that was not seen before the next kill."""
    pause_s: float = 0.0
    """The longest pause of a stream that was waiting then."""


async def kill_some(
    server: Server,
    processes: Callable[[Server], dict[str, int]],
    seconds: float,
    kills: int,
    rng: random.Random,
) -> list[Kill]:
    """At equal intervals one of the `processes` (name → process id) gets SIGKILL, never the gateway."""
    killed: list[Kill] = []
    began, every = time.monotonic(), seconds / (kills + 1)
    for number in range(1, kills + 1):
        await asyncio.sleep(max(0.0, began + every * number - time.monotonic()))
        victims = {name: pid for name, pid in processes(server).items() if name != "gateway"}
        if not victims:
            continue
        name = rng.choice(sorted(victims))
        before = await _state(server, name)
        kill = Kill(name, time.monotonic())
        os.kill(victims[name], signal.SIGKILL)
        killed.append(kill)
        until = kill.at + min(_READY_S, every)
        while kill.ready_s is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
            now = await _state(server, name)
            if now.get("state") == "ready" and now["incarnation"] != before.get("incarnation"):
                kill.ready_s = time.monotonic() - kill.at
    return killed


def note_pauses(killed: list[Kill], pauses: list[tuple[float, float]]) -> None:
    """`pauses`: of streams, from when to when each waited for its next chunk."""
    for kill in killed:
        kill.pause_s = max((end - begin for begin, end in pauses if begin <= kill.at <= end), default=0.0)


def show_kills(killed: list[Kill]) -> None:
    """Prints what came of them."""
    if not killed:
        return
    ready = [kill.ready_s for kill in killed if kill.ready_s is not None]
    for what, values in (("ready again", ready), ("longest pause", [kill.pause_s for kill in killed])):
        if values:
            print(f"{what} after a kill: median {statistics.median(values):.2f} s, worst {max(values):.2f} s")
    if len(ready) < len(killed):
        print(f"not seen ready again: {', '.join(kill.name for kill in killed if kill.ready_s is None)}")


async def _state(server: Server, process: str) -> dict[str, Any]:
    """Of the instance that the process belongs to; {} if there is no answer."""
    try:
        rows = (await asyncio.to_thread(server.get, "/cluster/instances"))["instances"]
    except OSError:
        return {}
    return next((row for row in rows if row["name"] == process.split()[0]), {})
