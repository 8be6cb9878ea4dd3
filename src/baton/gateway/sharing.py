"""How users share the server: whose a request is for fair queuing, and what its prefix cache is salted with.

A request's *flow* is (the id of its API key, a digest of its field `user`).  Without a key the users share
"", and without `user` a key is one user.  `protocol/rules/fair_queue.py` says what follows from it; here is
only who is who.  A user can invent as many names as it likes: they divide the share of its key.

**Salt by key.**  A client that guesses another one's prompt can see whether it is cached, by the time to the
first token and in `cached_tokens`.  With `--salt-by-key` the salt of a request is an HMAC of its own
`cache_salt` under the API key that was sent.  So nothing is shared between keys, and none can make the salt
of another one.  There is no further secret: a server that starts again, and another one with the same keys,
find the same KV.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from baton.gateway.access import Access, key_id
from baton.protocol.rules.fair_queue import EVERYBODY, MAX_WEIGHT, MIN_WEIGHT, Flow

log = logging.getLogger(__name__)

_DIGEST_BYTES = 8
_MAX_FILE = 1 << 20
MAX_RETRY_AFTER_S = 300


class WeightsError(ValueError):
    """A file of weights that cannot be used; one line that names the place and the fix."""


@dataclass(frozen=True)
class SharingOptions:
    """What the flags say."""

    fair_queuing: bool = True
    fair_weights: str | None = None
    """A TOML file: `default = 1.0` and a table `[weights]` of API keys, or their ids, and numbers."""
    salt_by_key: bool = False


@dataclass(frozen=True)
class Weights:
    """Of keys, by id."""

    default: float = 1.0
    by_key: Mapping[str, float] | None = None

    def of(self, key: str) -> float:
        return self.default if self.by_key is None else self.by_key.get(key, self.default)


def read_weights(path: str, access: Access) -> Weights:
    """Raises `WeightsError`."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            raise WeightsError(f"{path}: larger than {_MAX_FILE >> 10} KiB; is it the right file?")
        content = tomllib.loads(data.decode())
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path}: is not TOML: {error}") from None
    unknown = sorted(content.keys() - {"default", "weights"})
    if unknown:
        raise WeightsError(f"{path}: {unknown[0]}: unknown; give 'default' and a table [weights]")
    table = content.get("weights", {})
    if not isinstance(table, dict):
        raise WeightsError(f"{path}: weights: give a table of API keys and numbers")
    ids = {key: key_id(key) for key in (*access.api_keys, *access.admin_keys)}
    known = set(ids.values())
    by_key: dict[str, float] = {}
    for number, (name, value) in enumerate(table.items(), start=1):
        key = ids.get(name, name)
        if key not in known:
            # (Not by its name, which may be a key of somebody.)
            raise WeightsError(
                f"{path}: weights: entry {number} is neither an API key of this server nor the id of one"
            )
        by_key[key] = _weight(path, f"weights: entry {number}", value)
    return Weights(_weight(path, "default", content.get("default", 1.0)), by_key)


def _weight(path: str, where: str, value: object) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not MIN_WEIGHT <= float(value) <= MAX_WEIGHT:  # type: ignore[arg-type]
        raise WeightsError(f"{path}: {where}: give a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return float(value)  # type: ignore[arg-type]


class Sharing:
    """Of one server.  Raises `WeightsError`."""

    def __init__(self, access: Access | None = None, options: SharingOptions | None = None) -> None:
        self._access = access or Access()
        self._options = options or SharingOptions()
        self._weights = Weights()
        self._salts: dict[str, Callable[[bytes], str]] | None = None
        if self._options.salt_by_key:
            keys = (*self._access.api_keys, *self._access.admin_keys)
            self._salts = {key_id(key): _salt_of(key) for key in keys}
        self.reload()

    def reload(self) -> None:
        """Reads the weights again.  Raises `WeightsError`, and keeps those of before."""
        if self._options.fair_weights is not None:
            self._weights = read_weights(self._options.fair_weights, self._access)

    def flow(self, key: str, user: str | None) -> Flow:
        """`key`: the id of the key that was sent, "" without one; `user`: what the client says."""
        if not self._options.fair_queuing:
            return EVERYBODY
        name = ""
        if user:
            digest = hashlib.blake2b(user.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES)
            name = digest.hexdigest()
        return Flow(key, name, self._weights.of(key))

    def salt(self, key: str, given: str) -> str:
        """What the prefix cache of a request is salted with, that gave this salt itself."""
        salt = None if self._salts is None else self._salts.get(key)
        return given if salt is None else salt(given.encode("utf-8", "surrogatepass"))


def _salt_of(key: str) -> Callable[[bytes], str]:
    base = hmac.new(key.encode(), b"baton prefix cache\0", hashlib.sha256)

    def salt(given: bytes) -> str:
        one = base.copy()
        one.update(given)
        return one.hexdigest()

    return salt


def retry_after(seconds: float) -> int:
    """Whole seconds for `Retry-After`, from an estimate; 0: there is none."""
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S) if math.isfinite(seconds) else MAX_RETRY_AFTER_S
