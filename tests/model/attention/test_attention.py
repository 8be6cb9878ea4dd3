"""The attention backend against a direct computation, over random rows, tables, windows and limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.model.attention import torch_backend, torch_pieces
from baton.model.attention.base import AttentionShape, AttentionStep
from baton.model.attention.kv_int8 import rounded
from baton.model.attention.torch_backend import TorchAttention, _groups
from baton.model.attention.torch_pieces import TorchPieces

LAYERS, HEAD_DIM = 2, 8


def direct(queries, keys, values, start, window, heads_per_kv, sinks):
    """[count, heads, d] queries at start, start+1, … over [start + count, kv_heads, d]."""
    keys, values = (tensor.repeat_interleave(heads_per_kv, dim=1) for tensor in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys.double()) * HEAD_DIM**-0.5
    distance = (start + torch.arange(len(queries)))[:, None] - torch.arange(len(keys))[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(queries), 1)), -1)
    weights = scores.softmax(dim=-1)[..., : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values.double()).flatten(1).float()


rows_strategy = st.lists(
    st.tuples(st.integers(0, 60), st.one_of(st.just(1), st.integers(2, 30))), min_size=1, max_size=7
)


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_strategy,
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 33]),
    kv_heads=st.sampled_from([1, 2]),
    heads_per_kv=st.sampled_from([1, 3]),
    small_limits=st.booleans(),
    kv_int8=st.booleans(),
    with_sinks=st.booleans(),
    kind=st.sampled_from([TorchAttention, TorchPieces]),
    seed=st.integers(0, 1000),
)
def test_matches_a_direct_computation(
    rows, block_size, window, kv_heads, heads_per_kv, small_limits, kv_int8, with_sinks, kind, seed
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small_limits:
            patch.setattr(torch_backend, "_GATHER_BYTES", 2000)
            patch.setattr(torch_backend, "_QUERY_TILE", 4)
            patch.setattr(torch_backend, "_SPLIT_TOKENS", 0)
            patch.setattr(torch_pieces, "_GATHER_BYTES", 2000)
            patch.setattr(torch_pieces, "_PIECE_TOKENS", 16)
        rows = sorted(rows, key=lambda row: row[1] != 1)
        starts = np.array([start for start, _ in rows], np.int32)
        counts = np.array([count for _, count in rows], np.int32)
        num_decodes = int((counts == 1).sum())
        generator = np.random.default_rng(seed)
        torch.manual_seed(seed)
        blocks_of = [-(-(start + count) // block_size) for start, count in rows]
        ids = generator.permutation(sum(blocks_of) + 3)
        tables = np.full((len(rows), max(blocks_of) + 1), 1 << 30, np.int32)
        used = 0
        for row, number in enumerate(blocks_of):
            tables[row, :number] = ids[used : used + number]
            used += number
        windows = frozenset({None, window})
        shape = AttentionShape(
            LAYERS,
            kv_heads * heads_per_kv,
            kv_heads,
            HEAD_DIM,
            block_size,
            HEAD_DIM**-0.5,
            windows,
            torch.float32,
            torch.device("cpu"),
            kv_int8,
        )
        backend = kind(shape)
        pool = torch.full(
            (len(ids), LAYERS, 2, kv_heads, *backend.tile_shape),
            0xFF if kv_int8 else float("nan"),
            dtype=backend.pool_dtype,
        )
        pool[tables[tables < len(ids)]] = 0  # of a backend in PyTorch, all blocks of a row must be numbers
        backend.bind(pool)
        with torch.inference_mode():
            for layer, wanted in ((0, None), (1, window)):
                contexts = [
                    (
                        torch.randn(start + count, kv_heads, HEAD_DIM),
                        torch.randn(start + count, kv_heads, HEAD_DIM),
                    )
                    for start, count in rows
                ]
                # What came before is written as one prefill, then the step itself.
                for row, (start, _) in enumerate(rows):
                    if start:
                        one = np.array([start], np.int32)
                        before = backend.prepare(
                            AttentionStep(np.zeros(1, np.int32), one, tables[row : row + 1], 0)
                        )
                        keys, values = contexts[row]
                        backend.write_kv(layer, keys[:start], values[:start], before)
                plan = backend.prepare(AttentionStep(starts, counts, tables, num_decodes))
                new = [[part[start:] for part in contexts[row]] for row, (start, _) in enumerate(rows)]
                backend.write_kv(layer, torch.cat([k for k, _ in new]), torch.cat([v for _, v in new]), plan)
                kept = rounded if kv_int8 else lambda heads: heads
                queries = torch.randn(int(counts.sum()), kv_heads * heads_per_kv, HEAD_DIM)
                sinks = torch.randn(kv_heads * heads_per_kv) * 5 if with_sinks else None
                found = backend.attend(layer, queries, wanted, plan, sinks)
                expected = torch.cat(
                    [
                        direct(
                            kept(part), *map(kept, contexts[row]), rows[row][0], wanted, heads_per_kv, sinks
                        )
                        for row, part in enumerate(queries.split(counts.tolist()))
                    ]
                )
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_layers_do_not_touch_each_other() -> None:
    shape = AttentionShape(3, 2, 2, 4, 4, 0.5, frozenset({None}), torch.float32, torch.device("cpu"))
    backend = TorchAttention(shape)
    pool = torch.zeros(5, 3, 2, 2, 4, 4)
    backend.bind(pool)
    step = AttentionStep(np.array([5], np.int32), np.array([1], np.int32), np.array([[4, 2]], np.int32), 1)
    backend.write_kv(1, torch.full((1, 2, 4), 7.0), torch.full((1, 2, 4), 9.0), backend.prepare(step))
    expected = torch.zeros_like(pool)
    expected[2, 1, 0, :, 1] = 7.0  # position 5: block table column 1, offset 1
    expected[2, 1, 1, :, 1] = 9.0
    assert torch.equal(pool, expected)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(1, 600))
def test_groups_are_a_partition_within_limits(sizes, max_blocks) -> None:
    blocks = np.array(sizes, np.int64)
    groups = _groups(blocks, 16, max_blocks)
    assert sorted(int(row) for group in groups for row in group) == list(range(len(sizes)))
    for group in groups:
        widest = int(blocks[group].max())
        assert len(group) == 1 or len(group) * widest <= max_blocks


def test_very_different_lengths_are_not_padded_to_the_longest() -> None:
    blocks = np.array([1000, 2, 2, 2, 990, 2], np.int64)
    groups = [group.tolist() for group in _groups(blocks, 16, 10_000)]
    assert groups == [[0, 4], [1, 2, 3, 5]]


def test_the_name_of_a_tile_tells_what_differs() -> None:
    def name(block_size: int, head_dim: int, dtype: torch.dtype, kv_int8: bool = False) -> str:
        device = torch.device("cpu")
        shape = AttentionShape(1, 1, 1, head_dim, block_size, 1.0, frozenset({None}), dtype, device, kv_int8)
        return TorchAttention(shape).tile_name

    names = {name(b, d, t) for b in (16, 32) for d in (64, 128) for t in (torch.float32, torch.bfloat16)}
    assert len(names) == 8
    assert name(16, 64, torch.float32, True) not in names
    assert name(16, 64, torch.float32, True) == name(16, 64, torch.bfloat16, True)
