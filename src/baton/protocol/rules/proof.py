"""How an instance that joined and its servers prove to each other that they are who registered.

With its registration an instance gives a secret that only it and the server know.  The server's `Hello`
carries a nonce and a claim, an HMAC of it keyed with the secret; the `Welcome` carries an answer, another
one.  So the engine listens to those alone with whom its instance registered, and the
process at the registered endpoint is the one that registered it, not another that was named or listens there.

It hides nothing: the secret and all that follows are as readable as the network is.
"""

from __future__ import annotations

import hashlib
import hmac

MIN_SECRET, MAX_SECRET = 32, 128
"""Characters."""
SECRET_VARIABLE = "BATON_INSTANCE_SECRET"
"""How an engine's process is told: arguments can be read by everybody on a machine."""
NONCE_BYTES = 16
_MAX_ADMITTED = 4096
"""Connections of servers, those that ended included."""


def claim(secret: str, nonce: bytes, gateway: str, incarnation: str) -> bytes:
    """What the `Hello` of `gateway` to `incarnation` must carry."""
    return _keyed(secret, b"baton gateway", nonce, gateway, incarnation)


def answer(secret: str, nonce: bytes, gateway: str, incarnation: str) -> bytes:
    """What the `Welcome` of `incarnation` to `gateway` must carry."""
    return _keyed(secret, b"baton instance", nonce, gateway, incarnation)


def _keyed(secret: str, purpose: bytes, nonce: bytes, gateway: str, incarnation: str) -> bytes:
    fields = (purpose, nonce, gateway.encode(), incarnation.encode())
    message = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    return hmac.new(secret.encode(), message, hashlib.sha256).digest()


class Prover:
    """The side of the engine.  Without a secret everybody is admitted: only who may enter its directory can
    reach its socket then."""

    def __init__(self, secret: str, incarnation: str) -> None:
        self._secret = secret
        self._incarnation = incarnation
        self._admitted: dict[bytes, tuple[bytes, str]] = {}

    def admits(self, sender: bytes, nonce: bytes, gateway: str, claimed: bytes) -> bool:
        """Whether this `Hello` comes from a server that knows the secret."""
        if not self._secret:
            return True
        if not nonce or not hmac.compare_digest(
            claimed, claim(self._secret, nonce, gateway, self._incarnation)
        ):
            return False
        self._admitted.pop(sender, None)
        self._admitted[sender] = nonce, gateway
        if len(self._admitted) > _MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        return True

    def knows(self, sender: bytes) -> bool:
        """Whether this connection has been admitted."""
        return not self._secret or sender in self._admitted

    def answer(self, sender: bytes) -> bytes:
        """For the `Welcome` to this connection; empty if nothing was asked."""
        asked = self._admitted.get(sender)
        return b"" if asked is None else answer(self._secret, *asked, self._incarnation)
