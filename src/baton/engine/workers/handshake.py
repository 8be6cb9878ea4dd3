"""The ranks of a worker group introduce themselves, and must agree on what they are.

Every rank says `WorkerReady` once.  Block size, tile and vocabulary must be the same everywhere, and the
block size the configured one; the pool is as large as the smallest rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protocol.config import InstanceConfig
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.messages.reports import WorkerReady
from baton.protocol.messages.requests import Welcome
from baton.protocol.weights import Weights

DYING_S = 5.0
"""A rank that said `WorkerFailed` has so long to exit; then the instance fails without its exit status."""


class HandshakeError(ValueError):
    """The ranks do not fit together; the message names the ranks and what they said."""


@dataclass(frozen=True)
class Agreed:
    num_blocks: int
    block_size: int
    vocab_size: int
    detail: str
    source: InstanceSource | None
    """Where other instances fetch its pages; None if a rank's cannot be fetched."""

    def welcome(
        self,
        config: InstanceConfig,
        incarnation: str,
        workers: list[int],
        peer_endpoint: str,
        key: bytes,
        weights: Weights,
    ) -> Welcome:
        """What gateways are told of an instance of such ranks."""
        return Welcome(
            incarnation=incarnation,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            vocab_size=self.vocab_size,
            workers=workers,
            peer_endpoint=peer_endpoint,
            source=None if self.source is None else self.source.without_places(),
            detail=self.detail,
            key=key,
            weights=weights,
        )


class Handshake:
    """Collects the `WorkerReady` of `num_ranks` ranks."""

    def __init__(self, config: InstanceConfig, num_ranks: int) -> None:
        self._config = config
        self._num_ranks = num_ranks
        self._ready: dict[int, WorkerReady] = {}

    def add(self, rank: int, ready: WorkerReady) -> Agreed | None:
        """Returns what all agreed on, once the last rank is there.  Raises `HandshakeError`."""
        if ready.rank != rank:
            raise HandshakeError(f"the worker on ring {rank} says that it is rank {ready.rank}")
        if rank in self._ready:
            raise HandshakeError(f"worker rank {rank} said twice that it is ready")
        self._ready[rank] = ready
        if len(self._ready) < self._num_ranks:
            return None
        first = self._ready[0]
        for other in self._ready.values():
            for name in ("block_size", "tile", "vocab_size"):
                mine, theirs = getattr(first, name), getattr(other, name)
                if mine != theirs:
                    raise HandshakeError(f"{name} is {mine!r} on rank 0 and {theirs!r} on rank {other.rank}")
        if first.block_size != self._config.block_size:
            raise HandshakeError(
                f"block_size is {first.block_size} in the workers, {self._config.block_size} as configured"
            )
        num_blocks = min(ready.num_blocks for ready in self._ready.values())
        if num_blocks < 1:
            raise HandshakeError("the KV cache holds no block; give it more memory (--kv-cache-memory-bytes)")
        return Agreed(num_blocks, first.block_size, first.vocab_size, first.detail, self._source())

    def _source(self) -> InstanceSource | None:
        first = self._ready[0]
        sources = [self._ready[rank].source for rank in sorted(self._ready)]
        ranks = [source for source in sources if source is not None]
        if len(ranks) < len(sources):
            return None
        return InstanceSource(first.tile, first.block_size, ranks, self._config.weights.name)
