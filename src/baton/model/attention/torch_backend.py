"""Paged attention in plain PyTorch: gather the blocks that are needed, then one SDPA for many rows.

For devices other than a CPU (there see `torch_pieces`): what a position gives depends a little on what is
computed with it.

Theory.  *Decode rows* are batched.  Rows of very different lengths would waste most of a common gather on
padding, so they are grouped (`_groups`): a group's shortest row has at least half the blocks of its longest,
unless the padding is so little that another call costs more, and a group's gather stays within
`_GATHER_BYTES`, which also bounds the workspace.  Query heads that share a KV head stand in the place of
query positions, so grouped heads need no repeated keys.  A group whose rows have equal lengths needs no
mask: its gather is cut to length.

*Prefill chunks* run row by row, in tiles of `_QUERY_TILE` queries, against the row's cached prefix and the
chunk itself.  Whether position q may see key k depends on q - k only, so the masks of all tiles, rows and
steps are slices of one banded matrix for each window, kept and grown when needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.attention.base import AttentionShape, AttentionStep
from baton.model.attention.kv_int8 import rounded
from baton.model.attention.torch_tiles import Int64Array, TorchTiles, Writes, rows_of
from baton.model.ops.fused import tanh

_GATHER_BYTES = 32 << 20
_QUERY_TILE = 256
_SPLIT_TOKENS = 1024
"""Padding of fewer tokens than this is cheaper than another group."""


@dataclass(frozen=True)
class _DecodeGroup:
    rows: Tensor | None
    """[B] rows of the step; None: all decode rows, in order."""
    tiles: Tensor
    """[2 * B * kv_heads * blocks] tiles of K, then of V."""
    first: int
    stop: int
    """Of the gathered positions, [first, stop) are used."""
    mask: Tensor | None
    """float32 [B, 1, 1, stop - first] added to the scores."""


@dataclass(frozen=True)
class _QueryTile:
    queries: slice
    """Of the step's tokens."""
    keys: slice
    """Of the gathered positions."""
    mask: Tensor | None
    """[queries, keys] added to the scores; None: plain causal (no key before the first query)."""


@dataclass(frozen=True)
class _PrefillRow:
    tiles: Tensor
    """[2 * kv_heads * blocks]"""
    parts: list[_QueryTile]


@dataclass(frozen=True)
class _Reads:
    """What layers of one window read."""

    decodes: list[_DecodeGroup]
    prefills: list[_PrefillRow]


@dataclass(frozen=True)
class TorchPlan(Writes):
    num_decodes: int
    reads: dict[int | None, _Reads]


