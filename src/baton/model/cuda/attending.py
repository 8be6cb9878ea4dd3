"""How attention is launched: sizes of tiles by what there is to compute, and the arrays that say where.

Theory.  `attention` tells what the kernels do.  ROWS is 16 where items have one position, the least that
tensor cores multiply (a KV head of more query heads takes several tiles); else as many as keep O and a tile
of scores in registers. All of this depends on the model and on whether an item is a decode row's, never on
how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from baton.model.cuda.attention import MERGED, attend_kernel, merge_kernel
from baton.model.cuda.launch import Launch, check, next_power

SPLIT: Final = 256
"""Positions of a split of a decode row's context: a multiple of the keys that a program takes at a time."""
ITEM_COLUMNS: Final = 4
"""Of `items`: first token of the step, number of positions (0: nothing to do), position of the first, row of
the block tables."""
LARGEST_DIM: Final = 256
_DECODE_ROWS: Final = 16
_SPLIT_BYTES: Final = 512 << 20
"""Of sums of splits that are kept at a time: more items are launched one part after the other."""
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """What a program computes at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)
class Pages:
    """One layer of the pool [blocks, layers, 2, KV heads, block, row], as views."""

    keys: Tensor
    """[blocks, KV heads, block, head dim]; int8 where there are scales"""
    values: Tensor
    key_scales: Tensor | None
    """[blocks, KV heads, block] float32, behind the bytes of each position"""
    value_scales: Tensor | None

    @classmethod
    def of(cls, pool: Tensor, layer: int, head_dim: int) -> Pages:
        """`pool`: of bytes if keys and values are in eight bits (`attention.kv_int8.to_rows`)."""
        if pool.dim() != 6 or not pool.is_contiguous():
            raise ValueError(
                f"pool {list(pool.shape)}: give [blocks, layers, 2, KV heads, block, row], contiguous"
            )
        keys, values = pool[:, layer, 0], pool[:, layer, 1]
        if pool.dtype != torch.uint8:
            check("pool", keys, (None, None, None, head_dim), *_DTYPES)
            return cls(keys, values, None, None)
        check("pool", keys, (None, None, None, -(-head_dim // 4) * 4 + 4))
        scales = pool.view(torch.float32)[:, layer, :, :, :, -1]
        signed = pool.view(torch.int8)[:, layer, :, :, :, :head_dim]
        return cls(signed[:, 0], signed[:, 1], scales[:, 0], scales[:, 1])

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of kernels, in elements of `keys`."""
        strides = self.keys.stride()
        return {
            "BLOCK_STRIDE": strides[0],
            "HEAD_STRIDE": strides[1],
            "POSITION_STRIDE": strides[2],
            "BLOCK": self.keys.shape[2],
        }


def tile_of(group: int, head_dim: int, dtype: torch.dtype, decode: bool, int8: bool = False) -> Tile:
    """For KV heads of `group` query heads; `decode`: items of one position; `int8`: as the pool holds
    them."""
    wide, exact = head_dim > 128, dtype == torch.float32
    if exact:  # (float32 is not multiplied by tensor cores)
        return Tile(_DECODE_ROWS, 16, 8 if wide or (int8 and head_dim > 64) else 4, 1)
    if decode:
        return Tile(_DECODE_ROWS, 32 if wide or int8 else 64, 4, 2)
    return Tile(64, 32, 8, 2) if wide else Tile(64, 64, 4, 2)


