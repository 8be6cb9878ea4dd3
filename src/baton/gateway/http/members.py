"""Requests that members of the cluster sign, and their signed answers (`protocol/rules/signing.py`), over
HTTP.

The head of a request says whether a member has signed it; `Members.check` decides by it, before anything else
is read.  `Exchange` reads the body, compares it with what was signed, gives it to the application, and signs
the answer.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.gateway.errors import ApiError, BadRequest, Forbidden, Overloaded, TooLarge, Unauthorized
from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets
from baton.protocol.rules.signing import (
    ANSWER_HEADER,
    MAX_BODY,
    SCHEME,
    Refusal,
    Signed,
    Verifier,
    sign_answer,
)

log = logging.getLogger(__name__)

_SCHEME = SCHEME.encode() + b" "
_ANSWER = ANSWER_HEADER.lower().encode()


class NoMember(Forbidden):
    """Only members of the cluster may do this, and the caller has not shown that it is one."""


class Unsigned(Unauthorized):
    """A member's signature that is wrong."""


class Unheard(Exception):
    """A member's request is refused, and the answer can be signed."""

    def __init__(self, error: ApiError, secret: ClusterSecret, nonce: str) -> None:
        super().__init__(error.message)
        self.error = error
        self.secret = secret
        self.nonce = nonce


def is_signed(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"authorization", b"").startswith(_SCHEME)


class Members:
    """Of one gateway."""

    def __init__(self, accepted: Secrets, clock: Callable[[], float] = time.time) -> None:
        self.accepted = accepted
        self._clock = clock
        self._verifier = Verifier(accepted, secrets.token_hex(16))

    def check(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Signed:
        """Raises `NoMember`, `Unsigned` or `Unheard`."""
        if not self.accepted:
            raise NoMember(
                "this server has no cluster secret, and the instance has one: start the server with the same "
                "--cluster-secret FILE",
                code="no_cluster_secret",
            )
        header = headers[b"authorization"].decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        path = scope["path"] + (f"?{query}" if query else "")
        found = self._verifier.check(header, scope["method"], path, self._clock())
        if isinstance(found, Signed):
            return found
        if found.secret is None:
            raise Unsigned(
                "the request is not signed with this cluster's secret: give the instance the same file as "
                "the server, --cluster-secret FILE",
                code="another_secret",
            )
        raise Unheard(_error(found), found.secret, found.nonce)

    def signature(self, secret: ClusterSecret, nonce: str, status: int, body: bytes) -> tuple[bytes, bytes]:
        """A header of the answer to the request with this nonce."""
        return _ANSWER, sign_answer(secret, self._verifier.server, nonce, status, body).encode()


class Exchange:
    """One signed request and its answer."""

    def __init__(self, members: Members, secret: ClusterSecret, nonce: str, send: Send) -> None:
        self._members = members
        self._secret = secret
        self._nonce = nonce
        self._send = send
        self._start: Message = {}
        self._body = b""

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, digest: str) -> None:
        """Raises `BadRequest` for a body that is not what was signed."""
        body = await _read(receive)
        if hashlib.sha256(body).hexdigest() != digest:
            raise BadRequest("the body is not the one that was signed", code="another_body")
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def received() -> Message:
            return whole.pop() if whole else await receive()

        await app(scope, received, self.send)

    async def send(self, message: Message) -> None:
        """Keeps the answer until it is complete: the signature stands before it."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if message.get("more_body"):
            return
        status = self._start["status"]
        signature = self._members.signature(self._secret, self._nonce, status, self._body)
        self._start["headers"] = [*self._start.get("headers", ()), signature]
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": self._body})


async def _read(receive: Receive) -> bytes:
    """A body.  Raises `TooLarge`."""
    body = b""
    while True:
        message = await receive()
        piece: bytes = message.get("body", b"")
        body += piece
        if len(body) > MAX_BODY:
            raise TooLarge(f"the body is larger than {MAX_BODY >> 10} KiB, the limit of members' requests")
        if not message.get("more_body"):  # (it is complete, or the connection is lost)
            return body


def _error(refusal: Refusal) -> ApiError:
    if refusal.why == "server":
        return Unauthorized(
            "signed for another server, or for this one before its start", code="other_server"
        )
    if refusal.why == "time":
        way = "ahead of" if refusal.away_s > 0 else "behind"
        return Unauthorized(
            f"the instance's clock is {abs(refusal.away_s):.0f} s {way} the server's; set both (NTP)",
            code="clocks_differ",
        )
    if refusal.why == "replayed":
        return Unauthorized("this request was made before; it counts once", code="replayed")
    return Overloaded(
        "members ask more often than this server keeps in mind", code="too_many_requests", retry_after_s=60
    )
