"""Kills processes of a cluster at random moments, while clients ask all the time.

What must hold: every request gets the answer that it gets from one instance that nobody kills; a second after
a death no other instance holds a block for the dead one; and in the end nothing is held at all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from tests.e2e.mixed_requests import Ask, difference, get_answer
from tests.e2e.server import Server, child_pids

CLEAN_S = 1.0
"""So long after a death blocks may still be held for the dead."""
_READY_S = 120.0
_ANSWER_S = 240.0


@dataclass
class Kill:
    name: str
    role: str
    at: float
    """On the monotonic clock."""
    incarnation: str
    others_ready: int
    clean_s: float | None = None
    """Until nothing was held for it."""
    pause_s: float = 0.0
    """The longest that a stream which was running then had to wait for its next chunk."""
    ready_s: float | None = None
    """Until it was ready again."""

    def line(self) -> str:
        clean = "?" if self.clean_s is None else f"{self.clean_s:.2f} s"
        ready = "-" if self.ready_s is None else f"{self.ready_s:.1f} s"
        return (
            f"{self.role:6} of {self.name:9} with {self.others_ready} others: ledgers clean after {clean}, "
            f"longest pause of a stream {self.pause_s:.2f} s, ready again after {ready}"
        )


@dataclass
class Killing:
    """One run: so many kills, while so many clients ask."""

    server: Server
    asks: list[Ask]
    rng: random.Random
    kills: int
    at_once: int = 12
    done: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    answers: int = 0
    _stop: bool = False
    _pauses: list[tuple[float, float]] = field(default_factory=list)

    def run(self) -> None:
        """Fills `done`, `wrong` and `answers`."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        order = itertools.cycle(self.rng.sample(self.asks, len(self.asks)))
        # (A connection that is kept may be closed by the server just when the next question is sent.)
        http = httpx.AsyncClient(base_url=self.server.url, headers={"connection": "close"})
        async with self.server.async_client() as client, http:
            clients = [asyncio.create_task(self._client(client, order)) for _ in range(self.at_once)]
            try:
                for _ in range(self.kills):
                    await self._kill_one(http)
            finally:
                self._stop = True
                await asyncio.gather(*clients)
            await self._wait_ready(http, all_of_them=True)
        for kill in self.done:
            kill.pause_s = max((b - a for a, b in self._pauses if a <= kill.at <= b), default=0.0)

    # -- clients

    async def _client(self, client: AsyncOpenAI, order: Any) -> None:
        while not self._stop:
            ask: Ask = next(order)
            last = time.monotonic()

            def on_news() -> None:
                nonlocal last
                now = time.monotonic()
                self._pauses.append((last, now))
                last = now

            try:
                answer = await asyncio.wait_for(
                    get_answer(client, ask, may_leave=True, on_news=on_news), _ANSWER_S
                )
                what = difference(ask, answer)
            except Exception as error:
                what = f"request {ask.number}: {type(error).__name__} {error}; it was {ask.body}"
            self.answers += 1
            if what:
                self.wrong.append(what)

    # -- kills

    async def _kill_one(self, http: httpx.AsyncClient) -> None:
        """Mostly when all are ready, sometimes while another one is still down."""
        ready = await self._wait_ready(http, all_of_them=self.rng.random() < 0.7)
        await asyncio.sleep(self.rng.uniform(0.0, 1.5))
        victim = self.rng.choice(ready)
        engine = engines(self.server)[victim["name"]]
        role = self.rng.choice(("engine", "worker"))
        pid = engine if role == "engine" else self.rng.choice(child_pids(engine))
        kill = Kill(victim["name"], role, time.monotonic(), victim["incarnation"], len(ready) - 1)
        os.kill(pid, signal.SIGKILL)
        self.done.append(kill)
        await self._wait_clean(http, kill)

    async def _instances(self, http: httpx.AsyncClient) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await http.get("/cluster/instances", timeout=30)).json()["instances"]
        return found

    async def _wait_ready(self, http: httpx.AsyncClient, *, all_of_them: bool) -> list[dict[str, Any]]:
        """The instances that are ready: all, or at least two."""
        end = time.monotonic() + _READY_S
        while True:
            instances = await self._instances(http)
            ready = [instance for instance in instances if instance["state"] == "ready"]
            self._note_restarts(ready)
            if len(ready) >= (len(instances) if all_of_them else min(2, len(instances))):
                return ready
            if time.monotonic() > end:
                raise TimeoutError(f"not ready within {_READY_S:g} s: {instances}")
            await asyncio.sleep(0.05)

    def _note_restarts(self, ready: list[dict[str, Any]]) -> None:
        for kill in self.done:
            if kill.ready_s is None and any(
                i["name"] == kill.name and i["incarnation"] != kill.incarnation for i in ready
            ):
                kill.ready_s = time.monotonic() - kill.at

    async def _wait_clean(self, http: httpx.AsyncClient, kill: Kill) -> None:
        """Until no living instance holds anything for the dead one."""
        while True:
            asked = time.monotonic()
            ledgers = (await http.get("/debug/ledger", timeout=30)).json().get("instances", {})
            for_the_dead = {
                name: found
                for name, ledger in ledgers.items()
                if (found := [text for text in _holders(ledger) if kill.incarnation in text])
            }
            if not for_the_dead and kill.name not in ledgers:
                kill.clean_s = time.monotonic() - kill.at
                return
            if asked - kill.at > CLEAN_S and for_the_dead:
                self.wrong.append(f"{kill.line()}: {CLEAN_S:g} s later there is still {for_the_dead}")
                return
            if asked - kill.at > 5.0:
                self.wrong.append(f"{kill.line()}: 5 s later the gateway still asks it")
                return
            await asyncio.sleep(0.02)


def _holders(ledger: dict[str, Any]) -> list[str]:
    """Everything that blocks are held for, for others than the instance itself."""
    found = [*ledger.get("exported_by", {}), *ledger.get("reserved_by", {})]
    handovers = ledger.get("handovers", {})
    return found + [json.dumps(row) for way in ("departures", "arrivals") for row in handovers.get(way, [])]


def engines(server: Server) -> dict[str, int]:
    """Process ids of the engines by the names of their instances."""
    found = {}
    for pid in child_pids(server.process.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"baton.launch.instances.processes.instance" in words:
            launch = json.loads(words[words.index(b"baton.launch.instances.processes.instance") + 1])
            found[launch["config"]["name"]] = pid
    return found
