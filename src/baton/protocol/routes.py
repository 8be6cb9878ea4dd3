"""Which experts a request's tokens went to: what travels from the worker to the gateway.

A row is one position of a request: for each mixture of the model, in the order of its layers, the ids of the
chosen experts, ascending.  Rows belong to positions, not to steps: who gets a position for a second time (a
prompt is computed again after a preemption, or at another instance) keeps the first.

Rows of the positions before a token come with the token or before it, over the whole way.  So who has n
tokens of an answer has the rows of all positions but the last token's, which was not fed to the model.
"""

from __future__ import annotations

import msgspec

MAX_RUN_BYTES = 1 << 20
"""Of one `Routes`, unless one row is longer: what a chunk of a prompt has is cut."""


class Routes(msgspec.Struct, array_like=True, frozen=True):
    """The rows of positions first, first + 1, … of one request."""

    first: int
    mixtures: int
    """Layers that have experts."""
    chosen: int
    """Experts that a token goes to, in each of them."""
    width: int
    """Bytes of an id: 1 or 2, unsigned, little-endian."""
    ids: bytes
    """[rows, mixtures, chosen], packed."""

    @property
    def row_bytes(self) -> int:
        return self.mixtures * self.chosen * self.width

    @property
    def stop(self) -> int:
        """The position after the last one."""
        return self.first + len(self.ids) // max(1, self.row_bytes)

    def since(self, position: int) -> Routes | None:
        """What is left of it from this position on; None: nothing."""
        if position <= self.first:
            return self
        if position >= self.stop:
            return None
        rest = self.ids[(position - self.first) * self.row_bytes :]
        return Routes(position, self.mixtures, self.chosen, self.width, rest)


def id_width(experts: int) -> int:
    """Bytes of an id, of so many experts."""
    return 1 if experts <= 256 else 2
