"""Pairs (token, expert) sorted by expert, and their results added up again.

Theory.  A step's T tokens have `chosen` experts each: P = T * chosen pairs, pair p of token p // chosen.
`sort_kernel` counts for each expert the pairs of lower ids and its own, which says where its rows begin, and
writes its pairs there in their order.  So what a pair's place is follows from the ids, and no two programs
write the same word.  Nothing is read back by the host: how many tiles of rows there are it need not know,
because it launches as many as there can be, and those that have no rows end at once.

*Where tiles stand.*  An expert whose rows begin at `first` has its tiles from number first // ROWS + expert
on.  That leaves room for all of them: c rows from `first` on reach over at least ceil(c / ROWS) - 1 multiples
of ROWS.  What is left of that room is told to be empty by the same program.

*The sum.*  `combine_kernel` adds up a token's results in the order of its experts' ids, in float32, and those
of the MLP that all tokens pass at last: a token's result depends on nothing else in the step.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.model.cuda.launch import Launch, check
from baton.model.ops.routing import Routed

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_STRETCH: Final = 1024
_FEW: Final = 256
"""Pairs, up to which a program looks at no more at a time.  (Each width is compiled for itself.)"""


@triton.jit(do_not_specialize=("pairs", "slots"))
def sort_kernel(
    ids: tl.tensor,
    present: tl.tensor,
    order: tl.tensor,
    places: tl.tensor,
    tiles: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    slots: tl.tensor,
    experts: tl.tensor,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Programs: experts.  ids: int32 [pairs]; present: int64 [tokens], below 0 for those that have no pairs
    (None: all have); order: int32, the pair at each place; places: int32 [pairs], -1 for none; tiles: int32
    [slots, 3], as `kernel.product_kernel` reads them; counts: int64 [experts], to which pairs are added."""
    expert = tl.program_id(0)
    less = expert * 0
    own = expert * 0
    for start in range(0, pairs, WIDTH):
        pair = start + tl.arange(0, WIDTH)
        of = ids_of(ids, present, pair, pairs, experts, CHOSEN)
        less += tl.sum((of < expert).to(tl.int32), 0)
        own += tl.sum((of == expert).to(tl.int32), 0)
    at = less
    for start in range(0, pairs, WIDTH):
        pair = start + tl.arange(0, WIDTH)
        of = ids_of(ids, present, pair, pairs, experts, CHOSEN)
        mine = (of == expert).to(tl.int32)
        place = at + tl.cumsum(mine, 0) - mine
        tl.store(order + place, pair, mask=mine > 0)
        tl.store(places + pair, place, mask=mine > 0)
        tl.store(places + pair, place * 0 - 1, mask=(expert == 0) & (of == experts) & (pair < pairs))
        at += tl.sum(mine, 0)
    begin = less // ROWS + expert
    end = tl.where(expert == experts - 1, slots, (less + own) // ROWS + expert + 1)
    for start in range(begin, end, WIDTH):
        slot = start + tl.arange(0, WIDTH)
        before = (slot - begin) * ROWS
        count = tl.maximum(tl.minimum(own - before, ROWS), 0)
        there = slot < end
        tl.store(tiles + slot * 3, slot * 0 + expert, mask=there)
        tl.store(tiles + slot * 3 + 1, less + before, mask=there)
        tl.store(tiles + slot * 3 + 2, count, mask=there)
    tl.store(counts + expert, tl.load(counts + expert) + own)


@triton.jit
def ids_of(
    ids: tl.tensor,
    present: tl.tensor,
    pair: tl.tensor,
    pairs: tl.tensor,
    experts: tl.tensor,
    CHOSEN: tl.constexpr,
) -> tl.tensor:
    """Of pairs [n]; `experts` for those that there are not."""
    of = tl.load(ids + pair, mask=pair < pairs, other=experts)
    if present is not None:
        there = tl.load(present + pair // CHOSEN, mask=pair < pairs, other=-1)
        of = tl.where(there >= 0, of, experts)
    return of


@triton.jit
def combine_kernel(
    found: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    shared: tl.tensor,
    gates: tl.tensor,
    out: tl.tensor,
    shared_stride: tl.tensor,
    size: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Programs: (tokens, stretches of WIDTH).  found: [pairs, size], in sorted order; shared: [tokens, size]
    or None; gates: float32 [tokens], by which it is multiplied, or None."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = n < size
    total = tl.zeros((WIDTH,), tl.float32)
    for number in range(CHOSEN):
        place = tl.load(places + token * CHOSEN + number)
        weight = tl.load(weights + token * CHOSEN + number)
        some = tl.load(found + place.to(tl.int64) * size + n, mask=inside & (place >= 0), other=0.0)
        total += some.to(tl.float32) * weight
    if shared is not None:
        more = tl.load(shared + token * shared_stride + n, mask=inside, other=0.0).to(tl.float32)
        if gates is not None:
            more = more * tl.load(gates + token)
        total += more
    tl.store(out + token * size + n, total.to(out.dtype.element_ty), mask=inside)


class Sorted(NamedTuple):
    """Pairs by expert."""

    order: Tensor
    """[pairs] int32: which one is at each place"""
    places: Tensor
    """[pairs] int32: where each one is; -1: nowhere"""
    tiles: Tensor
    """[slots, 3] int32: expert, first place, number of rows"""


def sort(ids: Tensor, experts: int, rows: int, counts: Tensor, present: Tensor | None) -> Sorted:
    """Of ids int32 [T, chosen], for tiles of `rows` rows.  `counts` int64 [experts]: pairs of each are added.
    `present` int64 [T]: tokens below 0 have no pairs."""
    pairs = ids.numel()
    order, places = (torch.empty(pairs, dtype=torch.int32, device=ids.device) for _ in range(2))
    tiles = torch.empty((pairs // rows + experts, 3), dtype=torch.int32, device=ids.device)
    found = Sorted(order, places, tiles)
    sort_launch(ids, present, found, counts, rows).run()
    return found


def sort_launch(ids: Tensor, present: Tensor | None, found: Sorted, counts: Tensor, rows: int) -> Launch:
    check("ids", ids, (None, None), torch.int32)
    check("counts", counts, (None,), torch.int64)
    tokens, chosen = ids.shape
    if present is not None:
        check("present", present, (tokens,), torch.int64)
    arguments = dict(
        ids=ids,
        present=present,
        order=found.order,
        places=found.places,
        tiles=found.tiles,
        counts=counts,
        pairs=ids.numel(),
        slots=len(found.tiles),
        experts=len(counts),
        CHOSEN=chosen,
        ROWS=rows,
        WIDTH=_FEW if ids.numel() <= _FEW else _STRETCH,
    )
    return Launch(sort_kernel, (len(counts),), arguments)


def combine(found: Tensor, places: Tensor, routed: Routed, shared: Tensor | None) -> Tensor:
    """Results of pairs [pairs, n] by place, and of the MLP that all tokens pass [T, n] → [T, n]"""
    out = torch.empty((len(routed.ids), found.shape[1]), dtype=found.dtype, device=found.device)
    combine_launch(found, places, routed, shared, out).run()
    return out


def combine_launch(
    found: Tensor, places: Tensor, routed: Routed, shared: Tensor | None, out: Tensor
) -> Launch:
    tokens, chosen = routed.ids.shape
    check("found", found, (tokens * chosen, None), *_DTYPES)
    size = found.shape[1]
    check("weights", routed.weights, (tokens, chosen), torch.float32)
    if shared is not None:
        check("shared", shared, (tokens, size), found.dtype)
    arguments = dict(
        found=found,
        places=places,
        weights=routed.weights,
        shared=shared,
        gates=routed.shared,
        out=out,
        shared_stride=0 if shared is None else shared.stride(0),
        size=size,
        CHOSEN=chosen,
        WIDTH=_STRETCH,
    )
    # (Products and sums are rounded each, as where PyTorch adds up.)
    return Launch(combine_kernel, (tokens, -(-size // _STRETCH)), arguments, fused=False)
