"""The server as it stands, for `/ui` and `baton top`: instances, totals, the requests that are open.

All of it is in the gateway's own books; no engine is asked.  A snapshot is made when somebody wants one and
the last is older than `KEPT_S`: however many look, it is made once, in slices between which other requests
have their turn, and not again before fifty times what it took, so that looking takes at most 2 % of the loop.
While nobody looks nothing is made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from heapq import nsmallest
from typing import Any, Final

from baton.gateway.generation.generation import Generation
from baton.gateway.http.context import Gateway
from baton.gateway.rendering.formats import encode
from baton.version import __version__

KEPT_S: Final = 0.5
SHARE: Final = 50
"""Of the time between two snapshots, one part of so many is spent on making one."""
MAX_ROWS: Final = 10_000
"""Requests that are listed, those that came first; all are counted."""
_SLICE = 250
_INSTANCE = (
    "name",
    "label",
    "state",
    "draining",
    "drained",
    "paused",
    "joined",
    "failure",
    "restarts",
    "in_flight",
    "num_blocks",
    "block_size",
    "max_num_seqs",
    "running",
    "waiting",
    "free_blocks",
    "detail",
)


class Overview:
    """Snapshots of one gateway."""

    def __init__(self, gateway: Gateway, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._gateway, self._clock = gateway, clock
        self._body = b""
        self._due = 0.0
        self._lock = asyncio.Lock()

    async def latest(self) -> bytes:
        """A JSON object without the time: the same bytes while nothing happens."""
        async with self._lock:
            if not self._body or self._clock() >= self._due:
                began, spent = self._clock(), 0.0
                rows, uncounted = [], 0
                generations = nsmallest(MAX_ROWS, self._gateway.generator.open, key=_arrived)
                for start in range(0, len(generations), _SLICE):
                    turn = self._clock()
                    rows += [_row(one) for one in generations[start : start + _SLICE]]
                    uncounted += sum(map(_uncounted, generations[start : start + _SLICE]))
                    spent += self._clock() - turn
                    await asyncio.sleep(0)
                turn = self._clock()
                self._body = encode(self._head(uncounted) | {"requests": rows})
                spent += self._clock() - turn
                self._due = began + max(KEPT_S, SHARE * spent)
            return self._body

    def timed(self, body: bytes) -> bytes:
        """`body` with `now`, on the clock of the requests' `arrived`."""
        return b'{"now":%.3f,' % self._clock() + body[1:]

    def _head(self, uncounted: int) -> dict[str, Any]:
        """`uncounted`: generated tokens that metrics do not have yet."""
        gateway = self._gateway
        totals = gateway.metrics.totals()
        totals["generated_tokens"] += uncounted
        client, table = gateway.client, gateway.client.cluster.table
        return {
            "model": gateway.served.name,
            "version": __version__,
            "state": client.state,
            "paused": client.paused,
            "leaving": gateway.leaving,
            "totals": totals | {"handed_over": table.num_handed_over, "continued": table.continued.times},
            "open": len(gateway.generator.open),
            "instances": [{key: one.get(key) for key in _INSTANCE} for one in client.describe()],
        }


def _arrived(generation: Generation) -> float:
    return generation.arrived


def _uncounted(generation: Generation) -> int:
    """Tokens that came for answers in one piece: they are counted when those are given."""
    requests = [one.request for one in generation.sequences if one.request and not one.first_tokens_at]
    return sum(len(request.tokens) for request in requests if request.patient)


def _row(generation: Generation) -> tuple[str, float, int, int, str, str]:
    """(id, when it arrived, tokens of its prompts, generated ones, how it stands, who has it)."""
    at = next((one.request.at for one in generation.sequences if one.request and one.request.at), "")
    generated = sum(len(one.request.tokens) for one in generation.sequences if one.request)
    if generation.held:
        state = "held"
    elif generated:
        state = "decode"
    else:
        state = "prefill" if at else "waiting"
    return generation.request_id, round(generation.arrived, 3), generation.num_prompt, generated, state, at
