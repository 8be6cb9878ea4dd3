"""The engine's end of the command rings: the command log, and the ring of the transfer threads.

Theory.  A `Fetch` concerns no slot, and writes only blocks that no slot uses; a `Grant` concerns only what is
served to others.  So they need not wait for the end of a step as other commands do, nor keep their place among
them: where there is a ring to the transfer threads they go there, in their order.  The batch stays in the log without it, because the
log has no gaps.
"""

from __future__ import annotations

from baton.ipc.ring import RingWriter
from baton.protocol.commands import COMMANDS, Command, CommandBatch, Transfer


class CommandWriter:
    """The engine's end of both command rings: takes batches of the command log, and parts them.

    Nothing blocks and nothing is dropped; `flush` moves what fits.
    """

    def __init__(self, log: RingWriter, transfers: RingWriter | None) -> None:
        self._log = log
        self._transfers = transfers
        self._transfer_batches = 0

    @property
    def pending(self) -> bool:
        """Something waits for space: call `flush` when rung, and again after `RETRY_S` at most."""
        return self._log.pending or (self._transfers is not None and self._transfers.pending)

    def append(self, batch: CommandBatch) -> None:
        """Queues a batch; `flush` makes it visible."""
        if self._transfers is not None:
            transfers: list[Command] = [c for c in batch.commands if isinstance(c, Transfer)]
            if transfers:
                self._transfer_batches += 1
                self._transfers.append(COMMANDS.encode(CommandBatch(self._transfer_batches, transfers)))
                rest: list[Command] = [c for c in batch.commands if not isinstance(c, Transfer)]
                batch = CommandBatch(batch.sequence, rest)  # the log has no gaps, so an empty one goes too
        self._log.append(COMMANDS.encode(batch))

    def flush(self) -> bool:
        """Returns whether all of it went."""
        gone = self._transfers is None or self._transfers.flush()
        return self._log.flush() and gone
