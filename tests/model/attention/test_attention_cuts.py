"""Attention at a position is the same, bit for bit, however the chunks of its prompt were cut."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.model.attention import AttentionBackend, AttentionShape, AttentionStep, CpuAttention
from baton.model.attention.cpu_backend import kernel_shape
from baton.model.attention.torch_pieces import TorchPieces
from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.native_kernels import NativeKernels
from baton.model.cpu.numba.kernels import NumbaKernels
from tests.model.attention_cases import LAYER, Case, empty_pool

Make = Callable[[AttentionShape], AttentionBackend]


def native_backend(name: str) -> Make:
    return lambda shape: CpuAttention(shape, NativeKernels(kernel_shape(shape), load(name)))


BACKENDS: dict[str, Make] = {
    **{name: native_backend(name) for name in instruction_sets()},
    "numba": lambda shape: CpuAttention(shape, NumbaKernels(kernel_shape(shape))),
    "torch": TorchPieces,
}


class Context:
    """One request's keys and values, in a pool, and a query at each of its positions."""

    def __init__(self, make: Make, case: Case, length: int) -> None:
        self.backend = make(case.shape())
        self.case, self.length = case, length
        heads = case.num_kv_heads * case.heads_per_kv
        blocks = -(-length // case.block_size)
        self.table = np.random.default_rng(length).permutation(blocks + 3).astype(np.int32)[None, :blocks]
        self.backend.bind(empty_pool(self.backend, case, blocks + 3, float("nan")))
        self.queries = torch.randn(length, heads, case.head_dim).mul_(3).to(case.dtype)
        keys, values = (
            torch.randn(length, case.num_kv_heads, case.head_dim).to(case.dtype) for _ in range(2)
        )
        self.backend.write_kv(LAYER, keys, values, self.backend.prepare(self.step([(0, length)])))

    def step(self, rows: list[tuple[int, int]]) -> AttentionStep:
        starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        decodes = int((counts == 1).sum())
        return AttentionStep(starts, counts, np.repeat(self.table, len(rows), axis=0), decodes)

    def attend(self, rows: list[tuple[int, int]]) -> list[Tensor]:
        """Rows (start, count) of one step, all of this request; what each gives."""
        rows = sorted(rows, key=lambda row: row[1] != 1)
        queries = torch.cat([self.queries[start : start + count] for start, count in rows])
        found = self.backend.attend(LAYER, queries, self.case.window, self.backend.prepare(self.step(rows)))
        return list(found.split([count for _, count in rows]))


def cuts(chance: random.Random, length: int) -> list[tuple[int, int]]:
    """(start, count) of chunks of all sizes: single tokens, fewer than a tile of queries, long ones."""
    rows, start = [], 0
    while start < length:
        count = min(chance.choice([1, 1, 2, 3, 7, 16, 33, chance.randrange(1, 700)]), length - start)
        rows.append((start, count))
        start += count
    return rows


def some_case(chance: random.Random, dtype: torch.dtype, kv_int8: bool) -> Case:
    return Case(
        (),
        head_dim=chance.choice([12 if kv_int8 else 6, 16, 64, 80]),
        num_kv_heads=chance.choice([1, 2, 3]),
        heads_per_kv=chance.choice([1, 2, 4, 7, 40] if chance.random() < 0.3 else [1, 2, 7]),
        block_size=chance.choice([4, 12 if kv_int8 else 6, 16, 16, 24, 64, 128]),
        window=chance.choice([None, None, 5, 100, 700]),
        dtype=dtype,
        kv_int8=kv_int8,
    )


@pytest.mark.parametrize("kv_int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", list(BACKENDS))
def test_a_position_does_not_depend_on_the_cuts(name: str, dtype: torch.dtype, kv_int8: bool) -> None:
    chance = random.Random(5)
    torch.manual_seed(5)
    odd = Case((), 8 if kv_int8 else 6, 1, 1, 4, 5, dtype, kv_int8)  # smaller than a vector, blocks and heads
    for case in (odd, *(some_case(chance, dtype, kv_int8) for _ in range(3))):
        length = chance.randrange(520, 1300)
        context = Context(BACKENDS[name], case, length)
        (whole,) = context.attend([(0, length)])
        assert torch.isfinite(whole).all()
        for _ in range(2):
            rows = cuts(chance, length)
            rows = chance.sample(rows, min(len(rows), 24))
            while rows:  # some rows a step
                some, rows = rows[: (batch := chance.randrange(1, 8))], rows[batch:]
                some.sort(key=lambda row: row[1] != 1)
                for (start, count), found in zip(some, context.attend(some), strict=True):
                    assert torch.equal(found, whole[start : start + count]), (case, length, start, count)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_rows_gives_the_same_in_pytorch(threads: int) -> None:
    """Of one request alone, which libraries multiply in other ways than several at once."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(6)
        for dim, kv_heads in ((8, 1), (64, 3)):
            context = Context(TorchPieces, Case((), dim, kv_heads, 1, 16, None, torch.float32), 600)
            (whole,) = context.attend([(0, 600)])
            for count in range(1, 18):
                for start in range(0, 600 - count, 90):
                    (found,) = context.attend([(start, count)])
                    assert torch.equal(found, whole[start : start + count]), (dim, kv_heads, start, count)
    finally:
        torch.set_num_threads(before)
