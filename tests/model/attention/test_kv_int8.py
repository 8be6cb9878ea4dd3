"""How a position is quantized."""

from __future__ import annotations

import math

import pytest
import torch

from baton.model.attention.kv_int8 import from_rows, quantize, row_bytes, to_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [6, 64, 80])
def test_rows_hold_each_number_to_half_a_step(dtype: torch.dtype, head_dim: int) -> None:
    torch.manual_seed(0)
    heads = (torch.randn(200, head_dim) * torch.logspace(-3, 2, 200)[:, None]).to(dtype)
    rows = to_rows(heads)
    assert rows.shape == (200, row_bytes(head_dim))
    exact = heads.float()
    steps = exact.abs().amax(1, keepdim=True) / 127
    found = from_rows(rows, head_dim, torch.float32)
    assert ((found - exact).abs() <= steps * 0.5001).all()
    assert torch.equal(quantize(heads)[0].abs().amax(1), torch.full((200,), 127, dtype=torch.int8))


def test_nothing_small_and_broken_numbers() -> None:
    heads = torch.zeros(5, 8)
    heads[1, 3] = 2.0**-101
    heads[2, 3] = math.nan
    heads[3, 3] = -math.inf
    heads[4, 3] = 3e38
    integers, scales = quantize(heads)
    assert not integers[:4].any()
    assert scales[:2].tolist() == [[0.0], [0.0]]
    assert scales[2:4].isnan().all()
    found = from_rows(to_rows(heads), 8, torch.float32)
    assert found[2:4].isnan().all()
    assert found[4, 3] == pytest.approx(3e38)
