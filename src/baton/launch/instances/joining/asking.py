"""One HTTP request of an instance to a server, and what the answer means.

| answer | meaning |
| --- | --- |
| 2xx | what was asked for |
| 400, 401, 403, 404, 405, 409 | it does not want this instance, or is no server of Baton: `Refused` |
| anything else, or none | the server is away or starting: `ServerAway` |

With a cluster secret each request is signed, and the answer must be (`protocol/rules/signing.py`).  One that
is not comes from somebody else.  When it is the first answer at all a person should look, so it is
`Refused`; when this server has proven itself before, somebody is in between or has its address, and it
counts as away: nobody but the server can send an instance away.
"""

from __future__ import annotations

import http.client
import re
import secrets
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from functools import cache, partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from baton.launch.limits import OptionError
from baton.protocol.rules.cluster_secret import NO_SECRETS, Secrets
from baton.protocol.rules.signing import ANSWER_HEADER, check_answer, sign_request

_TIMEOUT_S = 5.0
_REFUSALS = (400, 401, 403, 404, 405, 409)
_TRANSIENT = ("other_server", "replayed", "clocks_differ")
"""Of signed refusals: the server has been started anew, a packet came twice; clocks are set meanwhile."""
_HOST = r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)"
_PLACE = re.compile(rf"{_HOST}:[0-9]{{1,5}}|https?://{_HOST}(:[0-9]{{1,5}})?/?")
_MAX_ANSWER = 1 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key and the secret are for the server that was named, and for nobody it names."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Connection(http.client.HTTPConnection):
    """To one address of the name that the URL has."""

    def __init__(self, host: str, *, address: str, **more: Any) -> None:
        super().__init__(host, **more)
        _lead_to(self, address)


class _TlsConnection(http.client.HTTPSConnection):
    """The same; the certificate is the name's."""

    def __init__(self, host: str, *, address: str, **more: Any) -> None:
        super().__init__(host, **more)
        _lead_to(self, address)


def _lead_to(connection: http.client.HTTPConnection, address: str) -> None:
    if address:
        connection._create_connection = lambda at, *more: (  # type: ignore[attr-defined]
            socket.create_connection((address, at[1]), *more)
        )


class _Http(urllib.request.HTTPHandler):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Connection, address=self._address), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        there = partial(_TlsConnection, address=self._address, context=ssl.create_default_context())
        return self.do_open(there, request)


@cache
def _opener(address: str) -> urllib.request.OpenerDirector:
    """Never through a proxy: the server is in the same cluster."""
    handlers = (urllib.request.ProxyHandler({}), _NoRedirects, _Http(address), _Https(address))
    return urllib.request.build_opener(*handlers)


class Refused(RuntimeError):
    """The server does not want this instance; the message is its own."""


class ServerAway(RuntimeError):
    """No answer, or none that says anything about the instance."""


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def error(self) -> tuple[str, str]:
        """(code, message) of an error in OpenAI's shape; "" if it has another."""
        try:
            error = msgspec.json.decode(self.data)["error"]
            return str(error.get("code")), str(error["message"])
        except (msgspec.DecodeError, LookupError, TypeError, AttributeError):
            return "", ""


@dataclass
class Server:
    """Where the server is.  Blocking calls, for threads."""

    url: str
    admin_key: str | None = None
    accepted: Secrets = NO_SECRETS
    address: str = ""
    """Of its name, if it has several; "": any."""
    _id: str = ""
    """Of the process that answers there (`signing.py`); "" until it has proven itself."""

    @property
    def host(self) -> str:
        """Its name or address, without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.url} ({self.address})" if self.address else self.url

    def at(self, address: str) -> Server:
        """That of its gateways which has this address."""
        return Server(self.url, self.admin_key, self.accepted, address)

    @classmethod
    def parse(cls, text: str, admin_key: str | None, accepted: Secrets | None = None) -> Server:
        """HOST:PORT, or a URL.  Raises `OptionError`."""
        if not _PLACE.fullmatch(text):
            raise OptionError(f"--join {text}: give HOST:PORT of a running server, such as 127.0.0.1:8000")
        url = text if "://" in text else f"http://{text}"
        return cls(url.rstrip("/"), admin_key, accepted or NO_SECRETS)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Raises `Refused` or `ServerAway`."""
        data = b"" if body is None else msgspec.json.encode(body)
        answer = self._ask_signed(method, path, data) if self.accepted else self._ask(method, path, data)
        if answer.status >= 300:
            message = answer.error[1] or f"HTTP status {answer.status}"
            raise Refused(message) if answer.status in _REFUSALS else ServerAway(message)
        try:
            return msgspec.json.decode(answer.data, type=dict[str, Any])
        except msgspec.DecodeError:
            raise Refused(f"{self.url}{path} answers something else than JSON; is it a Baton?") from None

    # -- inside

    def _ask_signed(self, method: str, path: str, data: bytes) -> _Answer:
        """The answer of a server that has shown that it knows the secret, to this very request.

        Raises `ServerAway` also for a refusal that has nothing to do with the instance."""
        for _ in range(2):
            question = sign_request(
                self.accepted.first, self._id, time.time(), secrets.token_bytes(16), method, path, data
            )
            answer = self._ask(method, path, data, question.header)
            header = answer.headers.get(ANSWER_HEADER.lower(), "")
            reply = check_answer(question, header, answer.status, answer.data)
            if reply is None:
                self._unproven(answer)
            else:
                known, self._id = self._id, reply.server
                code, message = answer.error
                if answer.status != 401 or code not in _TRANSIENT:
                    return answer
                if code != "other_server" and not known:
                    raise Refused(message)
                if code != "other_server":
                    raise ServerAway(message)
        raise ServerAway(f"{self.url} is another server with each answer; is a balancer there?")

    def _unproven(self, answer: _Answer) -> None:
        message = answer.error[1]
        if answer.status < 300:
            why = f"{self.url} does not show that it knows the cluster's secret; is it this cluster's server?"
        else:
            why = message or f"HTTP status {answer.status}"
        if self._id:
            raise ServerAway(f"{why} (the answer is not signed with the cluster's secret)")
        if answer.status < 300 or answer.status in _REFUSALS:
            raise Refused(why)
        raise ServerAway(why)

    def _ask(self, method: str, path: str, data: bytes, authorization: str = "") -> _Answer:
        request = urllib.request.Request(self.url + path, method=method)
        if data:
            request.data = data
            request.add_header("Content-Type", "application/json")
        if authorization:
            request.add_header("Authorization", authorization)
        elif self.admin_key is not None:
            request.add_header("Authorization", f"Bearer {self.admin_key}")
        try:
            with _opener(self.address).open(request, timeout=_TIMEOUT_S) as answer:
                return _Answer(answer.status, _lowered(answer.headers), answer.read(_MAX_ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                if 300 <= error.code < 400:
                    place = (error.headers.get("location") or "elsewhere")[:200]
                    raise Refused(f"{self.url} sends on to {place}; is that the server to --join?") from None
                return _Answer(error.code, _lowered(error.headers), error.read(_MAX_ANSWER))
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ServerAway(f"{self.place} does not answer: {reason}") from None


def _lowered(headers: Message[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
