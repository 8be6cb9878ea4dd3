"""Paged attention in plain PyTorch on a CPU, such that a position's result depends on its context alone.

Theory.  Libraries add up in an order that may depend on the shape of a product.  So all products here have
the same shape but for the number of rows and of matrices, and numbers of rows are such that they agree
(`model.steady`).  A context is cut into *pieces* of `_PIECE_TOKENS` at fixed positions; one that is not full
is filled up.  Each piece has a softmax of its own, in float32,

    m = max S     P = e^(S - m)     l = sum P     O = P V

and pieces are merged from the first to the last, each with the factor e^(m - the largest m).  What a query
does not see has the weight 0, and a piece of which it sees nothing changes nothing, exactly.

Rows of one token are computed together, those with more pieces first, so that the i-th pieces are those of
the first n rows.  A chunk is a batch of one row, and its queries are cut into tiles: a piece is gathered once
for all of them.  Query heads that share a KV head stand in the place of query positions.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.attention.base import AttentionShape, AttentionStep
from baton.model.attention.kv_int8 import rounded
from baton.model.attention.torch_tiles import Int64Array, TorchTiles, Writes, rows_of
from baton.model.ops.fused import Activations, tanh
from baton.model.ops.steady import Sizes, find_sizes, random_rows

_GATHER_BYTES = 4 << 20
"""Of keys and values that are computed with at once, so that they stay in the cache."""
_PIECE_TOKENS = 256
_LEAST_WIDTH = 16
"""Of values: narrower products are computed in ways of their own."""
_MATRICES = (1, 2, 3)
"""Numbers of products at once that are tried: libraries have ways of their own for one, and for a few."""
_NOTHING = float("-inf")
_MOST_ABOVE = 87.0
"""Of a sink over the largest score: its exponential is a float32, beside which all weights are nothing."""


@dataclass(frozen=True)
class _Tile:
    rows: slice
    """Of a batch's queries, query heads counted."""
    hidden: Tensor | None
    """[n, 1, rows, tokens of a piece]: what a query does not see; None: it sees all."""


@dataclass(frozen=True)
class _Piece:
    batch: int
    """n: the first n rows have it."""
    blocks: Tensor
    """[2 * n * kv_heads * blocks of a piece] tiles of K, then of V."""
    unused: Tensor | None
    """[n, 1, tokens of a piece, 1]: where there is nothing of the row; None: nowhere."""
    tiles: list[_Tile]


@dataclass(frozen=True)
class _Batch:
    """Rows of the same number of tokens."""

    tokens: Tensor
    """[B * count] of the step, row after row."""
    size: int
    """B"""
    count: int
    pieces: list[_Piece]


@dataclass(frozen=True)
class PiecesPlan(Writes):
    reads: dict[int | None, list[_Batch]]


