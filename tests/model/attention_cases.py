"""Paged attention checked against a direct computation in float64; shared by the tests of all backends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.model.attention.base import AttentionBackend, AttentionShape, AttentionStep
from baton.model.attention.kv_int8 import rounded

LAYERS = 2


@dataclass(frozen=True)
class Case:
    """Rows of (tokens before, tokens now); decode rows (one token now) come first."""

    rows: tuple[tuple[int, int], ...]
    head_dim: int = 64
    num_kv_heads: int = 2
    heads_per_kv: int = 1
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    kv_int8: bool = False
    sinks: bool = False

    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_layers=LAYERS,
            num_heads=self.num_kv_heads * self.heads_per_kv,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            scale=self.head_dim**-0.5,
            windows=frozenset({None, self.window}),
            dtype=self.dtype,
            device=torch.device("cpu"),
            kv_int8=self.kv_int8,
        )

    def kept(self, heads: Tensor) -> Tensor:
        """[n, heads, head_dim] as attention computes with them."""
        return rounded(heads) if self.kv_int8 else heads

    @property
    def tolerance(self) -> float:
        """bfloat16: weights and results are rounded to 8 bits; KV in 8 bits: weights to 15."""
        return 2e-2 if self.dtype == torch.bfloat16 else 2e-4 if self.kv_int8 else 2e-5


@dataclass
class Loaded:
    """A pool that holds what came before the step, and the step."""

    case: Case
    pool: Tensor
    step: AttentionStep
    keys: list[Tensor]
    """Of each row, [before + now, kv_heads, head_dim]."""
    values: list[Tensor]
    queries: Tensor
    """[T, heads, head_dim]"""
    sinks: Tensor | None
    """[heads] float32"""

    def new(self, of: list[Tensor]) -> Tensor:
        """[T, kv_heads, head_dim] the step's own."""
        return torch.cat([part[before:] for part, (before, _) in zip(of, self.case.rows, strict=True)])

    def expected(self) -> Tensor:
        """[T, heads * head_dim] float64"""
        parts = self.case.kept(self.queries).split([now for _, now in self.case.rows])
        return torch.cat(
            [
                direct(part, *kept, before, self.case.window, self.case.heads_per_kv, self.sinks)
                for part, *kept, (before, _) in zip(
                    parts,
                    map(self.case.kept, self.keys),
                    map(self.case.kept, self.values),
                    self.case.rows,
                    strict=True,
                )
            ]
        )


LAYER = 1


def load(backend: AttentionBackend, case: Case, seed: int = 0, garbage: float = 0.0) -> Loaded:
    """Writes all but the step's own tokens into layer `LAYER` of a pool full of `garbage`.

    All of it is on the backend's device.  Blocks are spread over the pool in a random order; columns of a
    table past the row's end are wild.
    """
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    size, device = case.block_size, backend.shape.device
    blocks = [-(-(before + now) // size) for before, now in case.rows]
    ids = generator.permutation(sum(blocks) + 3)
    tables = np.full((len(blocks), max(blocks) + 1), 1 << 30, np.int32)
    used = 0
    for row, number in enumerate(blocks):
        tables[row, :number] = ids[used : used + number]
        used += number
    pool = empty_pool(backend, case, len(ids), garbage)
    backend.bind(pool)
    keys, values = (
        [
            torch.randn(before + now, case.num_kv_heads, case.head_dim).to(device, case.dtype)
            for before, now in case.rows
        ]
        for _ in range(2)
    )
    starts = np.array([before for before, _ in case.rows], np.int32)
    counts = np.array([now for _, now in case.rows], np.int32)
    for row, before in enumerate(starts):
        if before:
            zero, one = np.zeros(1, np.int32), starts[row : row + 1]
            plan = backend.prepare(AttentionStep(zero, one, tables[row : row + 1], 0))
            backend.write_kv(LAYER, keys[row][:before], values[row][:before], plan)
    step = AttentionStep(starts, counts, tables, int((counts == 1).sum()))
    heads = case.num_kv_heads * case.heads_per_kv
    queries = torch.randn(int(counts.sum()), heads, case.head_dim).to(device, case.dtype)
    # Some are far above all scores, and some far below.
    sinks = (torch.randn(heads) * 8).to(device) if case.sinks else None
    return Loaded(case, pool, step, keys, values, queries, sinks)


def empty_pool(backend: AttentionBackend, case: Case, blocks: int, garbage: float) -> Tensor:
    """Each number of it is `garbage`; of bytes all scales are, if it is NaN."""
    sizes = (blocks, LAYERS, 2, case.num_kv_heads, *backend.tile_shape)
    filled: float = garbage
    if backend.pool_dtype == torch.uint8:
        filled = 0xFF if math.isnan(garbage) else int(garbage)
    return torch.full(sizes, filled, dtype=backend.pool_dtype, device=backend.shape.device)


def run(backend: AttentionBackend, loaded: Loaded) -> Tensor:
    plan = backend.prepare(loaded.step)
    backend.write_kv(LAYER, loaded.new(loaded.keys), loaded.new(loaded.values), plan)
    return backend.attend(LAYER, loaded.queries, loaded.case.window, plan, loaded.sinks)


def check(make: Callable[[AttentionShape], AttentionBackend], case: Case, seed: int = 0) -> None:
    """Compares with `direct`; what is unused in the pool is NaN."""
    backend = make(case.shape())
    loaded = load(backend, case, seed, garbage=float("nan"))
    found = run(backend, loaded)
    tolerance = case.tolerance
    torch.testing.assert_close(found.double(), loaded.expected(), atol=tolerance, rtol=tolerance)


def direct(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    window: int | None,
    heads_per_kv: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """[n, heads, d] over [start + n, kv_heads, d] → [n, heads * d] float64"""
    keys, values = (part.double().repeat_interleave(heads_per_kv, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * queries.shape[-1] ** -0.5
    device = queries.device
    at, seen = torch.arange(len(queries), device=device), torch.arange(len(keys), device=device)
    distance = (start + at)[:, None] - seen[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(queries), 1)), -1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)
