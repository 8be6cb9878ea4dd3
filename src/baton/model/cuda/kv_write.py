"""From the rows of the q/k/v product to turned queries and to the pool: norms of heads, rotation, storing.

Theory.  A program takes up to HEADS heads of one token, of queries, keys or values: its number says of
which.  A head is read as its halves (a, b), which become (a cos - b sin, b cos + a sin); an RMS norm of the
head comes before, queries may be multiplied after (`Rotary.growth`).  Keys and values go to the token's
*place*, block * block size + offset; tokens of a place below 0 (padding of a fixed batch) are stored
nowhere.

What is kept is rounded to the model's dtype first, then, in eight bits, quantized as `attention.kv_int8`
says, so a position is the same bytes whichever backend wrote it.  Rows of the pool are `attending.Pages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.model.cuda.arithmetic import byte_scales, is_broken, to_integers
from baton.model.cuda.attending import Pages
from baton.model.cuda.launch import Launch, check, next_power

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_HEADS: Final = 8
"""Of a program."""


@dataclass(frozen=True, eq=False)
class Turns:
    """What is done to queries and keys before they are used."""

    cos: Tensor
    """[positions, head dim / 2] float32, any stride between positions"""
    sin: Tensor
    query_norm: Tensor | None = None
    """[head dim] weights, of the model's dtype; None: no norms"""
    key_norm: Tensor | None = None
    eps: float = 0.0
    plus: float = 0.0
    """Added to the weights."""
    growth: Tensor | None = None
    """[positions] float32 by which queries are multiplied"""


