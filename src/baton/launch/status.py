"""The last line of `baton serve` on a terminal: while instances start how far each is, then what runs and
waits, tokens a second, KV use, instances.

It is written over some times a second while instances start, once a second while requests run, once when
they have ended, and when an instance changes; in between nothing wakes up.  The cursor stands at its
beginning, so whatever any process of the server writes next begins there too: lines of the log erase it first
(`ERASE`), and the next look draws it below them; after a line of the log that comes while nothing runs it is
drawn with the next change.  That the lines erase it is told to all processes by the variable `SHOWN`, which
the command sets before it starts any.  Without a terminal, or with another log format than text, there is no
such line.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.gateway.instances.client import ClusterClient
from baton.launch.instances.image_server import loading
from baton.observe.logs import ERASE, SHOWN

EVERY_S = 1.0
STARTING_S = 0.25
"""Between two looks while instances start."""
_BAR = 10


def begin(log_format: str) -> None:
    """Before other processes are started: there will be a line, if there can be one."""
    os.environ.pop(SHOWN, None)
    terminal = sys.stdout.isatty() and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if terminal and log_format == "text":
        os.environ[SHOWN] = "1"


async def show(
    client: ClusterClient, totals: Callable[[], Mapping[str, int]], announced: asyncio.Task[None]
) -> None:
    """Until it is cancelled; `announced` ends when requests are served.  `totals`: of the gateway."""
    if SHOWN not in os.environ:
        return
    try:
        began = time.monotonic()
        while not announced.done():
            mine = [(link.name, link.state == "ready") for link in client.instances.values()]
            far = {name: loading(name) for name, ready in mine if not ready}
            _write(starting(far, len(mine), time.monotonic() - began))
            await asyncio.wait((announced,), timeout=STARTING_S)
        last, tokens, shown = time.monotonic(), 0, ""
        while True:
            instances = client.describe()
            now, generated = time.monotonic(), totals()["generated_tokens"]
            rate = (generated - tokens) / max(now - last, 0.001)
            last, tokens = now, generated
            text = line(instances, rate, totals()["ended"])
            busy = bool(client.in_flight)
            if busy or text != shown:
                shown = text
                _write(text)
            if busy:
                await asyncio.sleep(EVERY_S)
                continue
            await client.wait_for(_change(client, _states(instances)))
            last, tokens = time.monotonic(), totals()["generated_tokens"]
    finally:
        sys.stderr.write(ERASE)
        sys.stderr.flush()


def starting(far: Mapping[str, str], instances: int, seconds: float) -> str:
    """`far`: of those that are not ready, how far each is, "" if it has not said; `instances`: all."""
    parts = [f"{seconds:.0f} s"]
    if instances == 1:
        parts += [_phase(what, 2 * _BAR, "loading ", tell_all=True) for what in far.values()]
        return " · ".join(parts)
    where: dict[str, list[str]] = {}
    for name, what in far.items():
        where.setdefault(_phase(what, _BAR), []).append(name)
    parts.append(f"{instances - len(far)} of {instances} instances ready")
    parts += [f"{names[0] if len(names) == 1 else len(names)} {phase}" for phase, names in where.items()]
    return " · ".join(parts)


def _phase(what: str, bar: int, verb: str = "", *, tell_all: bool = False) -> str:
    """`what`: as a worker says it, "62 % (its layer)" while it loads."""
    percent, sign, rest = what.partition(" %")
    if not sign or not percent.isdigit():
        return what or "starting"
    done = round(bar * int(percent) / 100)
    return f"{verb}{'█' * done}{'░' * (bar - done)} {percent} %{rest if tell_all else ''}"


def line(instances: Sequence[Mapping[str, Any]], rate: float, ended: int) -> str:
    """`instances` as the cluster describes them, `rate` in tokens a second, `ended` sequences."""
    blocks = sum(one["num_blocks"] or 0 for one in instances)
    known = [one for one in instances if one["free_blocks"] is not None]
    free = blocks - sum((one["num_blocks"] or 0) - one["free_blocks"] for one in known)
    ready = sum(one["state"] == "ready" for one in instances)
    running, waiting = (sum(one[key] or 0 for one in instances) for key in ("running", "waiting"))
    work = f"{running:,} running, {waiting:,} waiting · {rate:,.0f} tokens/s"
    return " · ".join(
        (
            work if any(one["in_flight"] for one in instances) else f"idle, {ended:,} ended",
            f"KV {100 * (blocks - free) / blocks if blocks else 0:.1f} %",
            f"{ready} of {len(instances)} instances ready",
        )
    )


def _change(client: ClusterClient, states: list[tuple[Any, ...]]) -> Callable[[], bool]:
    return lambda: client.in_flight > 0 or _states(client.describe()) != states


def _states(instances: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [(one["name"], one["state"], one["label"], one["draining"], one["paused"]) for one in instances]


def _write(text: str) -> None:
    columns = shutil.get_terminal_size().columns
    sys.stderr.write(f"{ERASE}{text[: columns - 1]}\r")
    sys.stderr.flush()
