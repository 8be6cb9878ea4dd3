"""The numba kernels: odd shapes against a direct computation, batches, another CPU, the cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.model.attention.base import AttentionShape, AttentionStep
from baton.model.attention.cpu_backend import CpuAttention, kernel_shape
from baton.model.attention.kv_int8 import quantize
from baton.model.cpu.kernels import HeadNorms
from baton.model.cpu.numba.kernels import NumbaKernels
from baton.model.layers.rotary import rotate
from tests.model.attention_cases import LAYER, Case, check, load, run

BF16, FP32 = torch.bfloat16, torch.float32


def make(shape: AttentionShape) -> CpuAttention:
    return CpuAttention(shape, NumbaKernels(kernel_shape(shape)))


MIXED = ((0, 1), (63, 1), (700, 1), (0, 37), (130, 21))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "heads_per_kv", "block_size", "window"),
    [
        (64, 2, 1, 16, None),
        (80, 1, 2, 32, 40),
        (96, 2, 7, 64, None),
        (128, 2, 8, 64, 100),
        (128, 1, 8, 16, 1),
        (256, 1, 3, 128, None),
        (6, 2, 2, 2, 5),
        (64, 1, 40, 32, None),
    ],
)
def test_odd_shapes(dtype, head_dim, kv_heads, heads_per_kv, block_size, window) -> None:
    check(make, Case(MIXED, head_dim, kv_heads, heads_per_kv, block_size, window, dtype))
    if head_dim % 4 == 0 and block_size % 4 == 0:
        check(make, Case(MIXED, head_dim, kv_heads, heads_per_kv, block_size, window, dtype, True))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("window", [None, 100])
def test_sinks_count_once(dtype, window) -> None:
    rows = ((4999, 1), (3, 1), (1500, 20), (0, 40))
    for kv_int8 in (False, True):
        check(make, Case(rows, 64, 2, 8, 16, window, dtype, kv_int8, sinks=True))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_tiles_in_eight_bits_are_those_of_every_backend(dtype) -> None:
    """Instances with other kernels read them.  A query of zeros sees all alike."""
    case = Case(((0, 1), (5, 1), (0, 30)), 24, 2, 2, 8, None, dtype, True)
    backend = make(case.shape())
    loaded = load(backend, case)
    loaded.queries[:, 1] = 0
    found = run(backend, loaded)
    torch.testing.assert_close(found.double(), loaded.expected(), atol=case.tolerance, rtol=case.tolerance)
    tiles = loaded.pool[int(loaded.step.block_tables[2, 1]), LAYER, :, 1]
    keys = tiles[0, :192].view(6, 8, 4).transpose(0, 1).reshape(8, 24).short() - 128
    values = tiles[1, :192].view(torch.int8).view(2, 24, 4).transpose(1, 2).reshape(8, 24)
    for integers, heads, tile in ((keys, loaded.keys, tiles[0]), (values, loaded.values, tiles[1])):
        expected, scales = quantize(heads[2][8:16, 1])
        assert torch.equal(integers.short(), expected.short())
        assert torch.equal(tile[192:].view(torch.float32), scales[:, 0])


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_long_context(dtype) -> None:
    check(make, Case(((4999, 1), (4000, 2), (2500, 60)), 64, 2, 4, 64, None, dtype))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_row_does_not_depend_on_the_batch_nor_on_threads(dtype) -> None:
    case = Case(((900, 1), (17, 1), (1500, 1), (5, 40)), 128, 2, 8, 32, None, dtype)
    backend = make(case.shape())
    loaded = load(backend, case)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = run(backend, loaded)
        torch.set_num_threads(3)
        assert torch.equal(run(backend, loaded), whole)
    finally:
        torch.set_num_threads(threads)
    step = loaded.step
    first = 0
    for row, count in enumerate(step.counts):
        alone = AttentionStep(
            step.starts[row : row + 1],
            step.counts[row : row + 1],
            step.block_tables[row : row + 1],
            int(count == 1),
        )
        queries = loaded.queries[first : first + count]
        found = backend.attend(LAYER, queries, None, backend.prepare(alone))
        assert torch.equal(found, whole[first : first + count])
        first += count


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_write(dtype, head_dim, normed) -> None:
    case = Case(((70, 1), (3, 30)), head_dim, 2, 3, 16, None, dtype)
    backend, plain = make(case.shape()), make(case.shape())
    loaded, expected = load(backend, case), load(plain, case)
    tokens = len(loaded.queries)
    qkv = torch.randn(tokens, (2 * 3 + 2 * 2) * head_dim).to(dtype)
    angles = torch.outer(torch.arange(200.0), torch.rand(head_dim // 2))
    cos, sin = angles.cos(), angles.sin()
    weights = torch.rand(2, head_dim).to(dtype)
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None
    plan = backend.prepare(loaded.step)
    found = backend.rotate_and_write(LAYER, qkv, cos, sin, None, norms, plan)

    heads = qkv.view(tokens, 10, head_dim).float()
    queries, keys, values = heads[:, :6], heads[:, 6:8], heads[:, 8:].to(dtype)
    if normed:
        queries = torch.nn.functional.rms_norm(queries, (head_dim,), weights[0].float(), 1e-6)
        keys = torch.nn.functional.rms_norm(keys, (head_dim,), weights[1].float(), 1e-6)
    step = loaded.step
    positions = torch.from_numpy(
        np.concatenate([np.arange(s, s + n) for s, n in zip(step.starts, step.counts, strict=True)])
    ).long()
    at = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    wanted = rotate(queries, *at).to(dtype)
    tolerance = 1e-5 if dtype == FP32 else 2e-2
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    plain.write_kv(LAYER, rotate(keys, *at).to(dtype), values, plain.prepare(expected.step))
    torch.testing.assert_close(loaded.pool, expected.pool, atol=tolerance, rtol=tolerance)


_OTHER_CPU = """
from tests.model.attention_cases import Case, check
from tests.model.cpu.test_numba_attention import BF16, MIXED, make
from baton.model.cpu.numba import vectors as numba_vectors
assert not numba_vectors.PAIR_PRODUCTS and not numba_vectors.MANY_REGISTERS
check(make, Case(MIXED, 80, 2, 3, 16, None, BF16))
check(make, Case(MIXED, 128, 1, 8, 64, 50, BF16))
"""


@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="needs AVX2")
def test_a_cpu_without_avx512() -> None:
    environment = os.environ | {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    subprocess.run([sys.executable, "-c", _OTHER_CPU], env=environment, check=True, timeout=250)


def test_kernels_come_back_from_the_cache(tmp_path) -> None:
    program = "from baton.model.cpu.numba.kernels import kernel\nprint(kernel('write_singles').cache_hits)"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    hits = [
        subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "1"]
