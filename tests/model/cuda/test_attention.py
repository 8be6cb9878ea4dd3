"""Attention's kernels against a direct computation in float64: in Triton's interpreter, or on a device.

What came before a step is written by PyTorch's backend, so both mean the same by a pool.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.model.attention import attention_backend
from baton.model.attention.base import AttentionStep
from baton.model.attention.torch_backend import TorchAttention
from baton.model.attention.triton_backend import TritonAttention
from baton.model.cuda import attending
from baton.model.cuda.attending import Pages, attend
from baton.model.cuda.launch import Launch
from tests.model.attention_cases import LAYER, Case, Loaded, load, run
from tests.model.cuda.where import DEVICE, ON_DEVICE, serve

BF16, F16 = torch.bfloat16, torch.float16
launched = Launch.run
CASES = {
    "decode and chunks": Case(((5, 1), (0, 1), (300, 1), (0, 7), (20, 9)), 16),
    "splits, odd sizes": Case(((600, 1), (511, 1), (512, 1), (255, 1)), 24, 1, 3, block_size=24),
    "window": Case(((600, 1), (70, 1), (40, 5)), 80, 1, 7, block_size=7, window=33),
    "window over splits": Case(((900, 1), (258, 1)), 8, 1, 1, block_size=32, window=300, sinks=True),
    "large heads": Case(((20, 1), (11, 3)), 256, 1, 2, sinks=True),
    "more heads than a tile": Case(((33, 1), (3, 2)), 32, 1, 20, block_size=5),
    "a window of itself": Case(((3, 1), (0, 19)), 16, 1, 2, block_size=8, window=1),
    "int8": Case(((300, 1), (20, 9), (0, 11)), 64, 1, 4, kv_int8=True),
    "int8, odd sizes": Case(
        ((300, 1), (10, 3)), 22, 1, 1, block_size=12, kv_int8=True, window=290, sinks=True
    ),
    "bfloat16": Case(((260, 1), (9, 1), (30, 20)), 32, 1, 2, dtype=BF16),
    "float16": Case(((260, 1), (30, 20)), 32, 1, 2, dtype=F16, window=100),
    "bfloat16, int8": Case(((40, 1), (30, 5)), 32, 1, 2, dtype=BF16, kv_int8=True),
}

LARGE = {
    "Llama 8B": Case(((4000, 1), (1, 1), (700, 300), (0, 129)), 128, 8, 4, dtype=BF16),
    "Qwen3 0.6B, int8": Case(((4000, 1), (255, 1), (700, 300)), 128, 8, 2, dtype=BF16, kv_int8=True),
    "Gemma, window": Case(((5000, 1), (900, 130)), 256, 8, 2, dtype=BF16, window=1024),
    "gpt-oss": Case(((3000, 1), (200, 77)), 64, 8, 8, dtype=BF16, window=128, sinks=True),
    "one KV head of sixteen": Case(((600, 1), (300, 40)), 128, 1, 16, block_size=64, dtype=BF16),
    "float32": Case(((1500, 1), (700, 200)), 128, 2, 4),
    "float16": Case(((1500, 1), (700, 200)), 128, 2, 4, dtype=F16),
}
"""Sizes of models, which the interpreter would take minutes for."""
ALL = [pytest.param(case, id=name) for name, case in CASES.items()]
ALL += [pytest.param(case, id=name, marks=ON_DEVICE) for name, case in LARGE.items()]


def loaded_for(case: Case, soft_cap: float | None = None) -> tuple[TritonAttention, Loaded]:
    """What is unused in the pool is NaN."""
    shape = replace(case.shape(), soft_cap=soft_cap, device=DEVICE)
    loaded = load(TorchAttention(shape), case, garbage=float("nan"))
    backend = TritonAttention(shape)
    backend.bind(loaded.pool)
    return backend, loaded


@pytest.mark.parametrize("case", ALL)
def test_agrees_with_a_direct_computation(case: Case):
    backend, loaded = loaded_for(case)
    tolerance = 2e-3 if case.dtype == F16 else case.tolerance
    torch.testing.assert_close(
        run(backend, loaded).double(), loaded.expected(), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("window", [None, 40])
def test_a_soft_cap(window: int | None):
    case = Case(((300, 1), (20, 5)), 16, 1, 2, block_size=16, window=window)
    backend, loaded = loaded_for(case, soft_cap=0.5)
    found = run(backend, loaded)
    torch_backend = TorchAttention(backend.shape)
    torch_backend.bind(loaded.pool)
    torch.testing.assert_close(found, run(torch_backend, loaded), atol=2e-5, rtol=2e-5)
    uncapped = loaded.expected()
    assert (found.double() - uncapped).abs().max() > 0.1


def test_writes_what_pytorch_writes():
    """Bytes of the whole pool, of both kinds of pools; places of other tokens stay as they are."""
    for kv_int8, dtype in ((False, torch.float32), (False, BF16), (True, torch.float32)):
        case = Case(((5, 1), (14, 3)), 22, 3, 1, block_size=8, kv_int8=kv_int8, dtype=dtype)
        backend, loaded = loaded_for(case)
        other = TorchAttention(backend.shape)
        pool = loaded.pool.clone()
        other.bind(pool)
        keys, values = loaded.new(loaded.keys), loaded.new(loaded.values)
        keys[1] *= 1e-35  # in eight bits all is nothing
        values[2, 1, 3] = float("inf")
        values[3, 0, 0] = float("nan")
        other.write_kv(LAYER, keys, values, other.prepare(loaded.step))
        apart = torch.zeros(4, 200, dtype=dtype, device=DEVICE)  # tokens need not lie side by side
        apart[:, : 3 * 22] = keys.flatten(1)
        backend.write_kv(
            LAYER, apart[:, : 3 * 22].unflatten(1, (3, 22)), values, backend.prepare(loaded.step)
        )
        row = loaded.pool[..., :22], pool[..., :22]
        assert same_bits(*row)
        if kv_int8:
            scales = (part.view(torch.float32)[..., -1] for part in (loaded.pool, pool))
            torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


IN_ANY_BATCH = [
    pytest.param(Case(((255, 1), (600, 1), (256, 1), (10, 4)), 16, 1, 2, sinks=True), id="small"),
    pytest.param(
        Case(((255, 1), (6000, 1), (256, 1), (500, 333)), 128, 8, 4, dtype=BF16), id="bf16", marks=ON_DEVICE
    ),
    pytest.param(
        Case(((255, 1), (6000, 1), (256, 1), (500, 333)), 128, 8, 4, dtype=BF16, kv_int8=True),
        id="bf16, int8",
        marks=ON_DEVICE,
    ),
]


@pytest.mark.parametrize("case", IN_ANY_BATCH)
def test_a_row_does_not_depend_on_the_batch(case: Case):
    """Alone, beside longer rows (more splits are launched), and in another order: the same bits."""
    backend, loaded = loaded_for(case)
    together = run(backend, loaded)
    step, tokens = loaded.step, np.cumsum((0, 1, 1, 1))
    for rows in ((0,), (2, 1), (1, 0, 3), (3,)):
        chosen = list(rows)
        part = AttentionStep(
            step.starts[chosen],
            step.counts[chosen],
            np.asfortranarray(step.block_tables[chosen]),
            sum(row < 3 for row in rows),
        )
        at = np.concatenate([np.arange(tokens[row], tokens[row] + step.counts[row]) for row in rows])
        index = torch.from_numpy(at).to(DEVICE)
        found = backend.attend(LAYER, loaded.queries[index], None, backend.prepare(part), loaded.sinks)
        assert torch.equal(found, together[index])


def test_sums_of_splits_take_little_memory(monkeypatch: pytest.MonkeyPatch):
    """They are of decode rows, not of the tokens of a chunk beside them; of many rows some at a time, with
    the same bits."""
    case = Case(((255, 1), (600, 1), (256, 1), (10, 40)), 16, 1, 2)
    backend, loaded = loaded_for(case)
    together = run(backend, loaded)
    made: list[Launch] = []
    monkeypatch.setattr(Launch, "run", lambda launch: made.append(launch) or launched(launch))
    plan = backend.prepare(loaded.step)
    assert torch.equal(backend.attend(LAYER, loaded.queries, None, plan), together)
    sums = [launch.arguments["sums"] for launch in made if launch.arguments["sums"] is not None]
    assert [list(one.shape) for one in sums] == [[3, 2, 3, 16]] * 2
    made.clear()
    monkeypatch.setattr(attending, "_SPLIT_BYTES", 2 * 2 * 3 * 16 * 4)  # two rows
    assert torch.equal(backend.attend(LAYER, loaded.queries, None, plan), together)
    sums = [launch.arguments["sums"] for launch in made if launch.arguments["sums"] is not None]
    assert [len(one) for one in sums] == [2, 2, 1, 1]


CUT = [
    pytest.param(Case(((0, 50),), 16, 1, 3, block_size=16, window=21), id="small"),
    pytest.param(Case(((0, 900),), 128, 8, 4, dtype=BF16, window=700), id="bf16", marks=ON_DEVICE),
]


@pytest.mark.parametrize("case", CUT)
def test_a_chunk_does_not_depend_on_where_it_was_cut(case: Case):
    backend, loaded = loaded_for(case)
    together = run(backend, loaded)
    for first, last in ((0, 7), (7, case.rows[0][1]), (16, 19)):
        step = AttentionStep(
            np.array([first], np.int32), np.array([last - first], np.int32), loaded.step.block_tables, 0
        )
        found = backend.attend(LAYER, loaded.queries[first:last], case.window, backend.prepare(step))
        assert torch.equal(found, together[first:last])


@pytest.mark.parametrize("longest", [None, 301], ids=["chunk", "decode"])
def test_rows_of_queries_and_tables_may_be_apart(longest: int | None):
    """Queries cut out of what a projection wrote, tables out of wider ones: as of tensors without gaps."""
    rows = ((20, 9), (300, 8)) if longest is None else ((20, 1), (300, 1))
    case = Case(rows, 16, 2, 2, block_size=8)
    backend, loaded = loaded_for(case)
    expected = run(backend, loaded)
    plan, queries = backend.prepare(loaded.step), loaded.queries
    wide = torch.full((len(queries), 4 * 16 + 24), float("nan"), device=DEVICE)
    wide[:, : 4 * 16] = queries.flatten(1)
    tables = torch.zeros(len(rows), plan.tables.shape[1] + 5, dtype=torch.int32, device=DEVICE)
    tables[:, : plan.tables.shape[1]] = plan.tables
    found = attend(
        wide[:, : 4 * 16].unflatten(1, (4, 16)),
        Pages.of(loaded.pool, LAYER, 16),
        plan.chunks if longest is None else plan.singles,
        tables[:, : plan.tables.shape[1]],
        16**-0.5,
        longest=longest,
    )
    assert torch.equal(found, expected)


def test_rows_that_fill_a_fixed_batch_do_nothing():
    """Items without positions, and places below 0: what they would touch stays as it is."""
    case = Case(((30, 1),), 16, 1, 2, block_size=16)
    backend, loaded = loaded_for(case)
    expected = run(backend, loaded)
    plan = backend.prepare(loaded.step)
    items = torch.cat((plan.singles, torch.tensor([[1, 0, 0, 0]], dtype=torch.int32, device=DEVICE)))
    out = torch.full((2, 32), 7.0, device=DEVICE)
    queries = torch.cat((loaded.queries, loaded.queries))
    pages = Pages.of(loaded.pool, LAYER, 16)
    attend(queries, pages, items, plan.tables, 16**-0.5, longest=700, out=out)
    assert torch.equal(out[0], expected[0])
    assert (out[1] == 7.0).all()
    before = loaded.pool.clone()
    nowhere = replace(plan, places=torch.tensor([-1], device=DEVICE))
    ones = torch.ones(1, 1, 16, device=DEVICE)
    backend.write_kv(LAYER, ones, ones, nowhere)
    assert same_bits(loaded.pool, before)


def test_what_does_not_fit_is_refused_by_its_name():
    case = Case(((3, 1),), 16, 2, 2)
    backend, loaded = loaded_for(case)
    plan, pages = backend.prepare(loaded.step), Pages.of(loaded.pool, LAYER, 16)
    given = dict(
        queries=loaded.queries, pages=pages, items=plan.singles, tables=plan.tables, scale=1.0, longest=4
    )
    for change, message in (
        ({"queries": loaded.queries[:, :3].contiguous()}, "queries .*2 KV heads of 16"),
        ({"queries": loaded.queries.bfloat16()}, "the pool holds torch.float32"),
        ({"items": plan.singles.long()}, "items .*takes int32"),
        ({"tables": plan.tables[0]}, r"tables \[\d+\].*takes \[any, any\]"),
        ({"window": 0}, "window 0"),
        ({"sinks": torch.zeros(3)}, r"sinks \[3\]"),
        ({"out": torch.zeros(1, 32)}, r"out \[1, 32\].*takes \[1, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(**{**given, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pool .*contiguous"):
        Pages.of(loaded.pool.transpose(0, 1), 0, 16)
    with pytest.raises(ValueError, match="heads have 258 elements"):
        TritonAttention(replace(backend.shape, head_dim=258))


@pytest.mark.parametrize("head_dim", [15, 258])
def test_heads_that_the_kernels_do_not_take_are_pytorchs_and_a_line_says_so(
    head_dim: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    serve(monkeypatch)
    shape = replace(Case(((3, 1),)).shape(), head_dim=head_dim, device=DEVICE)
    with caplog.at_level("WARNING", logger="baton"):
        assert not isinstance(attention_backend(shape), TritonAttention)
        assert isinstance(attention_backend(replace(shape, head_dim=16)), TritonAttention)
    assert [record.getMessage() for record in caplog.records] == [
        f"{DEVICE}: PyTorch computes attention, slower: heads have {head_dim} elements; the kernels take "
        "even sizes up to 256"
    ]
    with pytest.raises(ValueError, match=f"heads have {head_dim} elements.*leave it away"):
        attention_backend(shape, "triton")
