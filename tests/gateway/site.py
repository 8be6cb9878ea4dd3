"""A server and engines that join it, for tests of clusters."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.conftest import GENEROUS_S
from tests.gateway.echo_engine import EchoEngine
from tests.gateway.harness import GatewayServer

PATH = "/cluster/instances"


class Site:
    """A server with one instance of its own (`instance-0`), and engines that join."""

    def __init__(self, server: GatewayServer) -> None:
        self.server = server
        self.http = server.http()
        self.joined: dict[str, EchoEngine] = {}
        self.pool = ThreadPoolExecutor(8)

    def engine(self, name: str, **settings: Any) -> EchoEngine:
        engine = self.joined[name] = EchoEngine(
            incarnation=f"{name}.1", **{"vocab": self.server.engine.vocab, **settings}
        )
        return engine

    def put(self, name: str, **changes: Any) -> httpx.Response:
        engine = self.joined[name]
        body = {
            "incarnation": engine.incarnation,
            "endpoint": engine.endpoint,
            "secret": engine.secret,
            "label": "mixed",
            "ttl_s": 30,
        }
        return self.http.put(f"{PATH}/{name}", json={**body, **changes})

    def join(self, name: str, **changes: Any) -> EchoEngine:
        engine = self.joined.get(name) or self.engine(name)
        self.put(name, **changes).raise_for_status()
        self.until(lambda: self.see(name)["state"] == "ready")
        return engine

    def see(self, name: str) -> dict[str, Any]:
        return self.http.get(f"{PATH}/{name}").raise_for_status().json()

    def post(self, name: str, **body: Any) -> httpx.Response:
        return self.http.post(f"{PATH}/{name}", json=body)

    def until(self, condition: Callable[[], bool]) -> None:
        self.server.engine.wait_for(condition, "what the test waits for", GENEROUS_S)

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.http.close()
        for engine in self.joined.values():
            engine.die()
