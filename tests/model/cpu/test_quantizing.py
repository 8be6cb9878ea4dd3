"""Quantizing in C++ finds what the search in PyTorch finds, whatever build, source and number of threads."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from baton.model.cpu import quantizing
from baton.model.cpu.grouped import _WORD, PackedGroups
from baton.model.cpu.library import Native, instruction_sets, load
from baton.model.cpu.quantizing import quantize_natively
from baton.model.layers import rounding
from baton.model.layers.rounding import Grouping, in_groups
from baton.model.weights.quantize import quantize, relative_error
from baton.model.weights.store import Shelf

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the native library is not built")
FORMATS = list(product((4, 6, 8), (32, 64, 128), (False, True)))


@pytest.fixture(params=instruction_sets() or [pytest.param("", marks=pytest.mark.skip)])
def library(request: pytest.FixtureRequest) -> Native:
    return load(request.param)


@pytest.fixture
def weight() -> torch.Tensor:
    """Ordinary, equal, single-signed and outlying numbers; groups fill no whole number of vectors."""
    found = torch.randn((37, 384), generator=torch.Generator().manual_seed(3)) * 0.02
    found[3] = 0.0
    found[4] = 0.25
    found[5] = -3.0
    found[6, 7] = 0.5
    found[7].abs_()
    found[8].abs_().neg_()
    found[9] *= 1e-12
    found[10] *= 1e12
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_those_of_the_search_in_pytorch(
    library: Native, weight: torch.Tensor, dtype: torch.dtype
) -> None:
    if dtype == torch.float16:
        weight[10] = 1.0  # (1e12 is none)
    weight = weight.to(dtype)
    for bits, group, symmetric in FORMATS:
        found, error = quantize_natively(library, weight, bits, group, symmetric)
        expected = quantize(weight, bits, group, symmetric)
        # Elsewhere clips err equally, or numbers lie half-way, within float32's precision.
        same = (found.scales == expected.scales) & (found.zeros == expected.zeros)
        assert same.float().mean() > 0.99
        alike = same.repeat_interleave(group, dim=1)
        assert (found.codes != expected.codes)[alike].float().mean() < 1e-3
        exact = weight.double()
        for row in range(len(weight)):
            errors = [
                (one.rows(row, row + 1).dequantized().double() - exact[row]) for one in (found, expected)
            ]
            squares = [float(wrong.square().sum()) for wrong in errors]
            assert squares[0] <= squares[1] * (1 + 1e-5)
        assert error == pytest.approx(relative_error(weight, found), rel=1e-4)


def test_a_part_of_a_matrix_is_read_where_it_lies(library: Native, weight: torch.Tensor) -> None:
    """A rank's share of the inputs, and a matrix that lies the other way."""
    wide = torch.cat((weight, weight), dim=1).bfloat16()
    expected, _ = quantize_natively(library, weight.bfloat16())
    for view in (wide[:, 384:], weight.bfloat16().t().contiguous().t()):
        found, _ = quantize_natively(library, view)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales, expected.scales)
    found, _ = quantize_natively(library, weight.double())
    assert torch.equal(found.codes, quantize_natively(library, weight)[0].codes)


def test_threads_and_neighbours_change_nothing(library: Native) -> None:
    weight = (torch.randn((700, 256), generator=torch.Generator().manual_seed(4)) * 0.02).bfloat16()
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(quantize_natively(library, weight, 4, 32))
    finally:
        torch.set_num_threads(threads)
    (one, error), (three, other) = results
    assert error == other
    part = quantize_natively(library, weight[13:20], 4, 32)[0]
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(one, name), getattr(three, name))
        assert torch.equal(getattr(one, name)[13:20], getattr(part, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_an_error(library: Native, dtype: torch.dtype, bad: float) -> None:
    weight = torch.ones((20, 128)).to(dtype)
    weight[11, 77] = bad
    with pytest.raises(ValueError, match="hold NaN or infinity"):
        quantize_natively(library, weight)
    with pytest.raises(ValueError, match="128 inputs are no multiple of a group of 96"):
        quantize_natively(library, weight, 4, 96)


def test_a_group_of_zeros_costs_no_memory(library: Native) -> None:
    """Padding rows of a vocabulary, pruned weights: scales stay in float16, and what they give is zero."""
    weight = torch.randn((40, 128), generator=torch.Generator().manual_seed(5)) * 0.02
    plain, _ = quantize_natively(library, weight)
    weight[3] = 0
    weight[7, 64:] = 0
    for found in (quantize_natively(library, weight)[0], quantize(weight)):
        assert PackedGroups(library, [found], Shelf()).twin.meta == _WORD
        assert not found.dequantized()[3].any()
        assert not found.dequantized()[7, 64:].any()
        sizes = [PackedGroups(library, [one], Shelf()).nbytes for one in (plain, found)]
        assert sizes[0] == sizes[1]


def test_loading_uses_it_where_it_is_built(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call a weight, and no pass of PyTorch over it."""
    calls = []
    native = quantizing.quantize_natively
    monkeypatch.setattr(rounding, "quantize_natively", lambda *args: calls.append(args) or native(*args))
    in_groups(weight, Grouping(4, 128))
    assert len(calls) == 1
    assert calls[0][1] is weight
    monkeypatch.setattr(rounding, "native", lambda: None)
    assert in_groups(weight, Grouping(4, 128))[1] == pytest.approx(quantize_natively(*calls[0])[1], rel=1e-4)
    assert len(calls) == 1
