"""The compiled operations between products against those in PyTorch, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.steps import NativeOps
from baton.model.ops.fused import ACTIVATIONS, PLAIN, FusedOps
from baton.model.weights.quantized import Quantized, Unscaled

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 64), (3, 97), (70, 256), (5, 1030), (300, 33)]
cases = pytest.mark.parametrize("isa", instruction_sets() or [pytest.param("", marks=pytest.mark.skip)])


def close(found, expected, dtype: torch.dtype) -> None:
    if isinstance(expected, Quantized):
        torch.testing.assert_close(found.scales, expected.scales, rtol=1e-2, atol=0)
        back = [(x.values.float() - 128) * x.scales.unsqueeze(1) for x in (found, expected)]
        limit = expected.scales.unsqueeze(1) * 3  # bf16 rounds before, in PyTorch
        assert ((back[0] - back[1]).abs() <= limit).all()
        return
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_same_as_in_pytorch(isa: str, dtype: torch.dtype, int8: bool, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ops, plain = NativeOps(load(isa), dtype, int8), FusedOps(int8)
    rows, n = size
    x, y = torch.randn(rows, n).to(dtype), torch.randn(rows, n).to(dtype)
    weight = torch.rand(n).to(dtype)
    scales = torch.rand(rows) + 0.5
    for added in (None, y, Unscaled(y.clone(), scales)):
        mine, theirs = x.clone(), x.clone()
        expected = plain.add_norm(theirs, added, weight, 1e-5)
        if isinstance(added, Unscaled):
            added = Unscaled(y.clone(), scales)
        close(ops.add_norm(mine, added, weight, 1e-5), expected, dtype)
        close(mine, theirs, dtype)
    gate_up = torch.randn(rows, 2 * n).to(dtype) * 3
    gate_up[0, :n] = -1000.0  # silu is 0 there, not NaN
    for activation in ACTIVATIONS:
        found = ops.gated_mul(gate_up, activation=activation)
        close(found, plain.gated_mul(gate_up, activation=activation), dtype)
    unscaled = Unscaled(gate_up.clone(), scales)
    close(ops.gated_mul(unscaled), plain.gated_mul(Unscaled(gate_up.clone(), scales)), dtype)
    close(ops.quantize(x), plain.quantize(x), dtype)
    bias = torch.randn(n).to(dtype)
    for b in (None, bias):
        close(ops.scaled(Unscaled(y.clone(), scales), b), plain.scaled(Unscaled(y.clone(), scales), b), dtype)


@cases
def test_gates_of_gpt_oss(isa: str) -> None:
    """As transformers has it: gates of 7 at most, ups within 7 of zero and one more."""
    gates, ups = torch.randn(9, 37) * 9, torch.randn(9, 37) * 9
    assert gates.max() > 7 < ups.max()
    low, near = gates.clamp(max=7), ups.clamp(-7, 7)
    expected = (near + 1) * (low * torch.sigmoid(low * 1.702))
    for ops in (NativeOps(load(isa), torch.float32), FusedOps()):
        found = ops.gated_mul(torch.cat((gates, ups), 1), PLAIN, "swiglu_oai")
        assert isinstance(found, Tensor)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=2e-6)


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(isa: str, dtype: torch.dtype) -> None:
    ops = NativeOps(load(isa), dtype)
    x, weight = torch.randn(200, 300).to(dtype), torch.rand(300).to(dtype)
    whole = ops.add_norm(x.clone(), x, weight, 1e-6)
    assert torch.equal(ops.add_norm(x[7:8].clone(), x[7:8], weight, 1e-6), whole[7:8])


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_take_rows(isa: str, dtype: torch.dtype) -> None:
    elements = torch.randn(5000).to(dtype)
    row_places, column_places = torch.randint(0, 2000, (50,)), torch.randint(0, 3000, (64,))
    rows = torch.randint(0, 50, (33,))
    arguments = (elements, row_places, column_places, rows)
    assert torch.equal(NativeOps(load(isa), dtype).take_rows(*arguments), FusedOps().take_rows(*arguments))
