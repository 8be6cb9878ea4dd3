"""The numba operations between products against those in PyTorch."""

from __future__ import annotations

import pytest
import torch

from baton.model.cpu.numba.ops import NumbaOps
from baton.model.ops.fused import FusedOps
from baton.model.weights.quantized import Unscaled
from tests.model.cpu.test_steps import DTYPES, SIZES, close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_same_as_in_pytorch(dtype: torch.dtype, int8: bool, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ops, plain = NumbaOps(dtype, int8), FusedOps(int8)
    rows, n = size
    x, y = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype)
    weight, scales = torch.rand(n).to(dtype), torch.rand(rows) + 0.5
    for added in (None, lambda: y, lambda: Unscaled(y.clone(), scales)):
        mine, theirs = x.clone(), x.clone()
        expected = plain.add_norm(theirs, added and added(), weight, 1e-5)
        close(ops.add_norm(mine, added and added(), weight, 1e-5), expected, dtype)
        close(mine, theirs, dtype)
    gate_up = torch.randn(rows, 2 * n).to(dtype) * 3
    gate_up[0, :n] = -1000.0  # silu is 0 there, not NaN
    close(ops.gated_mul(gate_up), plain.gated_mul(gate_up), dtype)
    expected = plain.gated_mul(Unscaled(gate_up.clone(), scales))
    close(ops.gated_mul(Unscaled(gate_up.clone(), scales)), expected, dtype)
    close(ops.quantize(x), plain.quantize(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    ops = NumbaOps(dtype)
    x, weight = torch.randn(200, 300).to(dtype), torch.rand(300).to(dtype)
    whole = ops.add_norm(x.clone(), x, weight, 1e-6)
    assert torch.equal(ops.add_norm(x[7:8].clone(), x[7:8], weight, 1e-6), whole[7:8])