@triton.jit
def turned(
    a: tl.tensor,
    b: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    norm: tl.tensor,
    position: tl.tensor,
    turn_stride: tl.tensor,
    eps: tl.tensor,
    plus: tl.tensor,
    DIM: tl.constexpr,
    columns: tl.tensor,
    used: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Halves [n, DIM / 2] of heads, float32, after norm and rotation."""
    if norm is not None:
        sums = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        inverse = (1.0 / tl.sqrt(sums / DIM + eps))[:, None]
        a = a * inverse * (tl.load(norm + columns, mask=used, other=0.0).to(tl.float32) + plus)[None, :]
        b = (
            b
            * inverse
            * (tl.load(norm + DIM // 2 + columns, mask=used, other=0.0).to(tl.float32) + plus)[None, :]
        )
    c = tl.load(cos + position.to(tl.int64) * turn_stride + columns, mask=used, other=0.0)[None, :]
    s = tl.load(sin + position.to(tl.int64) * turn_stride + columns, mask=used, other=0.0)[None, :]
    return a * c - b * s, b * c + a * s


@triton.jit
def keep(
    a: tl.tensor,
    b: tl.tensor,
    to: tl.tensor,
    scales: tl.tensor,
    at: tl.tensor,
    DIM: tl.constexpr,
    columns: tl.tensor,
    mask: tl.tensor,
    heads: tl.tensor,
    INT8: tl.constexpr,
) -> None:
    """Stores halves [n, DIM / 2], of the model's dtype, at elements `at` [n] of a layer's keys or values."""
    if INT8:
        x, y = a.to(tl.float32), b.to(tl.float32)
        broken = tl.maximum(tl.max(is_broken(x), 1), tl.max(is_broken(y), 1)) > 0
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        factors, kept = byte_scales(largest, broken)
        tl.store(scales + at // 4, kept, mask=heads)
        x, y = to_integers(x, factors, broken), to_integers(y, factors, broken)
        tl.store(to + at[:, None] + columns[None, :], x.to(tl.int8), mask=mask)
        tl.store(to + at[:, None] + DIM // 2 + columns[None, :], y.to(tl.int8), mask=mask)
    else:
        tl.store(to + at[:, None] + columns[None, :], a, mask=mask)
        tl.store(to + at[:, None] + DIM // 2 + columns[None, :], b, mask=mask)


@triton.jit(do_not_specialize_on_alignment=("positions",))
def turn_and_store_kernel(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    out: tl.tensor,
    kept_keys: tl.tensor,
    kept_values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    growth: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    turn_stride: tl.tensor,
    eps: tl.tensor,
    plus: tl.tensor,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    POSITION_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INT8: tl.constexpr,
) -> None:
    """Programs: (tokens, parts of query heads + parts of keys + parts of values).

    QUERY_HEADS 0: nothing is turned, keys are stored as they are.
    """
    query_parts: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    kv_parts: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, HALF)
    used = columns < DIM // 2
    if QUERY_HEADS > 0 and part < query_parts:  # (without queries there is nothing here to compile)
        head = part * HEADS + tl.arange(0, HEADS)
        mask = (head < QUERY_HEADS)[:, None] & used[None, :]
        at = head[:, None] * DIM + columns[None, :]
        a = tl.load(queries + token * query_stride + at, mask=mask, other=0.0)
        b = tl.load(queries + token * query_stride + at + DIM // 2, mask=mask, other=0.0)
        position = tl.load(positions + token)
        x, y = turned(
            a.to(tl.float32),
            b.to(tl.float32),
            cos,
            sin,
            query_norm,
            position,
            turn_stride,
            eps,
            plus,
            DIM,
            columns,
            used,
        )
        if growth is not None:
            factor = tl.load(growth + position)
            x, y = x * factor, y * factor
        tl.store(out + token * (QUERY_HEADS * DIM) + at, x.to(a.dtype), mask=mask)
        tl.store(out + token * (QUERY_HEADS * DIM) + at + DIM // 2, y.to(a.dtype), mask=mask)
    else:
        place = tl.load(places + token)
        if place >= 0:
            kv_part = part - query_parts
            head = (kv_part % kv_parts) * HEADS + tl.arange(0, HEADS)
            heads = head < KV_HEADS
            mask = heads[:, None] & used[None, :]
            to = (
                place // BLOCK * BLOCK_STRIDE
                + place % BLOCK * POSITION_STRIDE
                + head.to(tl.int64) * HEAD_STRIDE
            )
            at = head[:, None] * DIM + columns[None, :]
            if kv_part < kv_parts:
                a = tl.load(keys + token * key_stride + at, mask=mask, other=0.0)
                b = tl.load(keys + token * key_stride + at + DIM // 2, mask=mask, other=0.0)
                if QUERY_HEADS:
                    x, y = turned(
                        a.to(tl.float32),
                        b.to(tl.float32),
                        cos,
                        sin,
                        key_norm,
                        tl.load(positions + token),
                        turn_stride,
                        eps,
                        plus,
                        DIM,
                        columns,
                        used,
                    )
                    a, b = x.to(a.dtype), y.to(b.dtype)
                keep(a, b, kept_keys, key_scales, to, DIM, columns, mask, heads, INT8)
            else:
                a = tl.load(values + token * value_stride + at, mask=mask, other=0.0)
                b = tl.load(values + token * value_stride + at + DIM // 2, mask=mask, other=0.0)
                keep(a, b, kept_values, value_scales, to, DIM, columns, mask, heads, INT8)


def turn_and_store(
    qkv: Tensor, heads: int, pages: Pages, positions: Tensor, places: Tensor, turns: Turns
) -> Tensor:
    """qkv [T, (heads + 2 * KV heads) * head dim] → queries [T, heads, head dim] normed and turned; keys
    (likewise) and values are stored at `places`.  positions: int32 [T]; places: int64 [T]."""
    _, kv_heads, _, dim = pages.keys.shape
    out = torch.empty((len(qkv), heads, dim), dtype=qkv.dtype, device=qkv.device)
    check("qkv", qkv, (None, (heads + 2 * kv_heads) * dim), *_DTYPES)
    parts = qkv.view(len(qkv), heads + 2 * kv_heads, dim)
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    store_launch(k, v, pages, places, q, out, positions, turns).run()
    return out


def store(keys: Tensor, values: Tensor, pages: Pages, places: Tensor) -> None:
    """Stores keys and values [T, KV heads, head dim] as they are; tokens may be apart."""
    store_launch(keys, values, pages, places, None, None, None, None).run()


def store_launch(
    keys: Tensor,
    values: Tensor,
    pages: Pages,
    places: Tensor,
    queries: Tensor | None,
    out: Tensor | None,
    positions: Tensor | None,
    turns: Turns | None,
) -> Launch:
    """See `turn_and_store`; without queries `store`."""
    _, kv_heads, _, dim = pages.keys.shape
    tokens, int8 = len(keys), pages.key_scales is not None
    if dim % 2:
        raise ValueError(f"heads of {dim} elements: the kernel takes them in halves, so give an even number")
    for name, tensor in (("keys", keys), ("values", values)):
        check(name, tensor, (tokens, kv_heads, dim), *(_DTYPES if int8 else (pages.keys.dtype,)))
        if tensor.stride(1) != dim:
            raise ValueError(
                f"{name} with strides {list(tensor.stride())}: heads of a token must lie side by side"
            )
    check("places", places, (tokens,), torch.int64)
    query_heads = 0
    if queries is not None:
        assert out is not None
        assert positions is not None
        assert turns is not None
        query_heads = queries.shape[1]
        check("queries", queries, (tokens, None, dim), keys.dtype)
        check("out", out, (tokens, query_heads, dim), keys.dtype)
        check("positions", positions, (tokens,), torch.int32)
        check("cos", turns.cos, (None, dim // 2), torch.float32)
        check("sin", turns.sin, (None, dim // 2), torch.float32)
        if turns.cos.stride(0) != turns.sin.stride(0):
            raise ValueError("cos and sin: the stride between positions must be the same")
        for name, norm in (("query_norm", turns.query_norm), ("key_norm", turns.key_norm)):
            if norm is not None:
                check(name, norm, (dim,), keys.dtype)
        if turns.growth is not None:
            check("growth", turns.growth, (None,), torch.float32)
    arguments = dict(
        queries=queries,
        keys=keys,
        values=values,
        out=out,
        kept_keys=pages.keys,
        kept_values=pages.values,
        key_scales=pages.key_scales,
        value_scales=pages.value_scales,
        positions=positions,
        places=places,
        cos=None if turns is None else turns.cos,
        sin=None if turns is None else turns.sin,
        query_norm=None if turns is None else turns.query_norm,
        key_norm=None if turns is None else turns.key_norm,
        growth=None if turns is None else turns.growth,
        query_stride=0 if queries is None else queries.stride(0),
        key_stride=keys.stride(0),
        value_stride=values.stride(0),
        turn_stride=0 if turns is None else turns.cos.stride(0),
        eps=0.0 if turns is None else float(turns.eps),
        plus=0.0 if turns is None else float(turns.plus),
        **pages.sizes,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=next_power(dim // 2, 8),
        HEADS=_HEADS,
        INT8=int8,
    )
    parts = -(-query_heads // _HEADS) + 2 * -(-kv_heads // _HEADS)
    # (Products and sums are rounded each, as where PyTorch turns heads.)
    return Launch(turn_and_store_kernel, (tokens, parts), arguments, fused=False)
