"""With what a member begins a connection to a page server, before anything else is said.  No I/O.

Theory.  A handshake of TLS costs some hundred microseconds of a processor and the work of a large library on
bytes of a stranger.  So the first bytes of a connection are a *knock*: a nonce and an HMAC-SHA256 of it and
of the server's key, by a key of the cluster's secret.  It is checked in microseconds, and who has no secret
gets no further.  It proves no more than that: who the reader is, TLS says.

A knock is for one server, which has drawn its key at its start, and opens once: the server remembers the
latest `_MAX_NONCES`.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict

from baton.protocol.rules.cluster_secret import PAGE_KNOCKS, ClusterSecret, Secrets

NONCE_BYTES = 16
KNOCK_BYTES = 2 * NONCE_BYTES
_MAX_NONCES = 4096


def knock(secret: ClusterSecret, server: bytes, nonce: bytes) -> bytes:
    """`KNOCK_BYTES` for the server with this key (the fingerprint in its address); `nonce`: random."""
    return nonce + _proof(secret.key(PAGE_KNOCKS), server, nonce)


class Knocks:
    """The side of a server with this key."""

    def __init__(self, secrets: Secrets, server: bytes) -> None:
        self._keys = [secret.key(PAGE_KNOCKS) for secret in secrets.accepted]
        self._server = server
        self._heard: OrderedDict[bytes, None] = OrderedDict()

    def why_not(self, heard: bytes) -> str:
        """Why this one opens nothing; "" if it does, which is once."""
        nonce, proof = heard[:NONCE_BYTES], heard[NONCE_BYTES:]
        if not any(hmac.compare_digest(_proof(key, self._server, nonce), proof) for key in self._keys):
            return "it has no key of this cluster's secret (--cluster-secret), or means another process"
        if nonce in self._heard:
            return "it repeats what a member has sent"
        self._heard[nonce] = None
        if len(self._heard) > _MAX_NONCES:
            self._heard.popitem(last=False)
        return ""


def _proof(key: bytes, server: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, server + nonce, "sha256")[:NONCE_BYTES]
