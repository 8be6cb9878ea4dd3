"""Quantizing weights while they are loaded: near, better than the whole range, each row by itself."""

from __future__ import annotations

import pytest
import torch

from baton.model.weights.grouped import Grouped
from baton.model.weights.quantize import group_for, quantize, relative_error


@pytest.fixture
def weight() -> torch.Tensor:
    found = torch.randn((64, 256), generator=torch.Generator().manual_seed(2)) * 0.02
    found[5, 17] = 0.5  # an outlier
    return found


def whole_range(weight: torch.Tensor, group: int) -> Grouped:
    """Rounding to nearest, without a search."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round()
    codes = (parts / scales.unsqueeze(2)).round().add(zeros.unsqueeze(2)).clamp(0, 15)
    return Grouped(codes.flatten(1).to(torch.uint8), scales, zeros, group, 4)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_search_beats_the_whole_range(weight, group):
    found = quantize(weight, 4, group)
    assert relative_error(weight, found) < 0.98 * relative_error(weight, whole_range(weight, group))
    assert torch.equal(found.zeros * 8, (found.zeros * 8).round())
    assert 0 <= found.zeros.min() <= found.zeros.max() <= 15


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (6, False), (6, True), (8, False), (8, True)])
def test_other_zero_points_are_whole_numbers(weight, bits, symmetric):
    zeros = quantize(weight, bits, 64, symmetric).zeros
    assert torch.equal(zeros, zeros.round())


def test_errors_are_of_the_size_that_such_bits_have(weight):
    weight[5, 17] = 0.0
    errors = {
        (bits, group, symmetric): relative_error(weight, quantize(weight, bits, group, symmetric))
        for bits in (4, 6, 8)
        for group in (32, 64, 128)
        for symmetric in (False, True)
    }
    assert errors[4, 32, False] < 0.0735  # llama.cpp's Q4_1, with a quarter bit more, has 0.078
    assert errors[4, 32, True] < 0.085  # llama.cpp's Q4_0, of as many bits, has 0.086
    assert errors[4, 64, False] < 0.085
    assert errors[4, 128, False] < 0.0945
    assert all(error < 0.007 for (bits, _, _), error in errors.items() if bits == 8)
    assert all(error < 0.028 for (bits, _, _), error in errors.items() if bits == 6)


def test_scales_have_the_precision_of_float16_at_any_size(weight):
    for size in (1e-9, 1.0, 1e9):
        scales = quantize(weight * size).scales
        mantissas, _ = torch.frexp(scales)
        assert torch.equal(mantissas * 2048, (mantissas * 2048).round())
        assert relative_error(weight * size, quantize(weight * size)) < 0.12


def test_rows_do_not_depend_on_each_other(weight):
    whole = quantize(weight)
    part = quantize(weight[10:13])
    assert torch.equal(whole.rows(10, 13).dequantized(), part.dequantized())


def test_bf16_and_constant_and_zero_rows():
    weight = torch.stack([torch.zeros(64), torch.full((64,), 0.25), torch.full((64,), -3.0)]).bfloat16()
    for symmetric in (False, True):
        for bits in (4, 6, 8):
            found = quantize(weight, bits, 64, symmetric).dequantized()
            assert torch.allclose(found, weight.float(), rtol=2e-2)


def test_the_largest_group_that_divides_a_row():
    assert [group_for(inputs, 128) for inputs in (1024, 192, 96, 48)] == [128, 64, 32, 0]
    assert group_for(1024, 64) == 64
    with pytest.raises(ValueError, match="96 inputs are no multiple of a group of 64"):
        quantize(torch.ones(2, 96), 4, 64)
