"""Signed requests of members to a gateway, and its signed answers.  Pure: no I/O, the clock an argument.

Theory.  An instance joins, renews, drains and leaves by HTTP.  Each such request carries, in its
`Authorization` header, an HMAC-SHA256 keyed with a key of the cluster's secret over everything that it says:

    Baton-Member server=…, time=…, nonce=…, body=SHA-256 of the body, mac=…
    mac over ("request", server, time, nonce, body, method, path with query)

The answer carries one over (server, the request's nonce, status, its body), in `Baton-Signature`; so an
instance knows that it speaks to a gateway that has the secret, about this request and no other one.

**Replays.**  A gateway process draws an id when it starts (`server`), and takes requests that are signed for
this id alone: what was sent to another gateway, or to the one that was here before, is worth nothing.  An
instance learns the id from the signed refusal of its first request, and asks again.  Within the life of one
gateway each nonce is taken once.  Nonces are remembered for `SKEW_S` in both directions, and requests of
other times are refused; so the memory is bounded.  Only nonces of requests with a right signature are
remembered: who has no secret cannot fill it.

| request | what follows |
| --- | --- |
| no signature, another secret | `Refusal("unknown")`, which cannot be signed |
| signed for another server | `Refusal("server")`, signed |
| its time is further away than `SKEW_S` | `Refusal("time")`, signed |
| its nonce was there | `Refusal("replayed")`, signed |
| the memory is full | `Refusal("busy")`, signed |
| otherwise | `Signed` |
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections import deque
from typing import Literal, NamedTuple

from baton.protocol.rules.cluster_secret import SIGNATURES, ClusterSecret, Secrets

SCHEME = "Baton-Member"
ANSWER_HEADER = "Baton-Signature"
SKEW_S = 60.0
"""How far the clocks of two members may be apart, the time on the way included."""
MAX_NONCES = 1 << 16
"""That are remembered: 500 requests of members a second."""
MAX_BODY = 64 << 10
"""Bytes of a signed request's body."""

_HEADER = re.compile(
    rf"{SCHEME} server=([0-9a-f]{{32}}|), time=([0-9]{{1,12}}\.[0-9]{{3}}), nonce=([0-9a-f]{{32}}), "
    r"body=([0-9a-f]{64}), mac=([0-9a-f]{64})\Z",
    re.ASCII,
)
_ANSWER = re.compile(r"server=([0-9a-f]{32}), mac=([0-9a-f]{64})\Z", re.ASCII)
NO_BODY = hashlib.sha256(b"").hexdigest()

Why = Literal["unknown", "server", "time", "replayed", "busy"]


class Signed(NamedTuple):
    """A request whose head is right; its body must have `body` as its SHA-256."""

    secret: ClusterSecret
    nonce: str
    body: str


class Refusal(NamedTuple):
    why: Why
    secret: ClusterSecret | None = None
    """To sign the answer with."""
    nonce: str = ""
    away_s: float = 0.0
    """With `time`: the sender's clock is so far ahead of this one."""


class Question(NamedTuple):
    """A request that a member has signed."""

    header: str
    """Of `Authorization`."""
    secret: ClusterSecret
    nonce: str


class Reply(NamedTuple):
    """A gateway's answer, checked."""

    server: str


def sign_request(
    secret: ClusterSecret, server: str, now: float, nonce: bytes, method: str, path: str, body: bytes
) -> Question:
    """`server`: the gateway's id, "" while it is not known; `now`: seconds since 1970; `nonce`: 16 random
    bytes; `path`: with the query, if there is one."""
    time, text, digest = f"{now:.3f}", nonce.hex(), hashlib.sha256(body).hexdigest()
    mac = _mac(secret, "request", server, time, text, digest, method, path)
    header = f"{SCHEME} server={server}, time={time}, nonce={text}, body={digest}, mac={mac}"
    return Question(header, secret, text)


def sign_answer(secret: ClusterSecret, server: str, nonce: str, status: int, body: bytes) -> str:
    """The header `ANSWER_HEADER`."""
    return f"server={server}, mac={_answer_mac(secret, server, nonce, status, body)}"


def check_answer(question: Question, header: str, status: int, body: bytes) -> Reply | None:
    """None: this is not the answer of a gateway with our secret to this request."""
    found = _ANSWER.match(header)
    if found is None:
        return None
    server, mac = found.groups()
    right = _answer_mac(question.secret, server, question.nonce, status, body)
    return Reply(server) if hmac.compare_digest(right, mac) else None


class Verifier:
    """The side of a gateway.  `server`: its id, 16 random bytes in hex, another one after each start."""

    def __init__(self, secrets: Secrets, server: str) -> None:
        self.server = server
        self._secrets = secrets
        self._nonces: set[str] = set()
        self._order: deque[tuple[float, str]] = deque()
        """(until when it is remembered, nonce)."""

    def check(self, header: str, method: str, path: str, now: float) -> Signed | Refusal:
        """`now`: seconds since 1970."""
        found = _HEADER.match(header)
        if found is None:
            return Refusal("unknown")
        server, time, nonce, body, mac = found.groups()
        secret = None
        for one in self._secrets.accepted:
            if hmac.compare_digest(_mac(one, "request", server, time, nonce, body, method, path), mac):
                secret = one
        if secret is None:
            return Refusal("unknown")
        if server != self.server:
            return Refusal("server", secret, nonce)
        away_s = float(time) - now
        if abs(away_s) > SKEW_S:
            return Refusal("time", secret, nonce, away_s)
        while self._order and self._order[0][0] < now:
            self._nonces.discard(self._order.popleft()[1])
        if nonce in self._nonces:
            return Refusal("replayed", secret, nonce)
        if len(self._order) >= MAX_NONCES:
            return Refusal("busy", secret, nonce)
        self._nonces.add(nonce)
        # (Its time may be SKEW_S ahead, and it would be taken until SKEW_S after that.)
        self._order.append((now + 2 * SKEW_S, nonce))
        return Signed(secret, nonce, body)


def _answer_mac(secret: ClusterSecret, server: str, nonce: str, status: int, body: bytes) -> str:
    return _mac(secret, "answer", server, nonce, str(status), hashlib.sha256(body).hexdigest())


def _mac(secret: ClusterSecret, *fields: str) -> str:
    message = b"".join(len(field).to_bytes(4, "little") + field for field in (one.encode() for one in fields))
    return hmac.new(secret.key(SIGNATURES), message, hashlib.sha256).hexdigest()
