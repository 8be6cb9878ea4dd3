"""With which keys pages travel encrypted: TLS 1.3 between members of the cluster, both ends pinned.

Theory.  There is no certificate authority and no name to check.  A certificate here is only the form in which
TLS wants a public key (Ed25519, self-signed):

* **a page server** draws its key when it starts.  The SHA-256 of its certificate stands in the address that
  others are told, `10.0.0.7:4711?tls=HEX`, which travels only over the engines' encrypted connections
  (`ipc/curve.py`).  So a reader knows that the very process answers that its peer has named;
* **a reader** has the key that is derived from the cluster's secret.  Ed25519 signs without chance, so every
  member makes the same certificate, byte for byte, and a server trusts exactly those of the secrets that it
  accepts.  While one secret is exchanged for another these are two; a reader shows the first one's.

Keys are drawn for each connection, so who learns the secret later cannot read what was recorded.

**What travels how.**  TLS 1.3 opens the connection: the two ends prove who they are and agree on keys that
nobody else knows.  Then the server sends one message through TLS, two random keys, and neither end uses
TLS any more: from there on each direction is a sequence of records under its key (`sealing.py`).  As the
server says nothing more before it is asked, and the reader nothing before it has the keys, no byte of a
record can be taken for TLS.

Why not TLS for all.  Its records have 16 KiB, and Python's `ssl` needs system calls and copies for each: a
processor's second moves less than half as many pages.

The package `cryptography` seals the records and makes the certificates, which Python's `ssl` cannot.
"""

from __future__ import annotations

import os
import socket
import ssl
from datetime import datetime
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from baton.protocol.rules.cluster_secret import PAGE_READER, ClusterSecret, Secrets
from baton.transfer.base import TransferError
from baton.transfer.tasks import READ, WRITE, Wait
from baton.transfer.transports.channel import Budget, NotAMember
from baton.transfer.transports.page_stream import Closed, Step
from baton.transfer.transports.sealed import QUESTION_BYTES, SealedChannel
from baton.transfer.transports.sealing import KEY_BYTES, RECORD_BYTES

_FIRST, _LAST = datetime(2000, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
"""No certificate of these ever runs out: what ends is the secret, or the process."""


class PageEncryption:
    """Those of one process.  Raises `ValueError` without a secret."""

    def __init__(self, secrets: Secrets) -> None:
        if not secrets:
            raise ValueError("encryption of pages needs the cluster's secret")
        drawn = Ed25519PrivateKey.generate()
        certificate = _certificate(drawn, "page server")
        self.fingerprint = sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
        """Of this process' page server: 64 digits."""
        self._serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._serving.num_tickets = 0  # nobody resumes a connection, and nothing follows the handshake
        self._serving.verify_mode = ssl.CERT_REQUIRED
        for secret in secrets.accepted:
            self._serving.load_verify_locations(cadata=_of_member(secret)[1].public_bytes(Encoding.DER))
        self._reading = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._reading.check_hostname = False
        self._reading.verify_mode = ssl.CERT_NONE  # (the fingerprint is compared instead: `_is_of`)
        for context, key, own in (
            (self._serving, drawn, certificate),
            (self._reading, *_of_member(secrets.first)),
        ):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            _load(context, key, own)

    def open(self, connection: socket.socket, fingerprint: str, budget: Budget) -> Step:
        """The reader's end, to the server of this fingerprint."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._reading.wrap_bio(incoming, outgoing)
        yield from _shake(connection, tls, incoming, outgoing, budget)
        if not _is_of(tls, fingerprint):
            raise NotAMember("another process than the one that was named answers there")
        while True:
            try:
                sending, receiving = _halves(tls.read(2 * KEY_BYTES))
                return SealedChannel(connection, sending, receiving, RECORD_BYTES)
            except ssl.SSLWantReadError:
                yield from _feed(connection, incoming, budget)
            except ssl.SSLError as error:
                raise NotAMember(
                    f"it refuses this instance's key: is its --cluster-secret another one? ({error.reason})"
                ) from None

    def accept(self, connection: socket.socket, budget: Budget) -> Step:
        """The server's end."""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self._serving.wrap_bio(incoming, outgoing, server_side=True)
        yield from _shake(connection, tls, incoming, outgoing, budget)
        made = os.urandom(2 * KEY_BYTES)
        tls.write(made)
        yield from _flush(connection, outgoing, budget)
        receiving, sending = _halves(made)
        return SealedChannel(connection, sending, receiving, QUESTION_BYTES)


def _is_of(connection: ssl.SSLObject, fingerprint: str) -> bool:
    """Whether the page server with this fingerprint is at the other end, after the handshake."""
    shown = connection.getpeercert(binary_form=True)
    return shown is not None and sha256(shown).hexdigest() == fingerprint


def _of_member(secret: ClusterSecret) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    key = Ed25519PrivateKey.from_private_bytes(secret.key(PAGE_READER))
    return key, _certificate(key, f"member {secret.id}")


def _certificate(key: Ed25519PrivateKey, name: str) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(subject)
    made = made.public_key(key.public_key()).serial_number(1)
    return made.not_valid_before(_FIRST).not_valid_after(_LAST).sign(key, None)


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
            raise NotAMember(f"no handshake ({error.reason or error})") from None
        else:
            yield from _flush(connection, outgoing, budget)
            return


def _feed(connection: socket.socket, incoming: ssl.MemoryBIO, budget: Budget) -> Step:
    """What has come, at least a byte."""
    while True:
        if budget.bytes_left <= 0:
            raise NotAMember("it sends too much before it has proved itself")
        try:
            data = connection.recv(min(budget.bytes_left, 4096))
        except BlockingIOError:
            yield from _wait(connection, READ, budget)
            continue
        if not data:
            raise Closed
        budget.bytes_left -= len(data)
        incoming.write(data)
        return


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
