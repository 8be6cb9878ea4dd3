"""The real server stands still, on uvloop, which runs timers before it reads: nobody is lost for that."""

from __future__ import annotations

import asyncio
import threading
import time

from tests.gateway.site import Site


def test_an_instance_that_renews_outlives_a_server_that_stands_still(site: Site):
    """Four times for longer than the time to live; then it says no more, and is found."""
    site.join("far", ttl_s=1)
    stopping = threading.Event()

    def renew() -> None:
        while not stopping.wait(0.2):
            site.put("far", ttl_s=1)

    async def stand_still() -> None:
        time.sleep(1.6)

    renewing = site.pool.submit(renew)
    try:
        for _ in range(4):
            site.server.call(stand_still())
            site.server.call(asyncio.sleep(0.3))
        entry = site.see("far")
        assert (entry["state"], entry["restarts"], entry["failure"]) == ("ready", 0, None)
        assert site.joined["far"].hellos == 1, "the connection was kept"
    finally:
        stopping.set()
    renewing.result(30)
    site.until(lambda: "renew" in (site.see("far")["failure"] or ""))


def test_an_answer_that_is_in_the_socket_counts(site: Site):
    site.server.engine.behaviour.stats = {"running": 7}

    async def ask() -> object:
        loop = asyncio.get_running_loop()
        loop.call_soon(time.sleep, 1.0)  # after the question has left
        return await site.server.instance.query("stats", 0.3)

    assert site.server.call(ask()) == {"running": 7}
