"""Costly requests wait for each other, and for no longer than they are patient."""

from __future__ import annotations

import asyncio

import pytest

from baton.gateway.errors import Overloaded
from baton.gateway.generation import permits as module
from baton.gateway.generation.permits import Permits


def test_who_waited_longest_is_next() -> None:
    async def run() -> list[str]:
        permits, order = Permits(at_once=1), []

        async def take(name: str) -> None:
            await permits.take("logprobs")
            order.append(name)

        await take("a")
        waiting = [asyncio.create_task(take(name)) for name in "bcd"]
        await asyncio.sleep(0)
        waiting[1].cancel()  # (who went away keeps no place)
        for _ in range(3):
            permits.release()
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.gather(waiting[0], waiting[2])
        await take("e")
        return order

    assert asyncio.run(run()) == ["a", "b", "d", "e"]


def test_a_permit_that_came_while_its_taker_left_is_given_on() -> None:
    async def run() -> None:
        permits = Permits(at_once=1)
        await permits.take("logprobs")
        leaving = asyncio.create_task(permits.take("logprobs"))
        await asyncio.sleep(0)
        permits.release()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await permits.take("logprobs")

    asyncio.run(asyncio.wait_for(run(), 60))


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 1)

    async def run() -> None:
        permits = Permits(at_once=1, patience_s=0.01)
        await permits.take("logprobs")
        first = asyncio.create_task(permits.take("logprobs"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):  # too many wait
            await permits.take("logprobs")
        with pytest.raises(Overloaded, match="logprobs: few requests"):
            await first
        permits.release()
        await permits.take("logprobs")

    asyncio.run(run())
