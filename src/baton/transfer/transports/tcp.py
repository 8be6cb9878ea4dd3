"""Pages over TCP: a page server beside each worker, and a reader that receives straight into its blocks.

Theory.  The reader opens a connection, sends questions and receives the pages into its blocks; nothing else
than its own `recvmsg` ever writes there.  Questions are sent ahead, as many as fill the network (`pipes.py`),
and answered in their order.  What nobody wants any more when it comes is thrown away.

Question:  `REQUEST` header, then the page ids as packed int32.
Answer:    `ANSWER` header; then, by its status, the pages in the order page, layer, K/V, head, tile, followed
by a crc32 of each page if they were asked for; or a message for people.

In a cluster with a secret all of this travels in a connection between members that is encrypted
(`encryption.py`), unless `--transfer-encryption off` says that the network is private.

`PoolSource.tcp` is "HOST:PORT", and says nothing that opens anything.  Every question shows the token of a
*grant* (`grants.py`), which names a request's pages, their reader and an end: a reader never gets pages of a
process that took over the port, nor of a request that is not its own, nor after they were given up; and if
connections are encrypted, another member does not get them with its token.

| limit | of the server | of the reader |
| --- | --- | --- |
| connections | 256 of members, 64 that have knocked, 64 of others | 8 a source |
| knock and handshake; in clear until a grant is shown | 2 s and 1 KiB | 3 s and 16 KiB |
| connections that the server closes unheard | | made again for 3 s |
| a question | 65,536 pages | about 2 MiB of pages |
| silence in the middle of something | 3 s, then closed | 3 s, then `TransferError` |
| an idle connection | 120 s | 30 s |
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import numpy as np

from baton.protocol.messages.handover import PoolSource
from baton.transfer.base import SILENCE_S, Copy, Copying, Int32Array, PoolView, TransferError
from baton.transfer.grants import GrantBook
from baton.transfer.layout import Part, part_here, runs
from baton.transfer.refusals import Refusals
from baton.transfer.tasks import Tasks, Wait
from baton.transfer.transports.channel import Encryption, Place
from baton.transfer.transports.page_server import PageServer
from baton.transfer.transports.page_stream import MAGIC, REQUEST, Closed, checksums
from baton.transfer.transports.pipes import Order, Piece, Pipes

PIECE_BYTES = 2 << 20
_PARALLEL = 1024
"""The line in front of the connections keeps fetches in order; it need not be kept before it."""
_FOREVER_S = 3600.0


class TcpTransport:
    """See `base.Transport`.  The page server runs in `tasks` once `export` was called."""

    name = "tcp"
    parallel = _PARALLEL

    def __init__(
        self,
        pool: PoolView,
        tasks: Tasks,
        grants: GrantBook,
        refusals: Refusals,
        *,
        host: str = "127.0.0.1",
        checksums: bool = False,
        silence_s: float = SILENCE_S,
        encryption: Encryption | None = None,
    ) -> None:
        """`encryption`: of the page server, and of the connections to others; None: neither is."""
        self._pool = pool
        self._memory = pool.memory
        self._tasks = tasks
        self._grants = grants
        self._refusals = refusals
        self._host = host
        self._checksums = checksums
        self._silence_s = silence_s
        self._encryption = encryption
        self._server: PageServer | None = None
        self._pipes: dict[str, Pipes] = {}

    def export(self, source: PoolSource) -> PoolSource:
        """Raises `ValueError` if the host cannot be listened on."""
        if self._memory is None:
            return source
        self._server = PageServer(
            self._pool,
            self._tasks,
            self._grants,
            self._refusals,
            self._host,
            self._silence_s,
            self._encryption,
        )
        key = b"" if self._encryption is None else self._encryption.key
        return msgspec.structs.replace(source, tcp=self._server.name, reader_key=key)

    def why_not(self, source: PoolSource) -> str:
        if self._memory is None:
            return "this pool is not in main memory"
        if not source.tcp:
            return "the source has no page server"
        if ("?tls=" in source.tcp) != (self._encryption is not None):
            one, other = ("is not", "is") if self._encryption is not None else ("is", "is not")
            return (
                f"its page server {one} encrypted, and what this instance sends {other}: start both with the "
                "same --cluster-secret and --transfer-encryption"
            )
        return ""

    def copy(self, copy: Copy) -> Copying:
        name = copy.source.tcp
        pipes = self._pipes.get(name)
        if pipes is None:
            place = Place.parse(name)
            pipes = self._pipes[name] = Pipes(place, self._tasks, self._silence_s, self._encryption)
        order = Order(self._tasks.current)
        pieces = list(self._pieces(copy, order))
        order.left = len(pieces)
        try:
            pipes.take(pieces)
            while not order.over:
                yield Wait(-1, 0, _FOREVER_S)
        finally:
            if not order.over:
                pipes.drop(order)
        if order.error is not None:
            what = "the connection was closed" if isinstance(order.error, Closed) else str(order.error)
            raise TransferError(f"page server {name.partition('?')[0]}: {what}")
        return sum(piece.size for piece in pieces)

    def tick(self) -> bool:
        """Closes connections that nobody used for a while."""
        for name, pipes in list(self._pipes.items()):
            if not pipes.tick():
                del self._pipes[name]
        return bool(self._pipes)

    def close(self) -> None:
        for pipes in self._pipes.values():
            pipes.close()
        self._pipes.clear()
        if self._server is not None:
            self._server.close()
        self._memory = None

    def _pieces(self, copy: Copy, order: Order) -> Iterator[Piece]:
        part, memory = part_here(copy, self._pool), self._memory
        assert memory is not None  # as `why_not` said
        most = max(1, PIECE_BYTES // part.page_bytes)
        for first in range(0, len(copy.pages), most):
            pages, blocks = copy.pages[first : first + most], copy.blocks[first : first + most]
            places = (memory[at : at + size] for at, size in runs(part, blocks))
            piece = Piece(order, self._request(copy, pages), len(pages) * part.page_bytes, places)
            if self._checksums:
                piece.check = partial(_compare, memory, part, pages, blocks)
                piece.check_bytes = 4 * len(pages)
            yield piece

    def _request(self, copy: Copy, pages: Int32Array) -> bytes:
        header = REQUEST.pack(
            MAGIC,
            copy.grant,
            len(pages),
            copy.first_layer,
            copy.num_layers,
            copy.source_head,
            copy.num_heads,
            int(self._checksums),
        )
        return header + pages.astype("<i4").tobytes()


def _compare(memory: memoryview, part: Part, pages: Int32Array, blocks: Int32Array, told: bytes) -> None:
    """Compares the checksums that the source computed with those of what lies here now."""
    for page, found, said in zip(
        pages.tolist(), checksums(memory, part, blocks), np.frombuffer(told, "<u4"), strict=True
    ):
        if found != said:
            raise TransferError(f"the checksum of page {page} is wrong after copying")
