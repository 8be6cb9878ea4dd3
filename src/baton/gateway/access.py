"""What the flags say about rights; `rights.py` decides by it.  It imports next to nothing: flags are read
fast."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from baton.protocol.rules.cluster_secret import NO_SECRETS, Secrets

_ID_LENGTH = 12


def key_id(key: str) -> str:
    """What stands for a key in tables and logs: short, the same after each start, and no way back to the key
    (if that is not guessable)."""
    return hashlib.sha256(b"baton key\0" + key.encode()).hexdigest()[:_ID_LENGTH]


@dataclass(frozen=True)
class Access:
    """What the flags say about rights.

    Raises `ValueError` for an empty key, or one that is in both lists.
    """

    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Names under which this server may be asked, besides addresses, `localhost` and `host_name`."""
    host_name: str = "localhost"
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may ask this server, such as `https://chat.example`; `*`: every page may use
    the routes of users."""
    min_priority: int | None = None
    """The best (lowest) `priority` that a user may ask for; None: 0 where there are API keys, any where there
    are none."""
    profile_dir: str | None = None
    """Real path of the directory below which profiles are written; None: none may be."""
    weights_dir: str | None = None
    """The same, of those from which weights are loaded."""
    cluster_secrets: Secrets = NO_SECRETS
    """With which members of the cluster sign what they ask."""
    insecure_cluster: bool = False
    """Instances of other hosts may join without a secret, if they have an admin key."""

    def __post_init__(self) -> None:
        for name, keys in (("api_keys", self.api_keys), ("admin_keys", self.admin_keys)):
            if not all(keys):
                raise ValueError(
                    f"{name}: an empty key would let everybody in; leave it out or give a real one"
                )
        if set(self.api_keys) & set(self.admin_keys):
            raise ValueError(
                "admin_keys: one of them is an API key as well, so users would be operators; give another"
            )
