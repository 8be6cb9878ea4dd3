"""Which of a request's leading blocks there are already, and what it offers to others.  Pure.

Theory.  A block with a request's tokens may be computed (`prefix.py`), or another request may be about to
compute it (`in_flight.py`).  Both know blocks by key, and the keys of a request are made here, as far as they
are needed.  What is found ends where either the tokens part, or something is wanted of a token besides its KV
(`Request.reusable`).

With a slot a request has a part in both: blocks that it is to compute can be followed at once, and each of
them enters the prefix index when it is full and reported as computed, if `Request.indexing` still says so.

Without a prefix index nothing is shared, and nothing of this is done.
"""

from __future__ import annotations

from baton.engine.request import Request
from baton.engine.scheduling.in_flight import InFlight, Shared
from baton.engine.scheduling.ledger import Ledger
from baton.engine.scheduling.prefix import PrefixIndex, extend_keys


class Sharing:
    """Of one engine.  It keeps nothing itself."""

    def __init__(
        self, ledger: Ledger, prefix: PrefixIndex | None, in_flight: InFlight, block_size: int
    ) -> None:
        self._ledger = ledger
        self._prefix = prefix
        self._in_flight = in_flight
        self._block_size = block_size

    def find(self, request: Request, limit: int) -> Shared:
        """Blocks for its leading tokens that are computed, or are being computed for another request."""
        limit = min(limit, request.reusable // self._block_size)
        blocks = self.match(request, limit)
        if self._prefix is None:
            return Shared(blocks, "")
        found = Shared(blocks, self._prefix.origin(blocks))
        if len(blocks) < limit:
            self._in_flight.find(request, found, limit)
        return found

    def match(self, request: Request, limit: int) -> list[int]:
        """Cached blocks for its leading tokens, `limit` at most: for one that is to run here never all
        tokens, since something must be computed."""
        if self._prefix is None:
            return []
        limit = min(limit, request.reusable // self._block_size)
        extend_keys(request.keys, request.root, request.tokens, self._block_size, limit)
        return self._prefix.match(request.keys, limit, request.gateway.name or "")

    def seat(self, request: Request, found: Shared) -> None:
        """A request has a slot, what was found, and blocks for the rest, which it computes."""
        request.indexed = len(found.blocks)
        request.indexing = self._prefix is not None
        request.origin = found.origin
        if self._prefix is not None:
            full = len(request.tokens) // self._block_size
            extend_keys(request.keys, request.root, request.tokens, self._block_size, full)
            self._in_flight.fill(request, request.indexed, full)
        if found.behind:
            self._in_flight.follow(request, found.behind)

    def reserve(self, request: Request) -> None:
        """A request is to arrive, with blocks that another instance computes."""
        request.indexing = self._prefix is not None
        request.origin = request.gateway.name or ""  # who named that instance

    def index(self, request: Request, num_computed: int) -> bool:
        """Offers the blocks that are full and computed to the prefix index.  Returns whether there are any
        new ones."""
        full = num_computed // self._block_size
        if not request.indexing or self._prefix is None or full <= request.indexed:
            return False
        extend_keys(request.keys, request.root, request.tokens, self._block_size, full)
        table = self._ledger.table(request.slot)
        for index in range(request.indexed, full):
            self._prefix.insert(request.keys[index], table[index], request.origin)
        request.indexed = full
        return True

    def forget(self) -> int:
        """Nothing that was found before is found any more.  Returns the number of blocks."""
        self._in_flight.forget()
        return self._prefix.clear() if self._prefix else 0