class TorchAttention(TorchTiles):
    """Works on any device that PyTorch knows."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._bands: dict[int | None, Tensor] = {}

    # Once a step

    def prepare(self, step: AttentionStep) -> TorchPlan:
        starts, counts, tables = rows_of(step)
        reads = {}
        for window in self.shape.windows:
            first_query = np.cumsum(counts) - counts
            prefills = [
                self._prefill_row(
                    int(first_query[row]), int(starts[row]), int(counts[row]), tables[row], window
                )
                for row in range(step.num_decodes, len(counts))
            ]
            decodes = self._decode_groups(starts[: step.num_decodes] + 1, tables, window)
            reads[window] = _Reads(decodes, prefills)
        return TorchPlan(
            *self._writes(starts, counts, tables, step.num_decodes),
            num_decodes=step.num_decodes,
            reads=reads,
        )

    def _decode_groups(
        self, lengths: Int64Array, tables: Int64Array, window: int | None
    ) -> list[_DecodeGroup]:
        """`lengths`: [B] keys of each decode row, its own included."""
        if not len(lengths):
            return []
        size, kv_heads = self.shape.block_size, self.shape.num_kv_heads
        lows = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
        first_blocks = lows // size
        num_blocks = -(-lengths // size) - first_blocks
        groups = []
        split = _groups(num_blocks, size, _GATHER_BYTES // (2 * kv_heads * self._tile_bytes))
        for rows in split:
            width = int(num_blocks[rows].max())
            columns = np.minimum(np.arange(width), num_blocks[rows, None] - 1) + first_blocks[rows, None]
            tiles = self._tile_indices(tables[rows[:, None], columns])
            offsets = first_blocks[rows] * size
            low, high = lows[rows] - offsets, lengths[rows] - offsets
            if (low == low[0]).all() and (high == high[0]).all():
                first, stop, mask = int(low[0]), int(high[0]), None
            else:
                first, stop = 0, int(high.max())
                positions = np.arange(stop)
                seen = (positions >= low[:, None]) & (positions < high[:, None])
                allowed = np.where(seen, np.float32(0), np.float32(-np.inf))
                mask = self._tensor(allowed)[:, None, None, :]
            chosen = None if len(split) == 1 else self._tensor(rows)
            groups.append(_DecodeGroup(chosen, self._tensor(tiles), first, stop, mask))
        return groups

    def _prefill_row(
        self, query: int, start: int, count: int, table: Int64Array, window: int | None
    ) -> _PrefillRow:
        """`query`: the row's first token in the step."""
        size = self.shape.block_size
        low = 0 if window is None else max(start - window + 1, 0)
        origin = low // size * size
        tiles = self._tile_indices(table[None, low // size : -(-(start + count) // size)])
        parts = []
        for first in range(0, count, _QUERY_TILE):
            last = min(first + _QUERY_TILE, count)
            tile_low = 0 if window is None else max(start + first - window + 1, 0)
            plain = tile_low == start + first and (window is None or last - first <= window)
            mask = None if plain else self._mask(window, start + first - tile_low, last - first)
            keys = slice(tile_low - origin, start + last - origin)
            parts.append(_QueryTile(slice(query + first, query + last), keys, mask))
        return _PrefillRow(self._tensor(tiles), parts)

    def _mask(self, window: int | None, before: int, queries: int) -> Tensor:
        """[queries, before + queries]: 0 where query i may see key j, that is j - before in (i - w, i]."""
        band = self._bands.get(window)
        have = 0 if band is None else band.shape[1] - _QUERY_TILE
        if band is None or before > have:
            have = max(256, 1 << (before - 1).bit_length()) if before else 256
            distance = (
                torch.arange(_QUERY_TILE, device=self.shape.device)[:, None]
                - torch.arange(-have, _QUERY_TILE, device=self.shape.device)[None, :]
            )
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            band = torch.zeros(hidden.shape, dtype=self.shape.dtype, device=self.shape.device)
            band.masked_fill_(hidden, float("-inf"))
            self._bands[window] = band
        return band[:queries, have - before : have + queries]

    # For each layer

    def attend(
        self, layer: int, queries: Tensor, window: int | None, plan: TorchPlan, sinks: Tensor | None = None
    ) -> Tensor:
        reads = plan.reads[window]
        if self.shape.kv_int8:
            queries = rounded(queries).to(queries.dtype)
        if len(reads.decodes) == 1 and not reads.prefills:
            return self._attend_decodes(layer, queries, reads.decodes[0], sinks)
        out = torch.empty(
            plan.num_tokens, queries.shape[1] * queries.shape[2], dtype=queries.dtype, device=queries.device
        )
        decode_queries = queries[: plan.num_decodes]
        for group in reads.decodes:
            if group.rows is None:
                out[: plan.num_decodes] = self._attend_decodes(layer, decode_queries, group, sinks)
            else:
                chosen = decode_queries.index_select(0, group.rows)
                out.index_copy_(0, group.rows, self._attend_decodes(layer, chosen, group, sinks))
        for row in reads.prefills:
            self._attend_prefill(layer, queries, row, out, sinks)
        return out

    def _attend_decodes(
        self, layer: int, queries: Tensor, group: _DecodeGroup, sinks: Tensor | None
    ) -> Tensor:
        """[B, heads, head_dim] → [B, heads * head_dim]"""
        shape = self.shape
        batch = queries.shape[0]
        found = self._gather(layer, group.tiles, queries.dtype).view(
            2, batch, shape.num_kv_heads, -1, shape.head_dim
        )
        found = found[:, :, :, group.first : group.stop]
        grouped = queries.reshape(batch, shape.num_kv_heads, self._heads_per_kv, shape.head_dim)
        if sinks is not None:
            sinks = sinks.view(shape.num_kv_heads, self._heads_per_kv, 1)
        mask = None if group.mask is None else group.mask.to(queries.dtype)
        out = self._attention(grouped, found[0], found[1], mask, causal=False, sinks=sinks)
        return out.reshape(batch, -1)

    def _attend_prefill(
        self, layer: int, queries: Tensor, row: _PrefillRow, out: Tensor, sinks: Tensor | None
    ) -> None:
        shape = self.shape
        if sinks is not None:
            sinks = sinks.view(shape.num_kv_heads, self._heads_per_kv, 1, 1)
        found = self._gather(layer, row.tiles, queries.dtype).view(
            2, shape.num_kv_heads, 1, -1, shape.head_dim
        )
        found = found.expand(-1, -1, self._heads_per_kv, -1, -1)
        for part in row.parts:
            tile = queries[part.queries]
            tile = tile.reshape(tile.shape[0], shape.num_kv_heads, self._heads_per_kv, shape.head_dim)
            keys, values = found[:, :, :, part.keys]
            turned = tile.permute(1, 2, 0, 3)
            result = self._attention(turned, keys, values, part.mask, part.mask is None, sinks)
            out[part.queries] = result.permute(2, 0, 1, 3).flatten(1)

    def _attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        causal: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        """Of [..., n, head_dim] to [..., m, head_dim]; `mask` is added; `causal`: query i sees i + 1 keys.

        `sinks`: as many dimensions as fit [..., n, 1].
        """
        scale, cap = self.shape.scale, self.shape.soft_cap
        if cap is None and sinks is None:
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale
            )
        scores = torch.matmul(queries.float(), keys.float().transpose(-1, -2)) * scale
        if cap is not None:
            scores = cap * tanh(scores / cap)
        if causal:
            scores += torch.full(scores.shape[-2:], float("-inf"), device=scores.device).triu_(1)
        elif mask is not None:
            scores += mask
        if sinks is not None:
            scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        weights = scores.softmax(-1)
        return torch.matmul(weights[..., : keys.shape[-2]], values.float()).to(queries.dtype)


def _groups(num_blocks: Int64Array, block_size: int, max_blocks: int) -> list[Int64Array]:
    """Splits rows [B] by their numbers of blocks; see the top of the file.  Rows stay in order."""
    widest = int(num_blocks.max())
    if len(num_blocks) * widest <= max_blocks:
        padding = (len(num_blocks) * widest - int(num_blocks.sum())) * block_size
        if padding <= _SPLIT_TOKENS:
            return [np.arange(len(num_blocks))]
    order = np.argsort(-num_blocks, kind="stable")
    groups = []
    begin = 0
    while begin < len(order):
        width = int(num_blocks[order[begin]])
        end = begin + 1
        padding = 0
        while end < len(order) and (end + 1 - begin) * width <= max_blocks:
            blocks = int(num_blocks[order[end]])
            padding += (width - blocks) * block_size
            if 2 * blocks < width and padding > _SPLIT_TOKENS:
                break
            end += 1
        groups.append(np.sort(order[begin:end]))
        begin = end
    return groups
