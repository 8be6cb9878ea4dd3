"""Norms, gates, rotation and storing in Triton's interpreter, against PyTorch's forms of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from baton.model.attention.base import AttentionStep
from baton.model.attention.torch_backend import TorchAttention
from baton.model.cpu.kernels import HeadNorms
from baton.model.cuda import rows
from baton.model.cuda.attending import Pages
from baton.model.cuda.kv_write import Turns, turn_and_store
from baton.model.cuda.rows import add_norm, gated_mul, row_sums
from baton.model.layers.rotary import rotate
from baton.model.ops.fused import FusedOps
from tests.model.attention_cases import LAYER, LAYERS, Case
from tests.model.cuda.test_attention import same_bits
from tests.model.cuda.where import DEVICE

OPS = FusedOps()
# In the interpreter a float32 that becomes a bfloat16 is rounded towards zero: one unit of 8 bits.
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)], ids=str
)


def rows_apart(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, size], of which every row is followed by what must not change."""
    return torch.randn(rows, size + 5).to(DEVICE, dtype)[:, :size]


@pytest.mark.parametrize("size", [1, 8, 70, 515])
def test_sums_of_rows(size: int):
    torch.manual_seed(size)
    x = rows_apart(5, size, torch.float32)
    found = row_sums(x)
    torch.testing.assert_close(found, x.sum(1, keepdim=True), atol=1e-5, rtol=1e-5)
    for row in range(5):
        assert torch.equal(row_sums(x[row : row + 1]), found[row : row + 1])


