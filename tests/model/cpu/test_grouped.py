"""Products with weights in groups, on every instruction set: exact integer sums, alike in every batch."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from baton.model.cpu import grouped
from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import instruction_sets, load
from baton.model.layers.grouped import TorchGroupedProduct
from baton.model.weights.group_rows import GroupRows, dequantize_blocks, quantize_in_blocks
from baton.model.weights.grouped import Grouped, as_one, joined, runs_of

DTYPES = [torch.float32, torch.bfloat16]
KINDS = {
    "same": grouped._HALF,
    "whole": grouped._HALF_BYTE,
    "eighths": grouped._HALF_EIGHTHS,
    "word": grouped._WORD,
    "half": grouped._HALF_HALF,
    "any": grouped._FULL,
}
"""Zero points, and how codes of 4 bits have them stored."""
cases = pytest.mark.parametrize("isa", instruction_sets() or [pytest.param("", marks=pytest.mark.skip)])


def a_weight(out: int, inputs: int, group: int, bits: int, kind: str = "whole") -> Grouped:
    shape, codes = (out, inputs // group), 1 << bits
    scales = (torch.randn(shape) / 300).half().float()
    zeros = torch.randint(0, codes, shape).float()
    if kind == "same":
        zeros.fill_(codes // 2)
    elif kind in ("eighths", "word"):
        zeros = torch.randint(0, 121, shape) / 8
        zeros[0, 0] = 7.625
        if kind == "word":
            scales = in_words(shape)
    elif kind == "half":
        zeros += 1 / 16 if bits == 4 else 1 / 4
    elif kind == "any":
        zeros, scales = zeros + torch.rand(shape), torch.randn(shape)
    return Grouped(torch.randint(0, codes, (out, inputs), dtype=torch.uint8), scales, zeros, group, bits)


def in_words(shape: tuple[int, int]) -> torch.Tensor:
    """Scales of 6 bits, of all sizes that a word holds, among them those that float16 has as subnormals."""
    sizes = torch.randint(0, 6, shape)
    sizes[torch.rand(shape) < 0.1] = 16
    found = torch.ldexp(torch.randint(32, 64, shape).float(), -sizes - 17)
    found[sizes == 16] = torch.ldexp(torch.tensor(5.0), torch.tensor(-30))
    found[torch.rand(shape) < 0.05] = 0
    return found


def part(rows: GroupRows, first: int, stop: int) -> GroupRows:
    return GroupRows(rows.values[first:stop], rows.factors[first:stop])


@cases
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_the_sum_of_the_integers(isa: str, bits: int, group: int, kind: str) -> None:
    torch.manual_seed(group + bits)
    for out, inputs, dtype, with_bias in (
        (1, group, torch.float32, False),
        (70, 3 * group, torch.float32, True),
        (197, 5 * group, torch.bfloat16, True),
        (64, 1024, torch.float32, False),
    ):
        weight = a_weight(out, inputs, group, bits, kind)
        bias = torch.randn(out).to(dtype) if with_bias else None
        product = NativeGroupedProduct(load(isa), weight, bias, dtype)
        stored = grouped._HALF_HALF if bits > 4 and kind in ("eighths", "word") else KINDS[kind]
        assert product.parts[0].twin.meta == stored or out == 1
        rows = quantize_in_blocks(torch.randn(21, inputs))
        exact = dequantize_blocks(rows).double() @ weight.dequantized().double().t()
        exact += 0 if bias is None else bias.double()
        found = product.multiply(rows)
        assert found.dtype == dtype
        tolerance = 2e-6 if dtype == torch.float32 else 5e-3
        assert (found.double() - exact).abs().max() <= tolerance * exact.abs().max()


@cases
def test_nibbles_are_packed_as_bytes_are(isa: str) -> None:
    torch.manual_seed(8)
    for out, inputs, group in ((1, 32, 32), (70, 160, 32), (33, 192, 64), (64, 384, 128)):
        weight = a_weight(out, inputs, group, 4)
        nibbles = replace(weight, codes=weight.codes[:, ::2] | weight.codes[:, 1::2] << 4, nibbles=True)
        one, two = (
            NativeGroupedProduct(load(isa), each, None, torch.float32).parts[0] for each in (weight, nibbles)
        )
        assert torch.equal(one.elements, two.elements)


@cases
@pytest.mark.parametrize("kind", list(KINDS))
def test_parts_that_are_kept_alike_are_packed_as_one_weight(isa: str, kind: str) -> None:
    torch.manual_seed(9)
    for outs, inputs, group, bits in (
        ((32, 64), 128, 64, 4),
        ((1, 30, 40, 3), 96, 32, 8),
        ((33, 7), 384, 128, 6),
    ):
        of_bits = "whole" if kind in ("eighths", "word") and bits != 4 else kind
        parts = [a_weight(out, inputs, group, bits, of_bits) for out in outs]
        whole = joined(parts)
        (run,) = runs_of(whole)
        together, one = (
            NativeGroupedProduct(load(isa), each, None, torch.float32) for each in (whole, as_one(run))
        )
        assert len(together.parts) == 1
        assert torch.equal(together.parts[0].elements, one.parts[0].elements)


def kind_in_pytorch(weight: Grouped) -> tuple[int, int]:
    """How scales and zeros can be stored, and the exponent that scales are stored without."""
    scales, zeros = weight.scales, weight.zeros
    largest = float(scales.abs().max())
    exponent = math.frexp(largest)[1] - 15 if largest else 0
    stored = scales.double() * 2.0**-exponent
    if not torch.equal(stored.half().double(), stored):
        return grouped._FULL, 0
    least, most = float(zeros.min()), float(zeros.max())
    if least == most:
        return grouped._HALF, exponent
    if least >= 0 and most <= (16 if weight.bits == 4 else 255) and torch.equal(zeros.round(), zeros):
        return grouped._HALF_BYTE, exponent
    if weight.bits == 4 and least >= 0 and most <= 15 and torch.equal((zeros * 8).round(), zeros * 8):
        bits = (stored * 2.0**-14).half()
        if torch.equal(bits.double(), stored * 2.0**-14) and not (bits.view(torch.int16) & ~0x3FE0).any():
            return grouped._WORD, exponent + 14
        return grouped._HALF_EIGHTHS, exponent
    if torch.equal(zeros.half().float(), zeros):
        return grouped._HALF_HALF, exponent
    return grouped._FULL, 0


@cases
def test_scales_and_zeros_take_the_fewest_bytes_that_hold_them(isa: str) -> None:
    """As PyTorch finds it, of numbers at the ends of what each way of storing them holds."""
    torch.manual_seed(10)
    finest = 2.0**-24  # of float16
    in_words = [0.0, 1.0, 31 / 16, 33 / 32, 2.0**-10, 5 * 2.0**-16]
    ends = [*in_words, finest, 65 / 64, 1023 * finest, 2047 / 1024]
    eighths = [0.125, 7.375, 14.875]
    several = [*eighths, 0.0625, 8.0, 15.0, 15.125, 16.0, 17.0, 200.5, 2049.0, 70000.0, -1.0, 1e-9]
    seen = set()
    for number in range(400):
        some = random.Random(number)
        of = ends[: some.choice([6, 7, 8, 10])]
        scales = torch.tensor(of)[torch.randint(0, len(of), (6, 3))] * 2.0 ** some.choice([-30, -8, 0, 9, 40])
        if some.random() < 0.1:
            scales[2, 1] *= -1
        if some.random() < 0.1:
            scales[5, 2] *= 1 + 2.0**-20
        zeros = torch.randint(0, 16, (6, 3)).float()
        if some.random() < 0.2:
            zeros.fill_(float(number % 16))
        if some.random() < 0.7:
            zeros[some.randrange(6), some.randrange(3)] = some.choice(several)
        bits = some.choice([4, 4, 6, 8])
        codes = torch.zeros((6, 96), dtype=torch.uint8)
        weight = Grouped(codes, scales, zeros, 32, bits)
        twin = NativeGroupedProduct(load(isa), weight, None, torch.float32).parts[0].twin
        kind, exponent = kind_in_pytorch(weight)
        assert (twin.meta, twin.scale) == (kind, 2.0**exponent), (number, scales, zeros)
        assert twin.zero == float(zeros.min())
        seen.add(kind)
    assert seen == {
        grouped._FULL,
        grouped._HALF,
        grouped._HALF_BYTE,
        grouped._HALF_EIGHTHS,
        grouped._HALF_HALF,
        grouped._WORD,
    }


@cases
def test_scales_beyond_any_power_of_two_that_float32_holds(isa: str) -> None:
    for size in (1e-40, 3e38):
        codes = torch.arange(64, dtype=torch.uint8).view(2, 32) % 16
        weight = Grouped(codes, torch.full((2, 1), size), torch.full((2, 1), 8.0), 32, 4)
        product = NativeGroupedProduct(load(isa), weight, None, torch.float32)
        assert product.parts[0].twin.meta == grouped._FULL
        assert torch.equal(product.rows(torch.arange(2)), weight.dequantized())


@cases
@pytest.mark.parametrize("bits", [4, 6, 8])
def test_the_largest_sums_do_not_overflow(isa: str, bits: int) -> None:
    largest = (1 << bits) - 1
    weight = Grouped(
        torch.full((40, 256), largest, dtype=torch.uint8), torch.ones(40, 2), torch.zeros(40, 2), 128, bits
    )
    product = NativeGroupedProduct(load(isa), weight, None, torch.float32)
    for sign in (1.0, -1.0):
        rows = quantize_in_blocks(torch.full((3, 256), 127.0 * sign))
        assert torch.equal(product.multiply(rows), torch.full((3, 40), sign * 127.0 * largest * 256))


@cases
@pytest.mark.parametrize("kind", ["eighths", "word"])
def test_the_largest_sums_of_eighths_do_not_overflow(isa: str, kind: str) -> None:
    """Zero points at both ends, and one between, so that they are kept in eighths."""
    zeros = torch.zeros(41, 2)
    zeros[1:40] = 15
    zeros[2] = 0.125
    codes = torch.full((41, 256), 15, dtype=torch.uint8)
    codes[1] = codes[40] = 0
    scales = torch.ones(41, 2)
    scales[40] = 1.0 if kind == "word" else 1.015625  # (which has 7 bits)
    weight = Grouped(codes, scales, zeros, 128, 4)
    product = NativeGroupedProduct(load(isa), weight, None, torch.float32)
    assert product.parts[0].twin.meta == KINDS[kind]
    for sign in (1.0, -1.0):
        for tokens in (1, 3, 13):
            rows = quantize_in_blocks(torch.full((tokens, 256), 127.0 * sign))
            expected = (weight.dequantized().sum(dim=1) * 127.0 * sign).expand(tokens, 41)
            assert torch.equal(product.multiply(rows), expected)


@cases
def test_the_way_of_zero_points_changes_no_bit(isa: str) -> None:
    """Whole ones, kept as such and in eighths: the same products, for every number of rows of a tile."""
    weight = a_weight(70, 384, 64, 4)
    weight.zeros.clamp_(max=15)
    mixed = weight.padded(71)
    mixed.zeros[70] = 0.125
    rows = quantize_in_blocks(torch.randn(25, 384))
    products = [NativeGroupedProduct(load(isa), one, None, torch.float32) for one in (weight, mixed)]
    assert [one.parts[0].twin.meta for one in products] == [grouped._HALF_BYTE, grouped._HALF_EIGHTHS]
    for tokens in range(1, 26):
        found = [one.multiply(part(rows, 0, tokens))[:, :70] for one in products]
        assert torch.equal(*found)


@cases
def test_the_way_of_scales_changes_no_bit(isa: str) -> None:
    """Zero points in eighths beside their scales in one word, and in a byte: the same products."""
    weight = a_weight(70, 384, 64, 4, "word")
    finer = weight.padded(71)
    finer.scales[70] = torch.ldexp(torch.tensor(65.0), torch.tensor(-18))  # (of 7 bits)
    rows = quantize_in_blocks(torch.randn(25, 384))
    products = [NativeGroupedProduct(load(isa), one, None, torch.float32) for one in (weight, finer)]
    assert [one.parts[0].twin.meta for one in products] == [grouped._WORD, grouped._HALF_EIGHTHS]
    for tokens in range(1, 26):
        found = [one.multiply(part(rows, 0, tokens))[:, :70] for one in products]
        assert torch.equal(*found)


@cases
@pytest.mark.parametrize("zero", [15.125, 16.0, 17.0, 200.0])
@pytest.mark.parametrize("all_the_same", [True, False])
def test_zero_points_beyond_the_codes(isa: str, zero: float, all_the_same: bool) -> None:
    """Those above 16, and eighths above 15, do not fit into what codes of 4 bits are unpacked to."""
    weight = a_weight(40, 256, 64, 4)
    zeros = torch.full_like(weight.zeros, zero)
    if not all_the_same:
        zeros[3, 1] = 0
    weight = replace(weight, zeros=zeros)
    product = NativeGroupedProduct(load(isa), weight, None, torch.float32)
    rows = quantize_in_blocks(torch.randn(13, 256))
    exact = dequantize_blocks(rows).double() @ weight.dequantized().double().t()
    found = product.multiply(rows)
    assert (found.double() - exact).abs().max() <= 2e-6 * exact.abs().max()
    assert torch.equal(product.multiply(part(rows, 5, 6)), found[5:6])


@cases
def test_a_token_does_not_depend_on_its_batch(isa: str) -> None:
    """Random weights, random parts of a batch, random numbers of threads."""
    chance = random.Random(5)
    before = torch.get_num_threads()
    try:
        for trial in range(12):
            torch.manual_seed(trial)
            group, bits = chance.choice([32, 64, 128]), chance.choice([4, 6, 8])
            inputs = group * chance.choice([1, 3, 7, 16, 4096 // group])
            weight = a_weight(chance.randint(1, 200), inputs, group, bits, chance.choice(list(KINDS)))
            product = NativeGroupedProduct(load(isa), weight, None, chance.choice(DTYPES))
            tokens = chance.choice([40, 130, 300])
            rows = quantize_in_blocks(torch.randn(tokens, inputs))
            torch.set_num_threads(1)
            single = torch.cat([product.multiply(part(rows, t, t + 1)) for t in range(tokens)])
            torch.set_num_threads(chance.randint(1, 4))
            for _ in range(8):
                first = chance.randrange(tokens)
                stop = chance.randint(first, tokens)
                assert torch.equal(product.multiply(part(rows, first, stop)), single[first:stop])
            assert torch.equal(product.multiply(rows), single)
    finally:
        torch.set_num_threads(before)


@cases
@pytest.mark.parametrize("inputs", [64, 6016])  # of the latter, 400 rows are several chunks
def test_every_number_of_rows_gives_every_output(isa: str, inputs: int) -> None:
    torch.manual_seed(3)
    product = NativeGroupedProduct(load(isa), a_weight(70, inputs, 64, 4), None, torch.bfloat16)
    rows = quantize_in_blocks(torch.randn(200, inputs))
    single = torch.cat([product.multiply(part(rows, t, t + 1)) for t in range(200)])
    for tokens in (0, *range(2, 40), 63, 64, 65, 131, 200):
        assert torch.equal(product.multiply(part(rows, 0, tokens)), single[:tokens])


@cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_back(isa: str, dtype: torch.dtype, kind: str) -> None:
    for bits in (4, 6, 8):
        weight = a_weight(77, 192, 64, bits, kind)
        product = NativeGroupedProduct(load(isa), weight, None, dtype)
        chosen = torch.randint(0, 77, (30,))
        expected = weight.dequantized()[chosen].to(dtype)
        torch.testing.assert_close(product.parts[0].rows(chosen, dtype), expected, rtol=0, atol=0)


def test_scales_take_few_bytes_and_stay_exact() -> None:
    if not instruction_sets():
        pytest.skip("the native library is not built")
    library = load(instruction_sets()[0])
    weight = a_weight(128, 1024, 128, 4)
    codes, groups = 128 * 1024 // 2, 128 * 8
    for same_size in (weight, a_weight(128, 1024, 128, 4, "eighths")):
        assert NativeGroupedProduct(library, same_size, None, torch.bfloat16).nbytes == codes + 3 * groups
    word = a_weight(128, 1024, 128, 4, "word")
    assert NativeGroupedProduct(library, word, None, torch.bfloat16).nbytes == codes + 2 * groups
    tiny = Grouped(weight.codes, weight.scales * 2.0**-30, weight.zeros, 128, 4)  # no float16 has such values
    product = NativeGroupedProduct(library, tiny, None, torch.float32)
    assert product.nbytes == codes + 3 * groups
    assert torch.equal(product.parts[0].rows(torch.arange(128), torch.float32), tiny.dequantized())


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_in_bits_and_groups_of_their_own_are_one_product(isa: str, dtype: torch.dtype) -> None:
    """Every column is bit for bit what a product with its part alone gives, in every batch."""
    torch.manual_seed(5)
    for inputs, told in (
        (384, ((70, 64, 4, "word"), (33, 128, 6, "whole"))),
        (256, ((1, 32, 8, "any"), (64, 128, 4, "same"), (5, 32, 4, "half"), (129, 64, 8, "same"))),
        (4096, ((200, 128, 4, "whole"), (32, 32, 8, "whole"))),
    ):
        parts = [a_weight(out, inputs, group, bits, kind) for out, group, bits, kind in told]
        whole = joined(parts)
        bias = torch.randn(whole.out_features).to(dtype)
        for given in (None, bias):
            product = NativeGroupedProduct(load(isa), whole, given, dtype)
            assert len(product.parts) == len(parts)
            firsts = [0, *itertools.accumulate(part.out_features for part in parts)]
            alone = [
                NativeGroupedProduct(
                    load(isa),
                    one,
                    None if given is None else given[first : first + one.out_features].clone(),
                    dtype,
                )
                for one, first in zip(parts, firsts, strict=False)
            ]
            rows = quantize_in_blocks(torch.randn(131, inputs))
            expected = torch.cat([one.multiply(rows) for one in alone], dim=1)
            for tokens in (1, 2, 3, 12, 13, 25, 131):
                assert torch.equal(product.multiply(part(rows, 0, tokens)), expected[:tokens])
        assert product.nbytes == sum(one.nbytes for one in alone)
        chosen = torch.randint(0, whole.out_features, (40,))
        exact = whole.dequantized()[chosen].to(dtype)
        torch.testing.assert_close(
            product.rows(chosen), exact, rtol=1e-6 if dtype == torch.float32 else 0.01, atol=0
        )


@pytest.mark.parametrize("bits", [6, 8])
def test_parts_are_the_same_numbers_in_pytorch(bits: int) -> None:
    torch.manual_seed(6)
    whole = joined([a_weight(40, 256, 64, 4), a_weight(24, 256, 32, bits)])
    rows, bias = quantize_in_blocks(torch.randn(7, 256)), torch.randn(64)
    product = TorchGroupedProduct(whole, bias, torch.float32)
    exact = dequantize_blocks(rows).double() @ whole.dequantized().double().t() + bias.double()
    assert (product.multiply(rows).double() - exact).abs().max() <= 2e-6 * exact.abs().max()
    chosen = torch.tensor([63, 0, 40, 39, 5])
    torch.testing.assert_close(product.rows(chosen), whole.dequantized()[chosen], rtol=1e-6, atol=0)
