"""Products with MXFP4: four bits and a byte a group hold the weight exactly; products are as of bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.model.cpu import grouped
from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import instruction_sets, load
from baton.model.layers.grouped import TorchGroupedProduct
from baton.model.reading.layouts import mxfp4
from baton.model.weights.group_rows import GroupRows, dequantize_blocks, quantize_in_blocks
from baton.model.weights.grouped import Grouped

cases = pytest.mark.parametrize("isa", instruction_sets() or [pytest.param("", marks=pytest.mark.skip)])


def a_weight(out: int, inputs: int) -> Grouped:
    """All sixteen numbers, zeros of both signs among them."""
    blocks = torch.randint(0, 256, (out, inputs // 32, 16), dtype=torch.uint8)
    blocks[:, 0] = torch.arange(16, dtype=torch.uint8) * 17
    return mxfp4(blocks, torch.randint(112, 130, blocks.shape[:2], dtype=torch.uint8))


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_four_bits_and_eight_give_the_same_product(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for out, inputs in ((70, 96), (33, 32), (64, 288)):
        weight, bias = a_weight(out, inputs), torch.randn(out).to(dtype)
        product = NativeGroupedProduct(load(isa), weight, bias, dtype)
        eight = NativeGroupedProduct(load(isa), weight.in_bytes(), bias, dtype)
        assert product.parts[0].twin.meta == grouped._E2M1
        padded = eight.nbytes // (inputs + inputs // 16)
        assert product.nbytes == padded * (inputs // 2 + inputs // 32)
        rows = quantize_in_blocks(torch.randn(25, inputs))
        exact = dequantize_blocks(rows).double() @ weight.dequantized().double().t() + bias.double()
        found = product.multiply(rows)
        tolerance = 2e-6 if dtype == torch.float32 else 5e-3
        assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()
        for tokens in range(1, 26):  # every number of rows of a tile
            some = GroupRows(rows.values[:tokens], rows.factors[:tokens])
            assert torch.equal(product.multiply(some), eight.multiply(some))
            assert torch.equal(product.multiply(some), found[:tokens])
        if dtype == torch.float32:
            torch.testing.assert_close(TorchGroupedProduct(weight, bias, dtype).multiply(rows), found)


@cases
def test_rows_are_the_weight(isa: str) -> None:
    weight = a_weight(70, 96)
    product = NativeGroupedProduct(load(isa), weight, None, torch.float32)
    assert torch.equal(product.rows(torch.arange(70)), weight.dequantized())
    # -0 of the file is 0
    assert torch.equal(product.rows(torch.tensor([5]))[0, :2], torch.zeros(2))


@cases
def test_the_largest_sums_do_not_overflow(isa: str) -> None:
    blocks = torch.full((40, 4, 16), 0x77, dtype=torch.uint8)
    blocks[1::2] = 0xFF
    weight = mxfp4(blocks, torch.full((40, 4), 127, dtype=torch.uint8))
    product = NativeGroupedProduct(load(isa), weight, None, torch.float32)
    for tokens in (1, 2, 3, 13):
        rows = quantize_in_blocks(torch.full((tokens, 128), -127.0))
        expected = (weight.dequantized().sum(dim=1) * -127.0).expand(tokens, 40)
        assert torch.equal(product.multiply(rows), expected)


@cases
def test_scales_that_a_byte_does_not_hold_are_kept_otherwise(isa: str) -> None:
    """2^-127, the least of MXFP4, which no float32 has as an exponent alone."""
    weight = a_weight(20, 64)
    scales = weight.scales.clone()
    scales[3, 1] = 2.0**-127
    product = NativeGroupedProduct(load(isa), replace(weight, scales=scales), None, torch.float32)
    assert product.parts[0].twin.meta == grouped._FULL
    assert torch.equal(product.rows(torch.tensor([3])), replace(weight, scales=scales).dequantized()[3:4])
