"""Which bytes of which rank: pages between instances of different tensor-parallel sizes.

Theory.  With n ranks and H heads, rank r holds heads [r*H/n, (r+1)*H/n); with more ranks than heads several
ranks hold the same head.  A reading rank needs its own heads, so it takes from each source rank the heads
that both have:

| P → D | 4 heads: D's rank 0 reads |
| --- | --- |
| 1 → 2 | heads 0-1 of rank 0 |
| 2 → 1 | heads 0-1 of rank 0, heads 0-1 of rank 1 |
| 2 → 4 | head 0 of rank 0 |

Where several source ranks have a head, readers of different rank take it from different ones.

In `[layer, K/V, head, tile]` all layers of all heads are one run of bytes; some layers of all heads are
one run; some heads are a run for each layer and each of K and V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.protocol.messages.handover import PoolSource
from baton.transfer.base import Bytes, Copy, Int32Array, PoolView, TransferError


def plan(
    pool: PoolView,
    sources: Sequence[PoolSource],
    pages: Int32Array,
    blocks: Int32Array,
    first_layer: int,
    num_layers: int,
    *,
    reader: int = 0,
) -> list[Copy]:
    """The copies that fill `blocks` of `pool`, rank `reader`, from `pages` of the source's ranks.

    Raises `TransferError` for what does not fit: geometry, heads that no rank has, ids outside a pool.
    """
    layers = pool.num_layers - first_layer if num_layers == -1 else num_layers
    if not 0 <= first_layer < first_layer + layers <= pool.num_layers:
        raise TransferError(
            f"layers {first_layer} to {first_layer + layers} were asked for; the pool has {pool.num_layers}"
        )
    if len(pages) != len(blocks):
        raise TransferError(f"{len(pages)} pages cannot go to {len(blocks)} blocks")
    _check_ids("block", blocks, pool.num_blocks)
    copies = []
    for source, source_head, head, count in _shares(pool, sources, reader):
        _check_ids(f"page of rank {source.rank}", pages, source.num_blocks)
        copies.append(Copy(source, pages, blocks, first_layer, layers, source_head, head, count))
    return copies


def _shares(
    pool: PoolView, sources: Sequence[PoolSource], reader: int
) -> Iterator[tuple[PoolSource, int, int, int]]:
    """(source rank, first head there, first head here, how many), every head of the pool once."""
    for source in sources:
        _check_geometry(pool, source)
    head, stop = pool.head_start, pool.head_start + pool.kv_heads
    while head < stop:
        having = [s for s in sources if s.head_start <= head < s.head_start + s.kv_heads]
        if not having:
            raise TransferError(f"no rank of the source has head {head} (of {pool.total_kv_heads})")
        source = having[reader % len(having)]
        upto = min(stop, source.head_start + source.kv_heads)
        yield source, head - source.head_start, head - pool.head_start, upto - head
        head = upto


def _check_geometry(pool: PoolView, source: PoolSource) -> None:
    there = (source.num_layers, source.total_kv_heads)
    here = (pool.num_layers, pool.total_kv_heads)
    tile = source.block_bytes // max(1, source.num_layers * 2 * source.kv_heads)
    if there != here or tile != pool.tile_bytes:
        raise TransferError(
            f"the source has {there[0]} layers, {there[1]} KV heads and tiles of {tile} bytes, this instance "
            f"{here[0]}, {here[1]} and {pool.tile_bytes}: both must run the same model with the same dtype"
        )


def _check_ids(what: str, ids: Int32Array, size: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= size):
        bad = ids[(ids < 0) | (ids >= size)][0]
        raise TransferError(f"{what} {bad} is outside its pool of {size} blocks")


def page_bytes(copy: Copy, pool: PoolView) -> int:
    """What is copied of each page."""
    return copy.num_layers * 2 * copy.num_heads * pool.tile_bytes


class Part(NamedTuple):
    """Some layers of some heads of a pool's pages."""

    num_layers: int
    """Of the pool."""
    kv_heads: int
    """Of the pool."""
    tile_bytes: int
    first_layer: int
    layers: int
    head: int
    heads: int

    @property
    def page_bytes(self) -> int:
        return self.layers * 2 * self.heads * self.tile_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.kv_heads * self.tile_bytes

    @property
    def is_run(self) -> bool:
        """All heads: what is taken of a page lies together."""
        return self.heads == self.kv_heads

    @property
    def is_page(self) -> bool:
        """All of each page."""
        return self.page_bytes == self.block_bytes


def part_there(copy: Copy, pool: PoolView) -> Part:
    """What `copy` reads, in the source's pool."""
    source = copy.source
    return Part(
        source.num_layers,
        source.kv_heads,
        pool.tile_bytes,
        copy.first_layer,
        copy.num_layers,
        copy.source_head,
        copy.num_heads,
    )


def part_here(copy: Copy, pool: PoolView) -> Part:
    """What `copy` writes, in this rank's pool."""
    return Part(
        pool.num_layers,
        pool.kv_heads,
        pool.tile_bytes,
        copy.first_layer,
        copy.num_layers,
        copy.head,
        copy.num_heads,
    )


def rows(memory: Bytes, part: Part, *, as_runs: bool) -> Bytes:
    """[block, run, bytes] of a pool's bytes, a view: one run a page, or one for each layer and K/V."""
    if as_runs:
        layer_bytes = 2 * part.kv_heads * part.tile_bytes
        flat = memory.reshape(-1, 1, part.block_bytes)
        return flat[:, :, part.first_layer * layer_bytes : (part.first_layer + part.layers) * layer_bytes]
    flat = memory.reshape(-1, 2 * part.num_layers, part.kv_heads * part.tile_bytes)
    layers = slice(2 * part.first_layer, 2 * (part.first_layer + part.layers))
    return flat[:, layers, part.head * part.tile_bytes : (part.head + part.heads) * part.tile_bytes]


def runs(part: Part, ids: Int32Array) -> Iterator[tuple[int, int]]:
    """(offset, length) in the pool of what `part` names of the pages `ids`, in the order of the wire:
    page, layer, K/V, head.  Neighbouring whole pages are one run."""
    if part.is_page:
        for first, _, count in neighbours(ids, ids):
            yield first * part.block_bytes, count * part.block_bytes
        return
    if part.is_run:
        offsets = [part.first_layer * 2 * part.kv_heads * part.tile_bytes]
    else:
        lines = range(2 * part.first_layer, 2 * (part.first_layer + part.layers))
        offsets = [(line * part.kv_heads + part.head) * part.tile_bytes for line in lines]
    length = part.page_bytes // len(offsets)
    for page in ids.tolist():
        for offset in offsets:
            yield page * part.block_bytes + offset, length


def neighbours(pages: Int32Array, blocks: Int32Array) -> list[tuple[int, int, int]]:
    """(page, block, count): stretches in which both sides go up by one."""
    found: list[tuple[int, int, int]] = []
    first_page = first_block = count = 0
    # (For the few pages of a fetch a plain loop is faster than array operations.)
    for page, block in zip(pages.tolist(), blocks.tolist(), strict=True):
        if count and page == first_page + count and block == first_block + count:
            count += 1
            continue
        if count:
            found.append((first_page, first_block, count))
        first_page, first_block, count = page, block, 1
    if count:
        found.append((first_page, first_block, count))
    return found