def positions_of(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """How many positions an item of a chunk may have."""
    rows = tile_of(group, head_dim, dtype, decode=False).rows
    return max(1, rows // min(group, rows))


def attend(
    queries: Tensor,
    pages: Pages,
    items: Tensor,
    tables: Tensor,
    scale: float,
    *,
    longest: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of queries [T, heads, head dim] to what is written in `pages` → [T, heads * head dim].

    items: [N, ITEM_COLUMNS] int32; tables: [R, W] int32 block ids.  `longest`: items have one position each
    and at most so many keys, and are computed in splits; None: items have up to `positions_of` positions.
    With a window w, position p sees p-w+1 … p.  sinks: float32 [heads].
    """
    tokens, heads, dim = queries.shape
    if out is None:
        out = torch.empty((tokens, heads * dim), dtype=queries.dtype, device=queries.device)
    together = len(items)
    if longest is not None:  # (a row's result does not depend on what else is launched)
        together = max(1, _SPLIT_BYTES // (-(-longest // SPLIT) * heads * dim * 4))
    for first in range(0, len(items), max(together, 1)):
        some = items[first : first + together]
        for launch in attend_launches(
            queries, pages, some, tables, scale, longest, window, soft_cap, sinks, out
        ):
            launch.run()
    return out


def attend_launches(
    queries: Tensor,
    pages: Pages,
    items: Tensor,
    tables: Tensor,
    scale: float,
    longest: int | None,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    out: Tensor,
) -> list[Launch]:
    """See `attend`."""
    check("queries", queries, (None, None, None), *_DTYPES)
    _, heads, dim = queries.shape
    _, kv_heads, _, _ = pages.keys.shape
    _check_all(queries, pages, items, tables, window, sinks, out)
    decode, splits = longest is not None, 1 if longest is None else max(1, -(-longest // SPLIT))
    group = heads // kv_heads
    tile = tile_of(group, dim, queries.dtype, decode, pages.key_scales is not None)
    tile_heads = min(group, tile.rows)
    sums = tops = None
    if decode:
        sums = torch.empty((len(items), heads, splits, dim), dtype=torch.float32, device=queries.device)
        tops = torch.empty((len(items), heads, splits, 2), dtype=torch.float32, device=queries.device)
    shared = dict(
        out=out,
        sums=sums,
        tops=tops,
        items=items,
        sinks=sinks,
        splits=splits,
        window=window or 0,
        HEADS=heads,
        DIM=dim,
        WIDTH=next_power(dim, 16),
        SPLIT=SPLIT if decode else 0,
        WINDOW=window is not None,
    )
    arguments = dict(
        queries=queries,
        keys=pages.keys,
        values=pages.values,
        key_scales=pages.key_scales,
        value_scales=pages.value_scales,
        tables=tables,
        query_stride=queries.stride(0),
        table_stride=tables.stride(0),
        scale=float(scale),
        soft_cap=float(soft_cap or 0.0),
        **pages.sizes,
        GROUP=group,
        TILE_HEADS=tile_heads,
        ROWS=tile.rows,
        KEYS=tile.keys,
        INT8=pages.key_scales is not None,
        SOFT_CAP=soft_cap is not None,
        **shared,
    )
    grid = len(items), kv_heads * -(-group // tile_heads), splits
    launches = [Launch(attend_kernel, grid, arguments, tile.warps, tile.stages)]
    if splits > 1:
        launches.append(Launch(merge_kernel, (len(items), heads), {**shared, "TOGETHER": MERGED}))
    return launches


def _check_all(
    queries: Tensor,
    pages: Pages,
    items: Tensor,
    tables: Tensor,
    window: int | None,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    tokens, heads, dim = queries.shape
    _, kv_heads, _, kept_dim = pages.keys.shape
    if dim != kept_dim or heads % kv_heads:
        raise ValueError(
            f"queries {list(queries.shape)}: the pool has {kv_heads} KV heads of {kept_dim} elements; give "
            "heads of that size, and a multiple of that number"
        )
    if dim > LARGEST_DIM:
        raise ValueError(
            f"queries {list(queries.shape)}: the kernels take heads of at most {LARGEST_DIM} elements"
        )
    if queries.stride(1) != dim:
        raise ValueError(
            f"queries with strides {list(queries.stride())}: heads of a token must lie side by side"
        )
    if pages.key_scales is None and pages.keys.dtype != queries.dtype:
        raise ValueError(
            f"queries of {queries.dtype}, but the pool holds {pages.keys.dtype}; give the same, or eight bits"
        )
    if window is not None and window < 1:
        raise ValueError(f"window {window}: a position sees itself at least; give 1 or more")
    check("items", items, (None, ITEM_COLUMNS), torch.int32)
    if not items.is_contiguous():
        raise ValueError("items: rows must lie side by side; give a contiguous tensor")
    check("tables", tables, (None, None), torch.int32)
    check("out", out, (tokens, heads * dim), queries.dtype)
    if not out.is_contiguous():
        raise ValueError("out: rows must lie side by side; give a contiguous tensor")
    if sinks is not None:
        check("sinks", sinks, (heads,), torch.float32)
