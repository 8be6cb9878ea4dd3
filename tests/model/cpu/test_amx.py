"""Products by matrix units: right, the same bits for every number of rows, and left alone where they may not
be used."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
import torch
from torch import Tensor

from baton.model.cpu.blocking import DEFAULT, Blocking
from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import instruction_sets, load
from baton.model.cpu.linear import NativeInt8Product, NativeProduct, serves
from baton.model.ops.steady import revealing
from baton.model.weights.group_rows import quantize_in_blocks
from baton.model.weights.quantized import Quantized, quantize_activations
from tests.model.cpu.test_grouped import KINDS, a_weight, part

needs_amx = pytest.mark.skipif(
    "amx" not in instruction_sets(), reason="this CPU, its operating system or the compiler has no AMX"
)
BF16 = torch.bfloat16
COUNTS = (*range(1, 40), 47, 48, 49, 63, 64, 65, 100, 130)


def cut_at_random(rows: int) -> list[slice]:
    ends = sorted({rows, *torch.randint(1, rows, (4,)).tolist()})
    return [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]


@needs_amx
def test_it_serves() -> None:
    assert instruction_sets()[0] == "amx"
    for dtype in (torch.float32, BF16, torch.int8):
        assert serves(load("amx"), dtype)


@needs_amx
@pytest.mark.parametrize("inputs", [*range(1, 70), 95, 96, 97, 127, 128, 129, 160, 191, 200, 1000, 3001])
def test_bfloat16_products_are_right(inputs: int) -> None:
    torch.manual_seed(inputs)
    for outputs, with_bias in ((1, False), (31, True), (33, False), (64, True), (77, True)):
        weight = torch.randn(outputs, inputs).to(BF16)
        bias = torch.randn(outputs).to(BF16) if with_bias else None
        product = NativeProduct(load("amx"), weight, bias)
        for rows in (1, 2, 15, 16, 17, 31, 33, 130):
            x = torch.randn(rows, inputs).to(BF16)
            exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
            sizes = x.double().abs() @ weight.double().abs().t() + 10
            error = (product.multiply(x).double() - exact).abs()
            assert (error <= exact.abs() * 2.0**-8 + sizes * 2.0**-20).all(), rows


@needs_amx
@pytest.mark.parametrize("inputs", [7, 32, 64, 75, 300, 1024])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_whatever_is_computed_with_it(inputs: int, threads: int) -> None:
    """Of products that are nothing but rounding, so that another order would show."""
    library = load("amx")
    weight, bias, rows = revealing(torch.empty(145, inputs, dtype=BF16), torch.ones(145, dtype=BF16))
    product = NativeProduct(library, weight, bias)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = product.multiply(rows)
        if inputs > 32:
            assert (whole.float() - small(bias)).abs().max() > 0
        for blocking in (DEFAULT, Blocking(1 << 10, 1 << 10, 1 << 10), Blocking(16 << 10, 4 << 10, 4096)):
            library.use_blocking(*msgspec.structs.astuple(blocking))
            for count in COUNTS:
                first = count * 37 % (len(rows) - count)
                found = product.multiply(rows[first : first + count].contiguous())
                assert torch.equal(found, whole[first : first + count]), (count, blocking)
            found = torch.cat([product.multiply(rows[cut].contiguous()) for cut in cut_at_random(len(rows))])
            assert torch.equal(found, whole)
    finally:
        library.use_blocking(*msgspec.structs.astuple(DEFAULT))
        torch.set_num_threads(before)


def small(bias: Tensor | None) -> Tensor:
    assert bias is not None
    return bias.float()


@needs_amx
@pytest.mark.parametrize("inputs", [31, 33, 75, 128])
def test_what_lies_beside_a_row_does_not_matter(inputs: int) -> None:
    """Neither other rows nor what is behind the last one, were it not a number or infinite."""
    weight = torch.randn(50, inputs).to(BF16)
    product = NativeProduct(load("amx"), weight, None)
    for rows in (1, 5, 16, 17, 40):
        memory = torch.full((rows * inputs + 4096,), torch.nan, dtype=BF16)
        x = memory[: rows * inputs].view(rows, inputs).copy_(torch.randn(rows, inputs))
        found = product.multiply(x)
        assert found.isfinite().all()
        x[rows // 2] = torch.inf
        again = product.multiply(x)
        others = torch.arange(rows) != rows // 2
        assert torch.equal(again[others], found[others])
        assert not again[rows // 2].isfinite().any()


@needs_amx
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "shape", [(1, 1), (33, 3), (64, 64), (70, 65), (97, 66), (50, 127), (31, 200), (300, 2049)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_bytes_give_what_vector_instructions_give(
    dtype: torch.dtype, shape: tuple[int, int], with_bias: bool
) -> None:
    torch.manual_seed(sum(shape))
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    own, other = (NativeInt8Product(load(isa), weight, bias) for isa in ("amx", "avx512bf16"))
    whole = quantize_activations(torch.randn(max(COUNTS), shape[1]).to(dtype))
    for count in COUNTS:
        x = Quantized(whole.values[:count], whole.scales[:count])
        assert torch.equal(own.multiply(x), other.multiply(x)), count


@needs_amx
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_give_what_vector_instructions_give(bits: int, group: int, kind: str) -> None:
    torch.manual_seed(group + bits)
    for outputs, inputs, dtype, with_bias in (
        (1, group, torch.float32, False),
        (70, 3 * group, torch.float32, True),
        (197, 5 * group, BF16, True),
        (64, 1024, torch.float32, False),
    ):
        weight = a_weight(outputs, inputs, group, bits, kind)
        bias = torch.randn(outputs).to(dtype) if with_bias else None
        own, other = (NativeGroupedProduct(load(isa), weight, bias, dtype) for isa in ("amx", "avx512bf16"))
        whole = quantize_in_blocks(torch.randn(300, inputs))
        expected = other.multiply(whole)
        assert torch.equal(own.multiply(whole), expected)
        for count in (1, 3, 8, 9, 16, 17, 25, 32, 33, 64, 127, 150):
            assert torch.equal(own.multiply(part(whole, 7, 7 + count)), expected[7 : 7 + count]), count


_WITHOUT_ROOM = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))

room = ctypes.create_string_buffer(6144)
stack = Stack(ctypes.addressof(room), 0, 6144)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
from baton.model.cpu.library import instruction_sets
print(instruction_sets()[0])
"""


@needs_amx
def test_without_the_permission_another_build_serves() -> None:
    """Linux refuses it to a process of which a thread's stack for signals is too small for tiles."""
    command = [sys.executable, "-c", _WITHOUT_ROOM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["avx512bf16"]