class TorchPieces(TorchTiles):
    """For a CPU."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._piece_blocks = max(1, _PIECE_TOKENS // shape.block_size)
        self._piece_tokens = self._piece_blocks * shape.block_size
        self._width = max(shape.head_dim, _LEAST_WIDTH)
        threads = torch.get_num_threads()
        of_scores = _sizes(shape.head_dim, self._piece_tokens, threads, transposed=True)
        of_values = _sizes(self._piece_tokens, self._width, threads, transposed=False)
        self._sizes = of_scores.common(of_values)
        """Numbers of rows of a tile of queries, query heads counted."""
        self._exact = torch.empty(0)

    # Once a step

    def prepare(self, step: AttentionStep) -> PiecesPlan:
        starts, counts, tables = rows_of(step)
        return PiecesPlan(
            *self._writes(starts, counts, tables, step.num_decodes),
            reads={window: self._batches(starts, counts, tables, window) for window in self.shape.windows},
        )

    def _batches(
        self, starts: Int64Array, counts: Int64Array, tables: Int64Array, window: int | None
    ) -> list[_Batch]:
        shape, first_tokens = self.shape, np.cumsum(counts) - counts
        lows = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0)
        first = lows // self._piece_tokens
        pieces = (starts + counts - 1) // self._piece_tokens + 1 - first
        single = np.flatnonzero(counts == 1)
        single = single[np.argsort(-pieces[single], kind="stable")]
        most = max(1, _GATHER_BYTES // (2 * shape.num_kv_heads * self._piece_blocks * self._tile_bytes))
        groups = [single[begin : begin + most] for begin in range(0, len(single), most)]
        groups += [np.array([row]) for row in np.flatnonzero(counts > 1)]
        found = []
        for rows in groups:
            count = int(counts[rows[0]])
            tokens = first_tokens[rows][:, None] + np.arange(count)
            of_rows = starts[rows], lows[rows], tables[rows], first[rows], pieces[rows]
            cut = [self._piece(index, count, window, *of_rows) for index in range(int(pieces[rows].max()))]
            found.append(_Batch(self._tensor(tokens.reshape(-1)), len(rows), count, cut))
        return found

    def _piece(
        self,
        index: int,
        count: int,
        window: int | None,
        starts: Int64Array,
        lows: Int64Array,
        tables: Int64Array,
        first: Int64Array,
        pieces: Int64Array,
    ) -> _Piece:
        """The `index`-th that each row sees, of those rows that see so many."""
        n = int((pieces > index).sum())
        starts, lows, tables, ends = starts[:n], lows[:n], tables[:n], starts[:n] + count
        columns = (first[:n] + index)[:, None] * self._piece_blocks + np.arange(self._piece_blocks)
        columns = np.minimum(columns, (ends[:, None] - 1) // self.shape.block_size)
        blocks = self._tile_indices(np.take_along_axis(tables, columns, 1))
        keys = ((first[:n] + index) * self._piece_tokens)[:, None] + np.arange(self._piece_tokens)
        unused = (keys < lows[:, None]) | (keys >= ends[:, None])
        tiles = []
        for rows in self._tile_slices(count):
            shifts = np.minimum(np.arange(rows.start, rows.stop) // self._heads_per_kv, count - 1)
            distances = (starts[:, None] + shifts)[:, :, None] - keys[:, None, :]
            hidden = distances < 0
            if window is not None:
                hidden |= distances >= window
            if not hidden.all():
                mask = torch.from_numpy(hidden).unsqueeze(1) if hidden.any() else None
                tiles.append(_Tile(rows, mask))
        there = torch.from_numpy(unused)[:, None, :, None] if unused.any() else None
        return _Piece(n, self._tensor(blocks), there, tiles)

    def _rows(self, count: int) -> int:
        """Of the queries of `count` positions, filled up."""
        return sum(self._sizes.parts(count * self._heads_per_kv))

    def _tile_slices(self, count: int) -> list[slice]:
        sizes = self._sizes.parts(count * self._heads_per_kv)
        return [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]

    # For each layer

    def attend(
        self, layer: int, queries: Tensor, window: int | None, plan: PiecesPlan, sinks: Tensor | None = None
    ) -> Tensor:
        width = queries.shape[1] * queries.shape[2]
        out = torch.empty(plan.num_tokens, width, dtype=queries.dtype)
        for batch in plan.reads[window]:
            chosen = queries.index_select(0, batch.tokens)
            out.index_copy_(0, batch.tokens, self._attend_batch(layer, chosen, batch, sinks))
        return out

    def _gather_exact(self, layer: int, tiles: Tensor) -> Tensor:
        """As `_gather`, in float32."""
        found = self._gather(layer, tiles, torch.float32)
        if found.dtype == torch.float32:
            return found
        if self._exact.numel() < found.numel():
            self._exact = torch.empty(self._workspace.numel())
        return self._exact[: found.numel()].view(found.shape).copy_(found)

    def _attend_batch(self, layer: int, queries: Tensor, batch: _Batch, sinks: Tensor | None) -> Tensor:
        """[B * count, heads, head_dim] → [B * count, heads * head_dim]"""
        kv_heads, group, dim = self.shape.num_kv_heads, self._heads_per_kv, self.shape.head_dim
        used, rows = batch.count * group, self._rows(batch.count)
        grouped = queries.view(batch.size, batch.count, kv_heads, group, dim).transpose(1, 2)
        exact = grouped.reshape(batch.size, kv_heads, used, dim).float()
        scaled = (rounded(exact) if self.shape.kv_int8 else exact) * self.shape.scale
        if rows > used:
            scaled = F.pad(scaled, (0, 0, 0, rows - used))
        sums = torch.zeros(batch.size, kv_heads, rows, self._width)
        totals = torch.zeros(batch.size, kv_heads, rows, 1)
        largest = torch.full_like(totals, _NOTHING)
        for piece in batch.pieces:
            n = piece.batch
            keys, values = self._gather_exact(layer, piece.blocks).view(2, n, kv_heads, -1, dim)
            if piece.unused is not None:
                values.masked_fill_(piece.unused, 0.0)
            if self._width > dim:
                values = F.pad(values, (0, self._width - dim))
            for tile in piece.tiles:
                state = (part[:n, :, tile.rows] for part in (sums, totals, largest))
                scores = torch.matmul(scaled[:n, :, tile.rows], keys.transpose(2, 3))
                if self.shape.soft_cap is not None:
                    scores = self.shape.soft_cap * tanh(scores / self.shape.soft_cap)
                _add_piece(scores, values, tile.hidden, *state)
        if sinks is not None:  # (row i of a KV head is of query head i % group)
            above = sinks.view(kv_heads, group, 1).repeat(1, -(-rows // group), 1)[:, :rows] - largest
            totals += above.clamp_(max=_MOST_ABOVE).exp_()
        found = (sums / totals)[:, :, :used, :dim].reshape(batch.size, kv_heads, batch.count, group, dim)
        return found.transpose(1, 2).reshape(batch.size * batch.count, -1).to(queries.dtype)


def _add_piece(
    weights: Tensor,
    values: Tensor,
    hidden: Tensor | None,
    sums: Tensor,
    totals: Tensor,
    largest: Tensor,
) -> None:
    """Attention to a piece [B, H, tokens, D or more], with scores [B, H, rows, tokens], overwritten.

    Changes O [B, H, rows, D], l and m [B, H, rows, 1] of the pieces before.
    """
    if hidden is not None:
        weights.masked_fill_(hidden, _NOTHING)
    top = weights.amax(-1, keepdim=True)
    weights.sub_(_finite(top)).exp_()
    found = torch.matmul(weights, values)
    most = torch.maximum(largest, top)
    old, new = (torch.exp(part - _finite(most)) for part in (largest, top))
    sums.mul_(old).add_(found.mul_(new))
    totals.mul_(old).add_(weights.sum(-1, keepdim=True).mul_(new))
    largest.copy_(most)


def _finite(largest: Tensor) -> Tensor:
    """0 where nothing has been seen."""
    return largest.masked_fill(largest == _NOTHING, 0.0)


@functools.cache
def _sizes(inputs: int, outputs: int, threads: int, transposed: bool) -> Sizes:
    """Of a batch of products of float32 matrices, with so many threads, as PyTorch has now."""
    matrix = torch.randn(outputs, inputs).t() if transposed else torch.randn(inputs, outputs)

    def product(x: Activations) -> Tensor:
        """Of any number of matrices at once, as their number must not matter either; nothing if it does."""
        assert isinstance(x, Tensor)
        found = [
            torch.matmul(x.expand(number, 1, *x.shape).contiguous(), matrix.expand(number, 1, -1, -1))[-1, 0]
            for number in _MATRICES
        ]
        same = all(torch.equal(one, found[0]) for one in found)
        return found[0] if same else torch.full_like(found[0], math.nan)

    return find_sizes(product, random_rows(inputs, torch.float32))
