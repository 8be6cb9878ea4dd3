"""Ray's driver, in a process of its own: `python -m baton.launch.placing.driver`, which the server starts.

The server's process does not import Ray, whose threads and crashes stay here.  The first line on stdin is a
`Placing`.  What follows, or its end (the server died), ends all instances; if this process is killed too, the
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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from baton.launch.placing.gang import Gang, stop, table, take_away
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
    placing = msgspec.json.decode(sys.stdin.buffer.readline(), type=Placing)
    code = 0
    try:
        run(placing, out.write)
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


def run(placing: Placing, write: Any) -> None:
    """Until stdin says something or ends.  Raises what Ray raises when it cannot be reached: then instances
    that were placed stay, for the next driver."""
    import ray

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
    if placing.adopt:
        with within(placing.patience_s):
            groups, actors = table()
            found = [name for name, gang in gangs.items() if gang.find(groups, actors, time.monotonic())]
        report(note=f"Ray answers again; still there: {', '.join(found) or 'no instance'}")
    told: tuple[Standing, ...] | None = None
    while True:
        with within(placing.patience_s if told is not None else _REACH_S):
            groups, actors = table()
            for name, gang in gangs.items():
                if why := gang.turn(groups, actors, time.monotonic()):
                    report(note=f"{name} is lost and placed anew: {why}")
            standing = tuple(gang.standing(groups) for gang in gangs.values())
        if standing != told:
            told = standing
            report(instances=standing)
        if select.select([sys.stdin], [], [], _LOOK_S)[0]:
            break
    _end(placing, placing.stop_after_s, placing.patience_s)
    with within(_SOON_S):
        ray.shutdown()


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
