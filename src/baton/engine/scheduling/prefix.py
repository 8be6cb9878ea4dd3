"""The prefix index: which computed block holds the KV of which tokens.

Theory.  The key of a full block is a chained hash, key(i) = H(key(i-1) ‖ token ids of block i), and
key(-1) = H(salt): so equal keys mean equal tokens at equal positions under the same salt, and requests of
different salts never share a block nor learn from timing that they could.  H is BLAKE2b with 128 bits: two
different prefixes with one key are as good as impossible, even for an attacker who looks for them.

* A block enters the index (`insert`) only after a report said that its KV is computed.
* A request whose tokens are being computed for another one waits for that one's blocks (`in_flight.py`).  Two
  that compute the same tokens at the same time all the same (little is not waited for) both have a block for
  them.  The first to be reported is indexed; the other stays private to its holder and is free afterwards.
* A block that was fetched from another instance, or computed from such, is only as right as the gateway that
  named that instance is honest.  So it is marked with the gateway, its *origin*, and matches only for
  requests of the same one; what was computed here ("") is for all.  A stranger that pretends to be a gateway
  can get wrong KV into its own requests, and into no others.
* A block leaves the index when the ledger evicts it.  If a parent is gone before its child (possible when the
  two were computed by different requests), the child is found again as soon as a request computes the parent
  again, and is evicted in its turn otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.engine.scheduling.ledger import Ledger
from baton.protocol.rules.prefix_keys import KEY_BYTES, extend_keys, root_key

__all__ = ["KEY_BYTES", "PrefixIndex", "extend_keys", "root_key"]


class PrefixIndex:
    """Key → block, for the blocks of one ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._origin_of: dict[int, str] = {}
        """Of those that were not computed here."""
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        ledger.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, keys: Sequence[bytes], limit: int, gateway: str = "") -> list[int]:
        """The blocks of the longest known prefix of `keys`, at most `limit` of them, for a request of this
        gateway."""
        found = []
        origins = self._origin_of
        for index in range(min(limit, len(keys))):
            block = self._block_of.get(keys[index])
            if block is None or (origins and origins.get(block, gateway) != gateway):
                break
            found.append(block)
        return found

    def origin(self, blocks: Iterable[int]) -> str:
        """That of KV which is computed on top of these, found by one `match`."""
        origins = self._origin_of
        return next((origins[block] for block in blocks if block in origins), "") if origins else ""

    def insert(self, key: bytes, block: int, origin: str = "") -> bool:
        """A report said that this held block is computed.  False: another block has the same content.

        What was computed here takes the place of what was not, and that of one gateway the place of that of
        another, which may be gone."""
        known = self._block_of.setdefault(key, block)
        if block in self._key_of:
            return known == block
        if known != block:
            if self._origin_of.get(known, "") in ("", origin):
                return False
            self._forget(known)
            self._ledger.unmark(known)
            self._block_of[key] = block
        if origin:
            self._origin_of[block] = origin
        self._key_of[block] = key
        self._ledger.mark(block)
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = None
        return True

    def keys(self) -> Iterable[bytes]:
        """All keys that it knows."""
        return self._block_of.keys()

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Keys that it has learnt and that it has forgotten since the last call."""
        added, removed = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return added, removed

    def clear(self) -> int:
        """Forgets everything (the weights have changed); returns how many blocks it knew."""
        blocks = list(self._key_of)
        for key in self._block_of:
            self._note_removal(key)
        self._block_of.clear()
        self._key_of.clear()
        self._origin_of.clear()
        for block in blocks:
            self._ledger.unmark(block)
        return len(blocks)

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        self._origin_of.pop(block, None)
        del self._block_of[key]
        self._note_removal(key)

    def _note_removal(self, key: bytes) -> None:
        if key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None
