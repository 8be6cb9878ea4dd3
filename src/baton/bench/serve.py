"""Online serving: requests arrive at their moments, each is streamed, and everything is timed at the client.

At most `max_concurrency` requests run at a time; one whose turn has not come waits in the client, and its
clock has not started (as in vLLM), so a limit hides queueing that an unlimited run would show in TTFT.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import uvloop

from baton.bench.client import Endpoint, Outcome, send
from baton.bench.workload import Request


class BenchFailed(RuntimeError):
    """No request can be served; one line that says why."""


async def run(
    endpoint: Endpoint,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[Outcome], float]:
    """Sends request i `arrivals[i]` seconds after the start (ascending).

    Returns what came of each, in their order, and the seconds until the last one's end.
    """
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()

    async def one(request: Request) -> Outcome:
        async with limit:
            outcome = await send(endpoint, request)
        on_done()
        return outcome

    start = time.perf_counter()
    tasks = []
    for request, arrival in zip(requests, arrivals, strict=True):
        wait = start + arrival - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(request)))
    outcomes = await asyncio.gather(*tasks)
    return outcomes, time.perf_counter() - start


def measure_serving(
    endpoint: Endpoint,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    warmups: Sequence[Request] = (),
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[Outcome], float]:
    """`run` on an event loop of its own, after `warmups`.  Raises `BenchFailed` if one of these fails."""

    async def everything() -> tuple[list[Outcome], float]:
        for outcome in (await run(endpoint, warmups, [0.0] * len(warmups)))[0]:
            if outcome.error:
                raise BenchFailed(f"the first request failed: {outcome.error}")
        return await run(endpoint, requests, arrivals, max_concurrency, on_done)

    return uvloop.run(everything())
