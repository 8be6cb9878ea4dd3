"""CURVE: encrypted ZeroMQ connections between hosts, for members of the cluster alone.

Theory.  Sockets of TCP are encrypted and authenticated if the cluster has a secret
(`protocol/rules/cluster_secret.py`) and `--transfer-encryption` is on; those of one host (`ipc://`) never
are: the file system says who may open them.  In each connection

* **who listens** has a key pair that it drew when it started.  Its public key stands in the endpoint that it
  tells others, `tcp://10.0.0.7:4711?curve=HEX`, and so goes where the endpoint goes: in the signed
  registration to the gateway, in `Welcome`, `Submit` and `Reserve` over connections that are encrypted
  already.  So who connects knows that the one who answers is the very process that was named, not just some
  member;
* **who connects** has the key pair that is derived from the cluster's secret, so any member can make it.
   Who listens asks nobody: it lets in the keys of the secrets that it accepts (a ZAP handler in its own
  loop).  With two secrets it lets in both, and speaks with the first one's: that is how a secret is
  exchanged.

A stranger gets nothing: without the public key of who listens not even an answer to its hello, and with it a
refusal.  Keys of each connection are drawn for it, so who learns the secret later cannot read what was
recorded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from baton.ipc.sockets.half_open import HalfOpen
from baton.ipc.sockets.zeromq import has_messages
from baton.protocol.rules.cluster_secret import CURVE_CLIENT, CURVE_LEADER, Secrets

log = logging.getLogger(__name__)

HANDSHAKE_S = 3.0
"""What a handshake may take: then the connection is closed."""
_DOMAIN = b"baton"
_ZAP = "inproc://zeromq.zap.01"
_SUFFIX = re.compile(r"\?curve=([0-9a-f]{64})\Z", re.ASCII)

Socket = zmq.Socket[bytes]


class Unprotected(ValueError):
    """Two ends disagree whether they encrypt; the message says how."""


class Place(NamedTuple):
    """An endpoint as others are told it."""

    address: str
    """For ZeroMQ."""
    key: bytes = b""
    """The public key of who listens there; empty: it does not encrypt."""

    @classmethod
    def parse(cls, endpoint: str) -> Place:
        found = _SUFFIX.search(endpoint)
        return cls(endpoint[: found.start()], bytes.fromhex(found[1])) if found else cls(endpoint)

    def __str__(self) -> str:
        return f"{self.address}?curve={self.key.hex()}" if self.key else self.address


class Encryption:
    """The keys of one process.  Raises `ValueError` without a secret."""

    def __init__(self, secrets: Secrets, *, leads: bool = False) -> None:
        """`leads`: it listens for relays, which nobody has told its key (`leader_keys`)."""
        if not secrets:
            raise ValueError("encryption needs the cluster's secret")
        pairs = [_pair(secret.key(CURVE_CLIENT)) for secret in secrets.accepted]
        self._public, self._secret = pairs[0]
        self._server_public, self._server_secret = (
            _pair(secrets.first.key(CURVE_LEADER)) if leads else zmq.curve_keypair()
        )
        self.allowed = frozenset(z85.decode(public) for public, _ in pairs)
        """Public keys of those who may connect."""

    def serve(self, socket: Socket) -> None:
        """Before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def announced(self, address: str) -> str:
        """The endpoint of a socket that serves there, for others."""
        return str(Place(address, z85.decode(self._server_public)))

    def connect(self, socket: Socket, key: bytes) -> None:
        """Before it is connected to where the owner of `key` listens."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(key))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret)


def leader_keys(secrets: Secrets) -> list[bytes]:
    """The public keys with which the leader of an instance on several hosts may listen, one for each accepted
    secret.  The only ones that are derived: a relay knows an address and the secret, and nothing else, before
    it has spoken to the leader."""
    return [z85.decode(_pair(secret.key(CURVE_LEADER))[0]) for secret in secrets.accepted]


def protect(socket: Socket, endpoint: str, encryption: Encryption | None) -> str:
    """Of a socket that connects: returns the address.  Raises `Unprotected`: never does one end speak in
    clear because the other one's name was told so."""
    place = Place.parse(endpoint)
    if not place.address.startswith("tcp:"):
        return place.address
    if encryption is None and place.key:
        raise Unprotected(
            f"{place.address} is encrypted, and here there is no --cluster-secret to do so with"
        )
    if encryption is not None:
        if not place.key:
            raise Unprotected(
                f"{place.address} is not encrypted, and here everything is: start both with the same "
                "--cluster-secret and --transfer-encryption"
            )
        encryption.connect(socket, place.key)
    return place.address


