"""The real server stands still, on uvloop, which runs timers before it reads: nobody is lost for that."""

from __future__ import annotations

import asyncio
import json
import time

from tests.gateway.site import PATH, Site


def test_an_instance_that_renews_outlives_a_server_that_stands_still(site: Site):
    """Four times for longer than the time to live, with the renewal in the socket; then it says no more, and
    is found."""
    site.join("far")
    engine = site.joined["far"]
    host, _, port = site.server.url.removeprefix("http://").partition(":")

    def renewal(ttl_s: float) -> bytes:
        fields = {"incarnation": engine.incarnation, "endpoint": engine.endpoint, "secret": engine.secret}
        body = json.dumps({**fields, "label": "mixed", "ttl_s": ttl_s}).encode()
        head = f"PUT {PATH}/far HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body

    async def rounds() -> list[bytes]:
        """On the server's event loop, so that it stands still while this does."""
        reader, writer = await asyncio.open_connection(host, int(port))
        heads = []
        for stands_still_s, ttl_s in ((0, 1), (1.6, 1), (1.6, 1), (1.6, 1), (1.6, 30)):
            time.sleep(stands_still_s)
            writer.write(renewal(ttl_s))  # (it is in the socket when this returns)
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            length = heads[-1].lower().partition(b"content-length: ")[2].split()[0]
            await reader.readexactly(int(length))
        writer.close()
        return heads

    heads = site.server.call(rounds())
    assert [head.split()[1] for head in heads] == [b"200"] * 5
    entry = site.see("far")
    assert (entry["state"], entry["restarts"], entry["failure"]) == ("ready", 0, None)
    assert engine.hellos == 1, "the connection was kept"
    site.put("far", ttl_s=1)
    site.until(lambda: "renew" in (site.see("far")["failure"] or ""))


def test_an_answer_that_is_in_the_socket_counts(site: Site):
    engine = site.server.engine
    engine.behaviour.stats = {"running": 7}
    before = engine.queries["stats"]

    def stand_still() -> None:
        """From when the question has left until long after it was answered."""
        engine.wait_for(lambda: engine.queries["stats"] > before, "the question")
        time.sleep(0.8)

    async def ask() -> object:
        asyncio.get_running_loop().call_soon(stand_still)
        return await site.server.instance.query("stats", 0.3)

    assert site.server.call(ask()) == {"running": 7}
