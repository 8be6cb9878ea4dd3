"""Activations in bytes with a scale for 128 inputs: as close as rounding allows, sums exact."""

from __future__ import annotations

import pytest
import torch

from baton.model.weights.group_rows import (
    SUMMED,
    dequantize_blocks,
    factors_of,
    quantize_in_blocks,
    sums_at,
)
from baton.model.weights.quantized import quantize_activations


@pytest.mark.parametrize("inputs", [32, 96, 128, 160, 1024])
def test_values_are_rounded_and_sums_exact(inputs: int) -> None:
    x = torch.randn(9, inputs)
    x[2] = 0
    rows = quantize_in_blocks(x)
    assert rows.values.shape == x.shape
    assert rows.factors.shape == (9, factors_of(inputs))
    scales = rows.scales.repeat_interleave(128, 1)[:, :inputs]
    assert ((dequantize_blocks(rows) - x).abs() <= scales * 0.501).all()
    for size in SUMMED:
        for group in range(-(-inputs // size)):
            expected = rows.values[:, group * size : (group + 1) * size].int().sum(1)
            found = rows.factors[:, sums_at(inputs, size) + group]
            assert torch.equal(found, -expected)


def test_columns_in_another_order() -> None:
    x = torch.randn(4, 256)
    order = torch.randperm(256).int()
    rows, expected = quantize_in_blocks(x, order), quantize_in_blocks(x[:, order.long()])
    assert torch.equal(rows.values, expected.values)
    assert torch.equal(rows.factors, expected.factors)


def test_an_outlier_spoils_its_block_only() -> None:
    """The reason for a scale a block: against one for a token, the error is a fraction."""
    torch.manual_seed(0)
    x, weight = torch.randn(16, 2048), torch.randn(64, 2048)
    x[:, [17, 900, 1500]] *= 50
    exact = x.double() @ weight.double().t()
    by_token = quantize_activations(x)
    token = (by_token.values.double() - 128) * by_token.scales.double().unsqueeze(1)
    block = dequantize_blocks(quantize_in_blocks(x)).double()
    errors = [(found @ weight.double().t() - exact).square().mean().sqrt() for found in (token, block)]
    assert errors[1] < errors[0] / 2
