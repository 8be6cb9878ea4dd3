"""The attention kernels in C++, on every instruction set that this CPU has, against float64."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.model.attention import AttentionBackend, AttentionShape, AttentionStep, CpuAttention
from baton.model.attention.cpu_backend import kernel_shape, supported
from baton.model.attention.kv_int8 import quantize
from baton.model.cpu.kernels import HeadNorms
from baton.model.cpu.library import INT, POINTER, instruction_sets, load
from baton.model.cpu.native_kernels import NativeKernels
from tests.model import attention_cases
from tests.model.attention_cases import LAYER, Case, check

Make = Callable[[AttentionShape], AttentionBackend]
DTYPES = [torch.bfloat16, torch.float32]
KINDS = [(dtype, kv_int8) for dtype in DTYPES for kv_int8 in (False, True)]
"""Of queries, and whether keys and values are kept in eight bits."""

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native library is not built")


@pytest.fixture(params=instruction_sets())
def make(request: pytest.FixtureRequest) -> Make:
    return lambda shape: CpuAttention(shape, NativeKernels(kernel_shape(shape), load(request.param)))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def sizes(seed: int, count: int) -> Iterator[Case]:
    """Random mixed batches of small sizes, each with another combination of the rest."""
    chance = random.Random(seed)
    for _ in range(count):
        rows = [
            (
                chance.choice([0, 1, 15, 16, 63, 64, chance.randrange(300)]),
                chance.choice([1, 1, 2, chance.randrange(1, 40)]),
            )
            for _ in range(chance.randrange(1, 5))
        ]
        dtype, kv_int8 = chance.choice(KINDS)
        odd = 12 if kv_int8 else 6
        yield Case(
            tuple(sorted(rows, key=lambda row: row[1] != 1)),
            head_dim=chance.choice([64, 80, 96, 128, 128, odd, 72, 256]),
            num_kv_heads=chance.choice([1, 2, 5]),
            heads_per_kv=chance.choice([1, 2, 7, 8, 8, 40]),
            block_size=chance.choice([4 if kv_int8 else 2, odd, 16, 32, 64, 64]),
            window=chance.choice([None, None, 1, 5, 33, 70]),
            dtype=dtype,
            kv_int8=kv_int8,
            sinks=chance.random() < 0.3,
        )


def test_random_shapes(make: Make) -> None:
    for seed, case in enumerate(sizes(1, 60)):
        check(make, case, seed)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("heads_per_kv", [1, 2, 7, 8])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_shapes_of_models(make: Make, head_dim: int, heads_per_kv: int, block_size: int) -> None:
    rows = ((0, 1), (130, 1), (511, 1), (600, 1), (0, 33), (100, 20))
    dtype, kv_int8 = KINDS[(head_dim // 16 + heads_per_kv + block_size // 16) % 4]
    check(make, Case(rows, head_dim, 2, heads_per_kv, block_size, None, dtype, kv_int8))


@pytest.mark.parametrize(("dtype", "kv_int8"), KINDS)
def test_long_contexts_in_pieces(make: Make, dtype: torch.dtype, kv_int8: bool) -> None:
    check(
        make,
        Case(((4999, 1), (1023, 1), (1024, 1), (4000, 3), (2000, 17)), 64, 1, 8, 32, None, dtype, kv_int8),
    )
    check(make, Case(((4999, 1), (3000, 2), (3000, 40)), 64, 1, 2, 32, 1200, dtype, kv_int8))


@pytest.mark.parametrize(("dtype", "kv_int8"), KINDS)
@pytest.mark.parametrize("heads_per_kv", [1, 8, 40])
def test_sinks_count_once(make: Make, dtype: torch.dtype, kv_int8: bool, heads_per_kv: int) -> None:
    """However many pieces a context is cut into, and whoever merges them; also where a window hides most."""
    rows = ((4999, 1), (3, 1), (0, 1), (2000, 17), (0, 40))
    for window in (None, 128):
        check(make, Case(rows, 64, 2, heads_per_kv, 16, window, dtype, kv_int8, sinks=True))


@pytest.mark.parametrize("window", [1, 63, 64, 65])
def test_windows_at_the_edges_of_blocks(make: Make, window: int) -> None:
    rows = ((62, 1), (63, 1), (64, 1), (65, 1), (127, 1), (60, 70))
    for dtype, kv_int8 in KINDS:
        check(make, Case(rows, 64, 1, 3, 64, window, dtype, kv_int8))


@pytest.mark.parametrize(("dtype", "kv_int8"), KINDS)
def test_a_row_does_not_depend_on_batch_threads_or_blocks(
    make: Make, dtype: torch.dtype, kv_int8: bool, threads: Callable[[int], None]
) -> None:
    """Bit for bit, however the work is shared."""
    rows = ((1500, 1), (700, 1), (3, 1), (40, 50), (900, 5))
    case = Case(rows, 64, 2, 7, 16, None, dtype, kv_int8)
    backend = make(case.shape())
    loaded = attention_cases.load(backend, case)
    threads(1)
    together = attention_cases.run(backend, loaded)
    threads(3)
    for _ in range(5):
        assert torch.equal(attention_cases.run(backend, loaded), together)
    first = 0
    for row, (_, count) in enumerate(rows):
        step = loaded.step
        one = slice(row, row + 1)
        alone = AttentionStep(step.starts[one], step.counts[one], step.block_tables[one], int(count == 1))
        found = backend.attend(LAYER, loaded.queries[first : first + count], None, backend.prepare(alone))
        assert torch.equal(found, together[first : first + count])
        first += count


def test_layers_and_blocks_do_not_touch_each_other(make: Make) -> None:
    for dtype in DTYPES:
        case = Case(((5, 1), (30, 9)), 64, 2, 1, 16, None, dtype)
        backend = make(case.shape())
        loaded = attention_cases.load(backend, case, garbage=7.0)
        before = loaded.pool.clone()
        plan = backend.prepare(loaded.step)
        backend.write_kv(LAYER, loaded.new(loaded.keys) * 0, loaded.new(loaded.values) * 0, plan)
        changed = (loaded.pool != before).flatten(4)
        assert not changed[:, 0].any()
        assert int(changed.sum()) == int((before != loaded.pool).sum()) == 10 * 2 * 2 * 64
        touched = {int(block) for block in changed.flatten(1).any(1).nonzero()}
        table = loaded.step.block_tables
        assert touched == {int(table[0, 0]), int(table[1, 1]), int(table[1, 2])}


@pytest.mark.parametrize(("dtype", "kv_int8"), KINDS)
@pytest.mark.parametrize("head_dim", [64, 80, 6])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_write(make: Make, dtype: torch.dtype, kv_int8: bool, head_dim: int, normed: bool) -> None:
    """The same as norm, rotation and `write_kv` one after the other."""
    torch.manual_seed(0)
    head_dim += 2 * (kv_int8 and head_dim == 6)
    case = Case(((7, 1), (63, 1), (0, 40), (50, 9)), head_dim, 2, 3, 16, None, dtype, kv_int8)
    backend = make(case.shape())
    step = attention_cases.load(backend, case).step
    plan = backend.prepare(step)
    total, heads, kv_heads = int(step.counts.sum()), 6, 2
    qkv = torch.randn(total, heads + 2 * kv_heads, head_dim).to(dtype)
    angles = torch.rand(128, head_dim // 2) * 6
    weights = torch.randn(2, head_dim).to(dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None

    assert isinstance(backend, CpuAttention)
    pool = torch.zeros_like(backend.pool)
    backend.bind(pool)
    queries = backend.rotate_and_write(LAYER, qkv.flatten(1), angles.cos(), angles.sin(), None, norms, plan)

    positions = torch.cat(
        [torch.arange(start, start + count) for start, count in zip(step.starts, step.counts, strict=True)]
    )
    cos, sin = (table[positions].unsqueeze(1) for table in (angles.cos(), angles.sin()))

    def turned(part: Tensor, weight: Tensor | None) -> Tensor:
        exact = part.float()
        if weight is not None:
            exact = torch.nn.functional.rms_norm(exact, (head_dim,), weight.float(), 1e-6)
        a, b = exact.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(dtype)

    expected = turned(qkv[:, :heads], norms and norms.queries)
    keys = turned(qkv[:, heads : heads + kv_heads], norms and norms.keys)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
    torch.testing.assert_close(queries, expected, **tolerance)
    again = torch.zeros_like(pool)
    backend.bind(again)
    backend.write_kv(LAYER, keys, qkv[:, heads + kv_heads :], plan)
    if kv_int8:  # an integer may be the next one
        difference = (pool.short() - again.short()).view(*pool.shape[:4], -1)[..., : 16 * head_dim].abs()
        assert int(torch.where(difference > 128, 256 - difference, difference).max()) <= (
            1 if dtype == torch.float32 else 2
        )
    else:
        torch.testing.assert_close(pool, again, **tolerance)
    assert torch.equal(pool[:, LAYER, 1], again[:, LAYER, 1])


def test_what_is_not_supported_is_left_to_pytorch() -> None:
    def shape(**changes: object) -> AttentionShape:
        values = {
            "head_dim": 64,
            "block_size": 16,
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
        } | changes
        return AttentionShape(1, 1, 1, scale=1.0, windows=frozenset({None}), **values)  # type: ignore[arg-type]

    assert supported(shape())
    assert supported(shape(block_size=3, dtype=torch.float32))
    assert supported(shape(kv_int8=True))
    for changes in (
        {"block_size": 3},
        {"head_dim": 63},
        {"head_dim": 320},
        {"block_size": 256},
        {"dtype": torch.float16},
        {"device": torch.device("meta")},
        {"block_size": 6, "kv_int8": True},
        {"head_dim": 66, "kv_int8": True},
    ):
        assert not supported(shape(**changes))


def test_names_of_tiles() -> None:
    def name(dtype: torch.dtype, kv_int8: bool = False) -> str:
        case = Case(((0, 1),), 80, 1, 1, 32, None, dtype, kv_int8)
        return CpuAttention(
            case.shape(), NativeKernels(kernel_shape(case.shape()), load(instruction_sets()[0]))
        ).tile_name

    assert name(torch.bfloat16) == "pairs:bfloat16:32x80"
    assert name(torch.float32) == "lanes:float32:32x80"
    assert name(torch.float32, True) == name(torch.bfloat16, True) == "quads:int8:32x80"


def test_the_layout_of_tiles(make: Make) -> None:
    """As written down in native/tiles.h: what two instances exchange."""
    for dtype, keys_shape, values_shape in (
        (torch.bfloat16, (4, 4, 2), (2, 8, 2)),
        (torch.float32, (8, 4), (4, 8)),
    ):
        case = Case(((0, 3),), 8, 1, 1, 4, None, dtype)
        backend = make(case.shape())
        loaded = attention_cases.load(backend, case)
        attention_cases.run(backend, loaded)
        tiles = loaded.pool[int(loaded.step.block_tables[0, 0]), LAYER, :, 0]
        keys, values = tiles[0].view(keys_shape), tiles[1].view(values_shape)
        if dtype == torch.bfloat16:
            keys, values = keys.transpose(1, 2).reshape(8, 4), values.transpose(1, 2).reshape(4, 8)
        assert np.array_equal(keys.T[:3].float(), loaded.keys[0][:, 0].float())
        assert np.array_equal(values[:3].float(), loaded.values[0][:, 0].float())


def test_the_layout_of_tiles_in_eight_bits(make: Make) -> None:
    """As `kv_int8` quantizes, in the places that native/tiles.h names."""
    for dtype in DTYPES:
        case = Case(((0, 7),), 20, 1, 1, 8, None, dtype, True)
        backend = make(case.shape())
        loaded = attention_cases.load(backend, case)
        attention_cases.run(backend, loaded)
        tiles = loaded.pool[int(loaded.step.block_tables[0, 0]), LAYER, :, 0]
        assert tiles.shape == (2, 8 * (20 + 4))
        keys = tiles[0, :160].view(5, 8, 4).transpose(0, 1).reshape(8, 20).short() - 128
        values = tiles[1, :160].view(torch.int8).view(2, 20, 4).transpose(1, 2).reshape(8, 20)
        for found, heads, tile in ((keys, loaded.keys, tiles[0]), (values, loaded.values, tiles[1])):
            integers, scales = quantize(heads[0][:, 0])
            assert torch.equal(found[:7].short(), integers.short())
            assert torch.equal(tile[160:].view(torch.float32)[:7], scales[:, 0])


def test_heads_of_zeros(make: Make) -> None:
    for dtype, kv_int8 in KINDS:
        case = Case(((40, 1), (3, 1), (0, 20)), 64, 2, 2, 16, None, dtype, kv_int8)
        backend = make(case.shape())
        loaded = attention_cases.load(backend, case, garbage=float("nan"))
        loaded.queries[:, 1] = 0
        loaded.keys[2][:9], loaded.values[2][:5] = 0, 0
        found = attention_cases.run(backend, loaded)
        torch.testing.assert_close(
            found.double(), loaded.expected(), atol=case.tolerance, rtol=case.tolerance
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_number_is_in_what_reads_it(make: Make, bad: float) -> None:
    for dtype in DTYPES:
        for broken in range(2):
            case = Case(((30, 1), (30, 1)), 64, 1, 2, 16, None, dtype, True)
            backend = make(case.shape())
            loaded = attention_cases.load(backend, case)
            (loaded.keys, loaded.values)[broken][0][30, 0, 5] = bad
            found = attention_cases.run(backend, loaded)
            assert found[0].isnan().all()
            assert found[1].isfinite().all()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("dtype", "kv_int8"), KINDS)
@pytest.mark.parametrize("heads_per_kv", [1, 3, 40])
@pytest.mark.parametrize("rows", [((7, 1), (63, 1), (0, 1), (300, 1)), ((7, 1), (20, 5)), ((5, 1), (900, 1))])
def test_storing_while_attending(
    isa: str, dtype: torch.dtype, kv_int8: bool, heads_per_kv: int, rows: tuple[tuple[int, int], ...]
) -> None:
    """Bit for bit the same as `rotate_and_write` and `attend`, and may write its result over the queries."""
    library, kv_heads, dim = load(isa), 2, 64
    case = Case(rows, dim, kv_heads, heads_per_kv, 16, None, dtype, kv_int8)
    kernels = NativeKernels(kernel_shape(case.shape()), library)
    backend = CpuAttention(case.shape(), kernels)
    step = attention_cases.load(backend, case).step
    plan = backend.prepare(step)
    reads, runs = plan.reads[None], plan.runs
    total, heads = int(step.counts.sum()), kv_heads * heads_per_kv
    qkv = torch.randn(total, heads + 2 * kv_heads, dim).to(dtype)
    angles = torch.rand(1024, dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    weight = torch.randn(dim).to(dtype)

    start = backend.pool.clone()
    queries = backend.rotate_and_write(
        LAYER, qkv.flatten(1), cos, sin, None, HeadNorms(weight, weight, 1e-6), plan
    )
    sinks = torch.randn(heads)
    expected, pool = backend.attend(LAYER, queries, None, plan, sinks), backend.pool.clone()

    backend.pool.copy_(start)
    layer = backend.pool[0, LAYER].data_ptr()
    found = torch.empty(total, heads, dim, dtype=dtype)
    store_and_attend = library.function(
        "store_and_attend", *[POINTER] * 6, INT, POINTER, POINTER, INT, POINTER, INT, INT, *[POINTER] * 3
    )
    turn = ctypes.addressof(kernels._turn)  # of `rotate_and_write` just now
    arguments = (kernels.geometry_address, layer, qkv.data_ptr(), found.data_ptr(), turn)
    items = (reads.items_address, len(reads.items), reads.tables_address, reads.tables.shape[1], reads.window)
    room = kernels.room_for(reads.slots)
    store_and_attend(
        *arguments, runs.address, len(runs.runs), found.data_ptr(), *items, sinks.data_ptr(), *room
    )
    assert torch.equal(found.flatten(1), expected)
    assert torch.equal(backend.pool, pool)
