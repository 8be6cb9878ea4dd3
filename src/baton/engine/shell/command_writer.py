"""The engine's end of the command rings: the command log, and the ring of the transfer threads.

Theory.  A `Fetch` concerns no slot, and writes only blocks that no slot uses.  So it need not wait for the
end of a step as other commands do, nor keep its place among them: where there is a ring to the transfer
threads it goes there, in order with the other fetches.  The batch stays in the log without it, because the
log has no gaps; a batch of which nothing is left wakes nobody.

Who may fetch pages of this instance (`grant`) goes there as well, and wakes nobody either: the page server
looks before it answers anybody.  Only the link is woken, which passes it on to the page servers of other
hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.ipc.doorbell import Doorbell
from baton.ipc.ring import RingWriter
from baton.protocol.messages.commands import (
    COMMANDS,
    TRANSFERS,
    Command,
    CommandBatch,
    DropFetch,
    Fetch,
    Grants,
    TransferBatch,
)


class CommandWriter:
    """The engine's end of both command rings: takes batches of the command log, and parts them.

    Nothing blocks and nothing is dropped; `flush` moves what fits.
    """

    def __init__(
        self, log: RingWriter, transfers: RingWriter | None, link_doorbell: Doorbell | None = None
    ) -> None:
        """`link_doorbell`: that of the process which passes it on to other hosts; None: there are none."""
        self._link_doorbell = link_doorbell
        self._log = log
        self._transfers = transfers
        self._transfer_batches = 0
        self._log_rings = False
        """Something was appended since the last flush for which the workers are to wake up."""
        self._transfers_ring = False
        self._link_rings = False

    @property
    def pending(self) -> bool:
        """Something waits for space: call `flush` when rung, and again after `RETRY_S` at most."""
        return self._log.pending or (self._transfers is not None and self._transfers.pending)

    def append(self, batch: CommandBatch) -> None:
        """Queues a batch; `flush` makes it visible."""
        if self._transfers is not None:
            fetches = [command for command in batch.commands if isinstance(command, Fetch | DropFetch)]
            if fetches:
                self._transfer(self._transfers, fetches)
                self._transfers_ring = True
                rest: list[Command] = [c for c in batch.commands if not isinstance(c, Fetch | DropFetch)]
                batch = CommandBatch(batch.sequence, rest)  # the log has no gaps, so an empty one goes too
        self._log_rings = self._log_rings or bool(batch.commands)
        self._log.append(COMMANDS.encode(batch))

    def grant(self, grants: Sequence[Grants]) -> None:
        """Queues what page servers are to know; without a ring to them there are none."""
        if grants and self._transfers is not None:
            self._transfer(self._transfers, grants)
            self._link_rings = self._link_doorbell is not None

    def flush(self) -> bool:
        """Returns whether all of it went."""
        gone = self._transfers is None or self._transfers.flush(ring=self._transfers_ring)
        gone = self._log.flush(ring=self._log_rings) and gone
        self._log_rings = self._transfers_ring = not gone
        if self._link_rings and self._link_doorbell is not None:
            self._link_rings = False
            self._link_doorbell.ring()
        return gone

    def _transfer(self, ring: RingWriter, commands: Sequence[Fetch | DropFetch | Grants]) -> None:
        self._transfer_batches += 1
        ring.append(TRANSFERS.encode(TransferBatch(self._transfer_batches, list(commands))))