@DTYPES
@pytest.mark.parametrize("size", [1, 70, 515])
def test_add_and_norm(dtype: torch.dtype, tolerance: float, size: int):
    torch.manual_seed(size)
    for factor, plus in ((1.0, 0.0), (0.37, 1.0)):
        x, y = rows_apart(3, size, dtype), rows_apart(3, size, dtype)
        weight = torch.randn(size).to(DEVICE, dtype)
        behind = x.as_strided((3, 5), (size + 5, 1), size)[:2].clone()
        other = x.clone()
        expected = OPS.add_norm(other, y, weight, 1e-5, plus=plus, factor=factor)
        found = add_norm(x, y, weight, 1e-5, plus, factor)
        torch.testing.assert_close(x, other, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(found, expected, atol=4 * tolerance, rtol=4 * tolerance)
        assert torch.equal(x.as_strided((2, 5), (size + 5, 1), size), behind)


@pytest.mark.parametrize("size", [64, 70, 515])
def test_add_and_norm_of_rows_that_no_program_holds(size: int, monkeypatch: pytest.MonkeyPatch):
    """They are walked over twice: x is changed once, and sums come out as of a row that is held."""
    torch.manual_seed(size)
    x, y, weight = rows_apart(3, size, torch.float32), rows_apart(3, size, torch.float32), torch.randn(size)
    weight = weight.to(DEVICE)
    behind = x.as_strided((2, 5), (size + 5, 1), size).clone()
    held, alone = x.clone(), x.clone()
    expected = add_norm(held, y, weight, 1e-5, 1.0, 0.37)
    expected_alone = add_norm(alone, None, weight, 1e-5)
    monkeypatch.setattr(rows, "_HELD", 32)
    torch.testing.assert_close(add_norm(x.clone(), None, weight, 1e-5), expected_alone)
    in_place = x.clone()
    assert add_norm(in_place, None, weight, 1e-5, out=in_place) is in_place
    torch.testing.assert_close(in_place, expected_alone)
    summed = x.clone()
    assert add_norm(summed, y, None, 1e-5, factor=0.37) is summed
    found = add_norm(x, y, weight, 1e-5, 1.0, 0.37)
    torch.testing.assert_close(found, expected)
    assert torch.equal(x, held)
    assert torch.equal(summed, held)
    assert torch.equal(x.as_strided((2, 5), (size + 5, 1), size), behind)


def test_parts_of_add_and_norm():
    """No sum, no norm, and a norm in place."""
    x, y, weight = (torch.randn(*sizes).to(DEVICE) for sizes in ((2, 33), (2, 33), (33,)))
    expected = OPS.add_norm(x.clone(), None, weight, 1e-6)
    before = x.clone()
    torch.testing.assert_close(add_norm(x, None, weight, 1e-6), expected)
    assert torch.equal(x, before)
    assert add_norm(x, y, None, 1e-6, factor=2.0) is x
    torch.testing.assert_close(x, before + 2 * y)
    expected = OPS.add_norm(x.clone(), None, weight, 1e-6)
    assert add_norm(x, None, weight, 1e-6, out=x) is x
    torch.testing.assert_close(x, expected)
    assert add_norm(x[:0], None, weight, 1e-6).shape == (0, 33)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gates(dtype: torch.dtype, tolerance: float, activation: str):
    torch.manual_seed(1)
    gate_up = (rows_apart(2, 2 * 1030, torch.float32) * 4).to(dtype)
    gate_up[0, :3] = torch.tensor(
        [60.0, -60.0, 0.0], device=DEVICE
    )  # no overflow where an exponential is large
    if activation == "gelu_tanh":  # (of float32 a CPU's form of it loses digits where 1 + tanh is small)
        gate, up = gate_up.double().chunk(2, dim=1)
        expected = (F.gelu(gate, approximate="tanh") * up).to(dtype)
    else:
        expected = OPS.gated_mul(gate_up.float(), activation=activation).to(dtype)  # type: ignore[arg-type]
    found = gated_mul(gate_up, activation)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("norms", [False, True], ids=["", "head norms"])
@pytest.mark.parametrize("kv_int8", [False, True], ids=["", "int8"])
def test_turns_and_stores(norms: bool, kv_int8: bool):
    """10 query heads are more than a program takes; positions are those of tokens, wherever they lie."""
    torch.manual_seed(3)
    case = Case(((5, 1), (14, 3)), 12, 2, 5, block_size=8, kv_int8=kv_int8)
    backend = TorchAttention(replace(case.shape(), device=DEVICE))
    sizes = 6, LAYERS, 2, 2, *backend.tile_shape
    pools = [torch.zeros(sizes, dtype=backend.pool_dtype, device=DEVICE) for _ in range(2)]
    tables = np.array([[4, 1, 0], [2, 0, 5]], np.int32)
    step = AttentionStep(np.array([5, 14], np.int32), np.array([1, 3], np.int32), tables, 1)
    positions = torch.from_numpy(step.positions()).int().to(DEVICE)
    places = torch.tensor([4 * 8 + 5, 0 * 8 + 6, 0 * 8 + 7, 5 * 8], device=DEVICE)
    qkv = torch.randn(4, 14 * 12 + 3).to(DEVICE)[:, : 14 * 12]
    angles, growth = torch.randn(40, 6 + 2).to(DEVICE), torch.rand(40).to(DEVICE) + 1
    cos, sin = angles.cos()[:, :6], angles.sin()[:, :6]
    each = [torch.randn(12).to(DEVICE) for _ in range(2)]
    weights = HeadNorms(*each, 1e-3, 1.0) if norms else None
    turns = Turns(cos, sin, growth=growth)
    if weights is not None:
        turns = Turns(cos, sin, weights.queries, weights.keys, weights.eps, weights.plus, growth)
    found = turn_and_store(qkv, 10, Pages.of(pools[0], LAYER, 12), positions, places, turns)

    heads = qkv.reshape(4, 14, 12)
    turned = heads[:, :12] if weights is None else weights.of(heads[:, :12], 10)
    of = positions.long()
    turned = rotate(turned, cos[of].unsqueeze(1), sin[of].unsqueeze(1))
    expected = turned[:, :10] * growth[of].view(4, 1, 1)
    torch.testing.assert_close(found, expected)
    backend.bind(pools[1])
    backend.write_kv(LAYER, turned[:, 10:], heads[:, 12:], backend.prepare(step))
    if kv_int8:  # a sum in another order may decide how a number is rounded
        integers = [pool.view(torch.int8)[..., :12].int() for pool in pools]
        scales = [pool.view(torch.float32)[..., -1] for pool in pools]
        assert (integers[0] - integers[1]).abs().max() <= 1
        torch.testing.assert_close(*scales)
    else:
        torch.testing.assert_close(*pools)
    values = [pool[:, :, 1].contiguous() for pool in pools]
    assert same_bits(*values)  # what is not turned is the same


def test_what_does_not_fit_is_refused_by_its_name():
    x = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=r"weight \[5\].*takes \[6\]"):
        add_norm(x, None, torch.zeros(5), 1e-6)
    with pytest.raises(ValueError, match=r"y \[2, 6\] bfloat16: the kernel takes float32"):
        add_norm(x, x.bfloat16(), None, 1e-6)
    with pytest.raises(ValueError, match=r"x .*strides \[1, 2\]"):
        add_norm(torch.zeros(6, 2).t(), None, torch.zeros(6), 1e-6)
    with pytest.raises(ValueError, match="at most 65536"):
        add_norm(torch.zeros(1, 65537), torch.zeros(1, 65537), None, 1e-6)
    with pytest.raises(ValueError, match="even number"):
        gated_mul(torch.zeros(2, 7))
    pages = Pages.of(torch.zeros(2, 1, 2, 1, 8, 12), 0, 12)
    turns = Turns(torch.zeros(4, 6), torch.zeros(4, 6))
    with pytest.raises(ValueError, match=r"qkv \[1, 36\].*takes \[any, 48\]"):
        turn_and_store(torch.zeros(1, 36), 2, pages, torch.zeros(1).int(), torch.zeros(1).long(), turns)
    with pytest.raises(ValueError, match=r"places .*takes int64"):
        turn_and_store(torch.zeros(1, 48), 2, pages, torch.zeros(1).int(), torch.zeros(1).int(), turns)
