"""The secret of a cluster: one random text that its gateways and instances know, and the keys made of it.

Theory.  Nothing uses the secret itself.  For each purpose there is a key, made by HKDF-SHA256 (RFC 5869) of
the secret and the purpose's name; so no key tells anything about another one or about the secret.

| purpose | what for | who uses it |
| --- | --- | --- |
| `CURVE_CLIENT` | the key pair of every socket that connects to another host | `ipc/sockets/curve.py` |
| `CURVE_LEADER` | the key pair with which a leader listens for its other hosts | `ipc/sockets/curve.py` |
| `PAGE_MEMBERS` | signs the keys of all that serve or fetch KV pages | `transfer/transports/encryption.py` |
| `PAGE_KNOCKS` | with what connections to page servers begin | `knock.py` |
| `SIGNATURES` | HMAC of requests of members to a gateway, and of its answers | `signing.py` |
| `REGISTRATION` | with which a gateway and an instance that joined prove themselves (`proof.py`) | joining |

A further purpose is a further name here: `secret.key(NAME, …)`.

**Rotation.**  A process has one secret or two (`Secrets`): it speaks with the first and accepts both.  So a
cluster gets another secret without a moment in which members refuse each other: all are restarted with the
old and the new one, then with the new and the old one, then with the new one alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import MutableMapping
from typing import NamedTuple

CURVE_CLIENT = "curve client"
CURVE_LEADER = "curve leader"
PAGE_MEMBERS = "page members"
PAGE_KNOCKS = "page knocks"
SIGNATURES = "signatures"
REGISTRATION = "registration"

SECRET_BYTES = 32
_PREFIX = "baton1-"
_SALT = b"baton cluster secret 1"
_HASH_BYTES = 32
_HEADER = (
    "# The secret of a cluster of Baton.  Whoever has it takes part: it reads prompts and gives answers.\n"
    "# Each gateway and each instance gets this file: baton serve --cluster-secret FILE\n"
)


class ClusterSecret(NamedTuple):
    """One secret; `key` is what others use."""

    text: str
    """As it stands in its file.  Never shown."""

    @classmethod
    def make(cls, random: bytes) -> ClusterSecret:
        """Of `SECRET_BYTES` random bytes."""
        if len(random) != SECRET_BYTES:
            raise ValueError(f"a secret is {SECRET_BYTES} bytes")
        return cls(_PREFIX + base64.b32encode(random).decode().rstrip("=").lower())

    @classmethod
    def parse(cls, content: str) -> ClusterSecret:
        """Of a file: lines that begin with # and one with the secret.  Raises `ValueError` that shows nothing
        of the content."""
        lines = [line.strip() for line in content.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if len(lines) != 1:
            raise ValueError(f"one line with a secret is expected, and there are {len(lines)}")
        text = lines[0].lower()
        encoded = text.removeprefix(_PREFIX).upper()
        try:
            random = base64.b32decode(encoded + "=" * (-len(encoded) % 8))
        except binascii.Error:
            random = b""
        if not text.startswith(_PREFIX) or len(random) != SECRET_BYTES:
            raise ValueError(f"this is no secret of a cluster, which begins with {_PREFIX!r} and is complete")
        return cls(text)

    def file(self) -> str:
        """What its file contains."""
        return f"{_HEADER}{self.text}\n"

    @property
    def id(self) -> str:
        """What stands for it in logs: no way back."""
        return self.key("id", length=4).hex()

    def key(self, purpose: str, *parts: str, length: int = _HASH_BYTES) -> bytes:
        """The key for this purpose and these parts, whose order counts."""
        info = "".join(f"{len(part)}:{part}" for part in (purpose, *parts)).encode()
        return hkdf(self.text.encode(), _SALT, info, length)

    def __repr__(self) -> str:
        return f"ClusterSecret({self.id})"


class Secrets(NamedTuple):
    """Those that a process accepts, the one that it speaks with first; empty: the cluster has none."""

    accepted: tuple[ClusterSecret, ...] = ()

    @property
    def first(self) -> ClusterSecret:
        """To speak with.  Raises `IndexError` if there is none."""
        return self.accepted[0]

    def __bool__(self) -> bool:
        return bool(self.accepted)

    def dump(self) -> str:
        """For a process that this one starts: through its environment or a descriptor, never an argument."""
        return " ".join(secret.text for secret in self.accepted)

    @classmethod
    def load(cls, dumped: str) -> Secrets:
        return cls(tuple(ClusterSecret(text) for text in dumped.split()))

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> Secrets:
        """What the process that started this one has put there; then it is there no more, so that processes
        which this one starts do not inherit it by accident."""
        return cls.load(environment.pop(SECRETS_VARIABLE, ""))


NO_SECRETS = Secrets()
SECRETS_VARIABLE = "BATON_CLUSTER_SECRETS"
"""The environment variable in which an engine's process, and a worker's, is given `Secrets.dump()`."""


def hkdf(material: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 with SHA-256: `length` bytes of key."""
    pseudorandom = hmac.digest(salt, material, hashlib.sha256)
    made, block = b"", b""
    for number in range(1, -(-length // _HASH_BYTES) + 1):
        block = hmac.digest(pseudorandom, block + info + bytes([number]), hashlib.sha256)
        made += block
    return made[:length]
