"""How an instance registers with a server: HTTP requests, when to repeat them, what an answer means.

| answer | meaning |
| --- | --- |
| 2xx | the server knows the instance for another `ttl_s`; it connects, and says `ready` next time |
| 400, 401, 403, 404, 405, 409 | it does not want this instance, or is no server of Baton: `Refused` |
| anything else, or none | the server is away or starting: try again, with growing pauses |
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from baton.gateway.cluster.member import Label
from baton.launch.limits import OptionError
from baton.protocol.weights import Weights

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.25
_REFUSALS = (400, 401, 403, 404, 405, 409)
_HOST = r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)"
_PLACE = re.compile(rf"{_HOST}:[0-9]{{1,5}}|https?://{_HOST}(:[0-9]{{1,5}})?/?")
_MAX_ANSWER = 1 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key and the secret are for the server that was named, and for nobody it names."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""Never through a proxy: the server is in the same cluster."""


class Refused(RuntimeError):
    """The server does not want this instance; the message is its own."""


class ServerAway(RuntimeError):
    """No answer, or none that says anything about the instance."""


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
    """With which the engine proves that the endpoint is its own."""


@dataclass(frozen=True)
class Server:
    """Where the server is.  Blocking calls, for threads."""

    url: str
    admin_key: str | None = None

    @property
    def host(self) -> str:
        """Its name or address, without brackets."""
        return urlsplit(self.url).hostname or ""

    @classmethod
    def parse(cls, text: str, admin_key: str | None) -> Server:
        """HOST:PORT, or a URL.  Raises `OptionError`."""
        if not _PLACE.fullmatch(text):
            raise OptionError(f"--join {text}: give HOST:PORT of a running server, such as 127.0.0.1:8000")
        url = text if "://" in text else f"http://{text}"
        return cls(url.rstrip("/"), admin_key)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises `Refused` or `ServerAway`."""
        request = urllib.request.Request(self.url + path, method=method)
        if body is not None:
            request.data = msgspec.json.encode(body)
            request.add_header("Content-Type", "application/json")
        if self.admin_key is not None:
            request.add_header("Authorization", f"Bearer {self.admin_key}")
        try:
            with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
                data = answer.read(_MAX_ANSWER)
        except urllib.error.HTTPError as error:
            if 300 <= error.code < 400:
                error.close()
                place = (error.headers.get("location") or "elsewhere")[:200]
                raise Refused(f"{self.url} sends on to {place}; is that the server to --join?") from None
            with error:
                message = _message(error.read(_MAX_ANSWER)) or str(error)
            if error.code in _REFUSALS:
                raise Refused(message) from None
            raise ServerAway(message) from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ServerAway(f"{self.url} does not answer: {reason}") from None
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.DecodeError:
            raise Refused(f"{self.url}{path} answers something else than JSON; is it a Baton?") from None


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
            "secret": registration.secret,
            "ttl_s": self._ttl_s,
        }
        try:
            answer = await self._ask("PUT", self._path, body)
        except ServerAway as error:
            self._away(error)
            return self._pause()
        if self._said_away:
            log.warning("%s has taken %s", self.server.url, self._name)
        self.registered, self._said_away = True, False
        self.connected = answer.get("state") == "ready"
        self.weights = Weights.parse(answer.get("decided_weights"))
        if not self.connected:
            return self._pause()
        self._pause_s = _FIRST_PAUSE_S
        return self._ttl_s / 3

    async def drain(self, move_after_s: float) -> None:
        """Raises `Refused` or `ServerAway`."""
        await self._ask("POST", self._path, {"state": "draining", "move_after_s": move_after_s})

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
            log.warning("leaving without a goodbye: %s", error)

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


def _message(data: bytes) -> str:
    """Of an error in OpenAI's shape; "" if it has another."""
    try:
        return str(msgspec.json.decode(data)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""