class Doorkeeper:
    """Lets those connect who have a key of `encryption.allowed`: libzmq asks here about each handshake (ZAP,
    RFC 27).  Belongs to one context, which closes it, and to the loop that calls `turn`; make it before
    sockets are bound."""

    def __init__(self, context: zmq.Context[Any], encryption: Encryption | None) -> None:
        """`encryption` None: nothing is asked here."""
        self.encryption = encryption
        self._allowed = encryption.allowed if encryption is not None else frozenset()
        self.half_open = HalfOpen(HANDSHAKE_S + 1)
        self._guarded: list[Socket] = []
        self._socket: Socket | None = None
        if encryption is not None:
            self._socket = context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(_ZAP)
        self.refused = 0
        """Handshakes of those who have no key of this cluster."""
        self._counted = (0, 0)

    def descriptors(self) -> tuple[int, ...]:
        """Readable when `turn` has something to do; ask `busy` before sleeping on them."""
        asked = () if self._socket is None else (self._socket.fileno(),)
        return (*asked, *self.half_open.descriptors())

    def busy(self) -> bool:
        return (self._socket is not None and has_messages(self._socket)) or self.half_open.busy()

    def guard(self, socket: Socket) -> None:
        """Of TCP, before it is bound: who connects to it must be let in here."""
        if self.encryption is not None:
            self.encryption.serve(socket)
            self.half_open.watch(socket)
            self._guarded.append(socket)

    def guards(self, socket: Socket) -> bool:
        """Whether `half_open` reads its monitor: there is only one of a socket."""
        return socket in self._guarded

    def announced(self, address: str) -> str:
        """The endpoint of a socket that is bound there, for others."""
        if self.encryption is None or not address.startswith("tcp:"):
            return address
        return self.encryption.announced(address)

    def turn(self, limit: int = 64) -> None:
        self.half_open.turn()
        while limit > 0 and self._socket is not None and has_messages(self._socket):
            self._answer(self._socket, self._socket.recv_multipart(zmq.NOBLOCK))
            limit -= 1

    def count(self, refused: Callable[[str, int], None]) -> None:
        """Calls it with how many have been refused where, if there are more than before."""
        found = (self.refused + self.half_open.failed, self.half_open.ended)
        for where, now, before in zip(("handshake", "half_open"), found, self._counted, strict=True):
            if now != before:
                refused(where, now)
        self._counted = found

    def _answer(self, socket: Socket, frames: list[bytes]) -> None:
        sender, _, version, number, domain, address, _, mechanism, *credentials = frames
        right = domain == _DOMAIN and mechanism == b"CURVE" and set(credentials) <= self._allowed
        if not right or len(credentials) != 1:
            self.refused += 1
            log.warning(
                "a connection from %s is refused: it has no key of this cluster's secret (--cluster-secret)",
                address.decode("latin-1"),
            )
        said = (b"200", b"OK", b"member") if right else (b"400", b"no member of this cluster", b"")
        socket.send_multipart([sender, b"", version, number, *said, b""], zmq.NOBLOCK)


def _pair(seed: bytes) -> tuple[bytes, bytes]:
    """(public, secret) of 32 bytes, as ZeroMQ writes them."""
    secret = z85.encode(seed)
    return zmq.curve_public(secret), secret
