"""With which keys pages travel encrypted: TLS 1.3 between members of the cluster, both ends pinned.

Theory.  Each process draws a key when it starts (Ed25519) and makes a certificate for it, which it signs with
the key that is derived from the cluster's secret: every member can do that, and nobody else.  Names in it
mean nothing.  Both ends of a connection show theirs:

* **a page server** is known by the SHA-256 of its certificate, which stands in the address that others are
  told, `10.0.0.7:4711?tls=HEX`.  So a reader knows that the very process answers that its peer has named;
* **a reader** is let in if its certificate is signed with the key of a secret that the server accepts, so it
  is a member; and it is known by the SHA-256 of its certificate too, which each grant names (`grants.py`).
  So no member reads what was granted to another one.

Both travel only over the engines' encrypted connections (`ipc/sockets/curve.py`).  While one secret is
exchanged for another a server accepts two, and a reader signs with the first.

Keys are drawn for each connection, so who learns the secret later cannot read what was recorded.

**What travels how.**  The reader knocks (`protocol/rules/knock.py`): who does not know how gets an alert, and
no byte of a stranger reaches TLS.  TLS 1.3 opens the connection: the two ends prove who they are and agree on
keys that nobody else knows.  Then the server sends one message through TLS, two random keys, and neither end
uses TLS any more: from there on each direction is a sequence of records under its key (`sealing.py`).  As the
server says nothing more before it is asked, and the reader nothing before it has the keys, no byte of a
record can be taken for TLS.

Why not TLS for all.  Its records have 16 KiB, and Python's `ssl` needs system calls and copies for each: a
processor's second moves less than half as many pages.

The package `cryptography` seals the records and makes the certificates, which Python's `ssl` cannot.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from datetime import datetime
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from baton.protocol.rules.cluster_secret import PAGE_MEMBERS, ClusterSecret, Secrets
from baton.protocol.rules.knock import KNOCK_BYTES, NONCE_BYTES, Knocks, knock
from baton.transfer.base import TransferError
from baton.transfer.tasks import READ, WRITE, Wait
from baton.transfer.transports.channel import Budget, NotAMember
from baton.transfer.transports.page_stream import Closed, Step
from baton.transfer.transports.sealed import QUESTION_BYTES, SealedChannel
from baton.transfer.transports.sealing import KEY_BYTES, RECORD_BYTES

_ALERT = b"\x15\x03\x03\x00\x02\x02\x31"
"""TLS: access_denied."""
_REFUSED = "it refuses this instance's key: is its --cluster-secret another one?"
_FIRST, _LAST = datetime(2000, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
"""No certificate of these ever runs out: what ends is the secret, or the process."""


class PageEncryption:
    """Those of one process.  Raises `ValueError` without a secret."""

    def __init__(self, secrets: Secrets) -> None:
        if not secrets:
            raise ValueError("encryption of pages needs the cluster's secret")
        drawn = Ed25519PrivateKey.generate()
        certificate = _certificate(drawn.public_key(), "member", secrets.first)
        self.key = sha256(certificate.public_bytes(Encoding.DER)).digest()
        self.fingerprint = self.key.hex()
        """Of this process' certificate: 64 digits."""
        self._secret = secrets.first
        self._knocks = Knocks(secrets, self.key)
        self._serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._serving.num_tickets = 0  # nobody resumes a connection, and nothing follows the handshake
        self._serving.verify_mode = ssl.CERT_REQUIRED
        for secret in secrets.accepted:
            self._serving.load_verify_locations(cadata=_of_cluster(secret).public_bytes(Encoding.DER))
        self._reading = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._reading.check_hostname = False
        self._reading.verify_mode = ssl.CERT_NONE  # (the fingerprint is compared instead: `_is_of`)
        for context in (self._serving, self._reading):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            _load(context, drawn, certificate)

    def open(self, connection: socket.socket, fingerprint: str, budget: Budget) -> Step:
        """The reader's end, to the server of this fingerprint."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        # (In one packet with the beginning of the handshake.)
        outgoing.write(knock(self._secret, bytes.fromhex(fingerprint), os.urandom(NONCE_BYTES)))
        tls = self._reading.wrap_bio(incoming, outgoing)
        yield from _shake(connection, tls, incoming, outgoing, budget)
        shown = _shown(tls)
        if shown.hex() != fingerprint:
            raise NotAMember("another process than the one that was named answers there")
        while True:
            try:
                sending, receiving = _halves(tls.read(2 * KEY_BYTES))
                return SealedChannel(connection, sending, receiving, RECORD_BYTES, shown)
            except ssl.SSLWantReadError:
                yield from _feed(connection, incoming, budget)
            except ssl.SSLError as error:
                raise NotAMember(_REFUSED) from error

    def listen(self, connection: socket.socket, budget: Budget) -> Step:
        """The server's end, first: until the other end has knocked."""
        heard = b""
        while len(heard) < KNOCK_BYTES:
            try:
                heard += yield from _receive(connection, KNOCK_BYTES - len(heard), budget)
            except (Closed, ConnectionError):
                if heard:
                    raise NotAMember("it said something, and left") from None
                raise
        problem = self._knocks.why_not(heard)
        if problem:
            with contextlib.suppress(OSError):
                connection.recv(4096)  # (what is unread when a connection is closed may lose what was sent)
                connection.send(_ALERT)
            raise NotAMember(problem)

    def accept(self, connection: socket.socket, budget: Budget) -> Step:
        """The server's end."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._serving.wrap_bio(incoming, outgoing, server_side=True)
        yield from _shake(connection, tls, incoming, outgoing, budget)
        made = os.urandom(2 * KEY_BYTES)
        tls.write(made)
        yield from _flush(connection, outgoing, budget)
        receiving, sending = _halves(made)
        return SealedChannel(connection, sending, receiving, QUESTION_BYTES, _shown(tls))


def _shown(connection: ssl.SSLObject) -> bytes:
    """SHA-256 of the certificate whose key the other end has proved to have, after the handshake."""
    shown = connection.getpeercert(binary_form=True)
    if shown is None:
        raise NotAMember("it has shown no certificate")
    return sha256(shown).digest()


def _of_cluster(secret: ClusterSecret) -> x509.Certificate:
    """That of the key with which members sign; each of them can make it."""
    return _certificate(_signing(secret).public_key(), _name_of(secret), secret, signs=True)


def _signing(secret: ClusterSecret) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(secret.key(PAGE_MEMBERS))


def _name_of(secret: ClusterSecret) -> str:
    return f"cluster {secret.id}"


def _certificate(
    key: Ed25519PublicKey, name: str, secret: ClusterSecret, *, signs: bool = False
) -> x509.Certificate:
    """Of this key, signed by who has the secret; `signs`: it may sign others."""
    subject, issuer = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, n)]) for n in (name, _name_of(secret))
    )
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    made = made.serial_number(1).not_valid_before(_FIRST).not_valid_after(_LAST)
    made = made.add_extension(
        x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True
    )
    return made.sign(_signing(secret), None)


def _load(context: ssl.SSLContext, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
    """`ssl` takes keys from files alone: this one is memory, and gone afterwards."""
    pem = certificate.public_bytes(Encoding.PEM)
    pem += key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file = os.memfd_create("baton-page-keys", os.MFD_CLOEXEC)
    try:
        os.write(file, pem)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


def _halves(keys: bytes) -> tuple[bytes, bytes]:
    """Of questions, and of answers."""
    if len(keys) != 2 * KEY_BYTES:
        raise TransferError("it does not answer as a page server")
    return keys[:KEY_BYTES], keys[KEY_BYTES:]


def _shake(
    connection: socket.socket,
    tls: ssl.SSLObject,
    incoming: ssl.MemoryBIO,
    outgoing: ssl.MemoryBIO,
    budget: Budget,
) -> Step:
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            yield from _flush(connection, outgoing, budget)
            yield from _feed(connection, incoming, budget)
        except ssl.SSLError as error:
            yield from _flush(connection, outgoing, budget)  # the alert: the other end is told
            if error.reason is not None and "ALERT_ACCESS_DENIED" in error.reason:
                raise NotAMember(_REFUSED) from None
            raise NotAMember(f"no handshake ({error.reason or error})") from None
        else:
            yield from _flush(connection, outgoing, budget)
            return


def _feed(connection: socket.socket, incoming: ssl.MemoryBIO, budget: Budget) -> Step:
    incoming.write((yield from _receive(connection, 4096, budget)))


def _receive(connection: socket.socket, most: int, budget: Budget) -> Step:
    """What has come, at least a byte."""
    while True:
        if budget.bytes_left <= 0:
            raise NotAMember("it sends too much before it has proved itself")
        try:
            data = connection.recv(min(budget.bytes_left, most))
        except BlockingIOError:
            yield from _wait(connection, READ, budget)
            continue
        if not data:
            raise Closed
        budget.bytes_left -= len(data)
        return data


def _flush(connection: socket.socket, outgoing: ssl.MemoryBIO, budget: Budget) -> Step:
    rest = outgoing.read()
    while rest:
        try:
            rest = rest[connection.send(rest) :]
        except BlockingIOError:
            yield from _wait(connection, WRITE, budget)


def _wait(connection: socket.socket, events: int, budget: Budget) -> Step:
    resumed = yield Wait(connection.fileno(), events, budget.seconds_left())
    if resumed is False:
        raise NotAMember("it has not proved itself in time")
