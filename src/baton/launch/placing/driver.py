"""Ray's driver, in a process of its own: `python -m baton.launch.placing.driver`, which the server starts.

The server's process does not import Ray, whose threads and crashes stay here.  Each line on stdin is a whole
`Placing`: what is to be there from now on.  An instance that a later one does not name drains beside the loop
and is taken away.  The end of stdin (the server ends, or died) ends all; if this process is killed too, the
next one with the same cluster name ends them before it places its own (`gang.py`: what Ray has of each).

Most calls of Ray have no timeout, and some wait for ever for a cluster that is gone.  So each stands in a
`within`: when its time is over the kernel ends this process (SIGALRM), whatever its threads wait for.  The
server then starts another one, which takes over what is still there (`Placing.adopt`).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from baton.launch.placing.gang import Gang, Group, Leaving, stop, table, take_away
from baton.launch.placing.spec import Placing, Report, Standing

NAMESPACE = "baton"
_LOOK_S = 1.0
_REACH_S = 120.0
"""To find Ray, or to start one, and to place the first time: on a machine that is busy."""
_SWEEP_S = 10.0
"""What instances of an earlier server get to end."""
_SOON_S = 10.0
"""What relays get to end once their leaders have, and what Ray gets to let this process go."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the server's affair
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what Ray prints is no report
    lines = _Lines(sys.stdin.fileno())
    code = 0
    try:
        run(lines, out.write)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        out.write(msgspec.json.encode(Report(error=text[:500])) + b"\n")
        code = 1
    signal.setitimer(signal.ITIMER_REAL, _SOON_S)  # (Ray does more when Python ends)
    sys.exit(code)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """The kernel ends this process if what is inside takes longer."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Lines:
    """What comes from the server."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self.ended = False

    def first(self) -> Placing:
        while (found := self.newest(None)) is None and not self.ended:
            pass
        if found is None:
            raise EOFError("the server ended before it said what to place")
        return found

    def newest(self, seconds: float | None) -> Placing | None:
        """The last whole line that has come within so long; None: none."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return None
        data = os.read(self._descriptor, 1 << 20)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return msgspec.json.decode(lines[-1], type=Placing) if lines else None


def run(lines: _Lines, write: Any) -> None:
    """Until stdin ends.  Raises what Ray raises when it cannot be reached: then instances that were placed
    stay, for the next driver."""
    import ray

    placing = lines.first()

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    def report(**what: Any) -> None:
        write(msgspec.json.encode(Report(**what)) + b"\n")

    with within(_REACH_S):
        ray.init(**_where(placing), namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=True)
    if not placing.adopt:
        swept = _end(placing, _SWEEP_S, _REACH_S)
        if swept:
            report(note=f"ended what an earlier server left in Ray: {', '.join(swept)}")
    gangs = {one.name: Gang(placing, one) for one in placing.instances}
    leaving: list[Leaving] = []
    if placing.adopt:
        with within(placing.patience_s):
            groups, actors = table()
            found = [name for name, gang in gangs.items() if gang.find(groups, actors, time.monotonic())]
            leaving = _leave(placing, _unwanted(placing, groups, actors), groups, actors)
        report(note=f"Ray answers again; still there: {', '.join(found) or 'no instance'}")
    told: tuple[Standing, ...] | None = None
    while True:
        with within(placing.patience_s if told is not None else _REACH_S):
            groups, actors = table()
            for name, gang in gangs.items():
                if why := gang.turn(groups, actors, time.monotonic()):
                    report(note=f"{name} is lost and placed anew: {why}")
            standing = tuple(gang.standing(groups) for gang in gangs.values())
            leaving = [one for one in leaving if not one.over(groups, time.monotonic())]
        if standing != told:
            told = standing
            report(instances=standing)
        wanted = lines.newest(_LOOK_S)
        if lines.ended:
            break
        if wanted is not None:
            placing = wanted
            names = {one.name for one in placing.instances}
            gone = [gangs.pop(name).name for name in list(gangs) if name not in names]
            gangs |= {one.name: Gang(placing, one) for one in placing.instances if one.name not in gangs}
            with within(placing.patience_s):
                leaving += _leave(placing, gone, *table())
    _end(placing, placing.stop_after_s, placing.patience_s)
    with within(_SOON_S):
        ray.shutdown()


def _unwanted(placing: Placing, groups: Mapping[str, Group], actors: Collection[str]) -> list[str]:
    """Instances that are there under this cluster's name and are not to be, as `Gang.name`."""
    wanted = {f"{placing.cluster}-{one.name}" for one in placing.instances}
    there = {name.partition("/")[0] for name in (*groups, *actors)}
    return sorted(name for name in there - wanted if name.startswith(f"{placing.cluster}-"))


def _leave(
    placing: Placing, names: Iterable[str], groups: Mapping[str, Group], actors: Collection[str]
) -> list[Leaving]:
    """These drain from now on."""
    until = time.monotonic() + placing.stop_after_s
    return [
        Leaving(name, actors, runs=groups.get(name, {}).get("state") == "CREATED", until=until)
        for name in names
    ]


def _end(placing: Placing, seconds: float, patience_s: float) -> list[str]:
    """Drains what is there under this cluster's name, leaders first, for so many seconds; then takes actors
    and groups away.  `patience_s`: what Ray gets for each question.  Returns the names."""
    prefix = f"{placing.cluster}-"
    with within(patience_s):
        groups, actors = table()
    ours = [name for name in groups if name.startswith(prefix)]
    mine = [name for name in actors if name.startswith(prefix)]
    relays = [name for name in mine if "/" in name]
    with within(seconds + patience_s):
        stop([name for name in mine if name not in relays], seconds)
    with within(_SOON_S + patience_s):
        stop(relays, _SOON_S)
        take_away(mine, ours)
    return sorted({*ours, *mine})


def _where(placing: Placing) -> dict[str, Any]:
    if placing.address != "local":
        return {"address": placing.address}
    # Of its own, for this machine: no dashboard; objects are none, so their store is as small as may be.
    return {"address": "local", "include_dashboard": False, "object_store_memory": 80 << 20}


if __name__ == "__main__":
    main()
