"""How an instance registers with a server: what it says, when to say it again (`asking.py`: how)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple
from urllib.parse import quote

from baton.gateway.cluster.member import Label
from baton.launch.instances.joining.asking import Refused, Server, ServerAway
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.25


class Registration(NamedTuple):
    """What an instance says of itself."""

    incarnation: str
    endpoint: str
    label: Label
    model: str | None
    """Its name, if one was chosen; None: only the checkpoint counts."""
    process: str = ""
    """Who starts the incarnations."""
    checkpoint: str = ""
    dtype: str = ""
    angles: str = ""
    secret: str = ""
    """With which the engine proves that the endpoint is its own; "": it is made of `salt`."""
    salt: str = ""
    """And of the cluster's secret."""


class Registrar:
    """Keeps one instance registered.  The caller repeats `renew` after the pauses that it returns."""

    def __init__(self, server: Server, name: str, ttl_s: float) -> None:
        self.server = server
        self.registered = False
        """The last `renew` succeeded."""
        self.connected = False
        """And the server said that it uses the instance."""
        self.weights = Weights()
        """What the server has decided since its start that all instances have."""
        self.checkpoint = ""
        """What the server served when it was looked at (`checkpoint.fingerprint`)."""
        self._path = f"/cluster/instances/{quote(name, safe='')}"
        self._name = name
        self._ttl_s = ttl_s
        self._pause_s = _FIRST_PAUSE_S
        self._said_away = False
        self._latest: asyncio.Future[dict[str, Any]] | None = None

    async def look(self) -> None:
        """Before anything is loaded: whether the server would take the name, and the key; what it serves.

        Raises `Refused`; a server that is away says nothing.
        """
        try:
            answer = await self._ask("GET", "/cluster/instances")
        except ServerAway as error:
            self._away(error)
            return
        self.weights = Weights.parse(answer.get("weights"))
        self.checkpoint = str(answer.get("checkpoint") or "")
        for entry in answer.get("instances", ()):
            if entry.get("name") == self._name and entry.get("state") == "ready":
                raise Refused(f"an instance {self._name!r} is there already; give another --name")

    async def renew(self, registration: Registration) -> float:
        """Registers; returns after how many seconds to do so again.  Raises `Refused`."""
        body = {
            "incarnation": registration.incarnation,
            "endpoint": registration.endpoint,
            "label": registration.label,
            "model": registration.model,
            "process": registration.process,
            "checkpoint": registration.checkpoint,
            "dtype": registration.dtype,
            "angles": registration.angles,
            "ttl_s": self._ttl_s,
            **({"salt": registration.salt} if registration.salt else {"secret": registration.secret}),
        }
        try:
            answer = await self._ask("PUT", self._path, body)
        except ServerAway as error:
            self._away(error)
            return self._pause()
        if self._said_away:
            log.warning("%s has taken %s", self.server.place, self._name)
        self.registered, self._said_away = True, False
        self.connected = answer.get("state") == "ready"
        self.weights = Weights.parse(answer.get("decided_weights"))
        if not self.connected:
            return self._pause()
        self._pause_s = _FIRST_PAUSE_S
        return self._ttl_s / 3

    async def drained(self) -> bool:
        """Raises `Refused` or `ServerAway`."""
        return bool((await self._ask("GET", self._path)).get("drained"))

    async def leave(self) -> None:
        """Says goodbye, if the server is there to hear it; otherwise the registration runs out.

        After everything else: a `renew` that was cancelled may still be on its way.
        """
        if self._latest is not None and not self._latest.done():
            await asyncio.wait((self._latest,))
        if not self.registered:
            return
        self.registered = False
        try:
            await self._ask("DELETE", self._path)
        except (Refused, ServerAway) as error:
            log.warning("leaving %s without a goodbye: %s", self.server.place, error)

    def _away(self, error: ServerAway) -> None:
        if not self._said_away:
            log.warning("%s; trying again until it takes %s", error, self._name)
        self.registered, self.connected, self._said_away = False, False, True

    def _pause(self) -> float:
        pause, self._pause_s = self._pause_s, min(2 * self._pause_s, self._ttl_s / 3)
        return pause

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        self._latest = asyncio.ensure_future(asyncio.to_thread(self.server.ask, method, path, body))
        return await asyncio.shield(self._latest)
