"""Products with weights in groups, of bytes, and in a fixed order, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from baton.model.cuda.products import int8, layout
from baton.model.cuda.products.int8 import multiply_int8, quantize
from baton.model.cuda.products.linear import TritonGroups, TritonInt8, TritonPlain
from baton.model.cuda.products.tiles import FEW, parts_of, product_launches
from baton.model.weights.grouped import MIDDLE, Grouped, InGroups, Stacked
from baton.model.weights.quantize import quantize as quantize_weight
from baton.model.weights.quantized import Quantized, quantize_activations
from tests.model.cuda.where import DEVICE

# A float32 becomes a bfloat16 by being rounded towards zero in the interpreter.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def a_weight(outputs: int, inputs: int, group: int, bits: int, kind: str = "eighths") -> Grouped:
    """`kind`: of its zero points."""
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    groups = (outputs, inputs // group)
    scales = (torch.rand(groups) + 0.5).half().float() * (2.0 / (1 << bits))
    middle = torch.full(groups, MIDDLE[bits])
    zeros = {
        "symmetric": middle,
        "whole": torch.randint(0, 1 << bits, groups).float(),
        "eighths": torch.randint(0, 8 * 15, groups) / 8,
        "any": middle + torch.randn(groups),
    }[kind]
    return Grouped(codes, scales, zeros, group, bits)


def rows_apart(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, size + 3).to(dtype)[:, :size]


def made(
    weight: InGroups, bias: torch.Tensor | None, dtype: torch.dtype, fixed: bool = False
) -> TritonGroups:
    return TritonGroups(weight, None if bias is None else bias.to(DEVICE), dtype, DEVICE, fixed)


def here(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance, found, expected = TOLERANCES[dtype], found.cpu(), expected.cpu()
    torch.testing.assert_close(
        found.float(), expected.float(), atol=tolerance * float(expected.abs().max()), rtol=tolerance
    )


@DTYPES
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("bits", "kind"),
    [(4, "eighths"), (4, "symmetric"), (8, "whole"), (6, "symmetric"), (4, "any"), (8, "any")],
)
def test_weights_in_groups(dtype: torch.dtype, group: int, bits: int, kind: str):
    """Outputs and rows that fill no tile, rows of x apart, and a bias."""
    torch.manual_seed(group + bits)
    weight = a_weight(37, 3 * group, group, bits, kind)
    x, bias = rows_apart(3, 3 * group, dtype), torch.randn(37).to(dtype)
    found = made(weight, bias, dtype).multiply(here(x))
    assert found.dtype == dtype
    near(found, x.float() @ weight.dequantized().t() + bias.float(), dtype)


@pytest.mark.parametrize(
    ("weight", "kept"),
    [
        (a_weight(5, 64, 32, 4, "symmetric"), (torch.float16, None)),
        (a_weight(5, 64, 32, 4, "eighths"), (torch.float16, torch.int8)),
        (a_weight(5, 64, 32, 8, "any"), (torch.float16, torch.float32)),
        (quantize_weight(torch.randn(5, 64) * 1e-6, 4, 32), (torch.bfloat16, torch.int8)),
        (quantize_weight(torch.randn(5, 64), 8, 32), (torch.float16, torch.int8)),
    ],
)
def test_a_weight_lies_exactly_in_few_bytes(weight: Grouped, kept: tuple[torch.dtype, torch.dtype | None]):
    laid = layout.lay(weight, DEVICE)
    assert laid.scales is not None
    assert (laid.scales.dtype, None if laid.zeros is None else laid.zeros.dtype) == kept
    rows = torch.tensor([4, 0, 3])
    assert torch.equal(laid.rows(here(rows), torch.float32).cpu(), weight.dequantized()[rows])
    assert laid.codes.numel() == 5 * 64 * (1 if weight.bits == 8 else 0.5)


@DTYPES
def test_numbers_of_mxfp4(dtype: torch.dtype):
    """Every code, two a byte as in files, scales that float16 has not."""
    torch.manual_seed(1)
    numbers = torch.arange(16, dtype=torch.uint8).repeat(6, 4)
    numbers = numbers[:, torch.randperm(64)]
    scales = 2.0 ** torch.randint(-30, -20, (6, 2))
    weight = Grouped(
        numbers[:, ::2] | numbers[:, 1::2] << 4, scales, torch.zeros(6, 2), 32, 4, None, True, True
    )
    product = made(weight, None, dtype)
    x = torch.randn(2, 64).to(dtype) * 1024
    near(product.multiply(here(x)), x.float() @ weight.dequantized().t(), dtype)
    every = torch.arange(6)
    assert torch.equal(product.rows(here(every)).float().cpu(), weight.dequantized(dtype).float())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("rows", [1, FEW + 1, 65])
def test_inputs_in_parts(rows: int, fixed: bool):
    """Few rows: parts are programs of their own, and a merge follows; many: one program has all parts."""
    torch.manual_seed(2)
    weight = a_weight(33, 1280, 128, 4)
    laid = layout.lay(weight, torch.device("cpu"))
    assert parts_of(laid, 128) == 2
    x, bias = torch.randn(rows, 1280).half(), torch.randn(33).half()
    launches = product_launches(x, laid, torch.empty(rows, 33).half(), bias, fixed)
    assert len(launches) == (2 if rows <= (64 if fixed else FEW) else 1)
    near(
        made(weight, bias, torch.float16, fixed).multiply(here(x)),
        x.float() @ weight.dequantized().t() + bias,
        x.dtype,
    )


def whole_numbers(rows: int, inputs: int) -> torch.Tensor:
    """Whose sums are exact in any order, so that only what is added, and not BLAS, is seen."""
    return torch.randint(-8, 9, (rows, inputs)).half()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_row_depends_on_itself_alone(fixed: bool):
    """Beside others, in another place of a tile, in a batch of another regime: the same bits.  Sums of groups
    are of whole numbers here; they are multiplied by scales, and added up, in float32."""
    torch.manual_seed(3)
    weight = a_weight(40, 1280, 64, 4, "any")
    product = made(weight, torch.randn(40).half(), torch.float16, fixed)
    x = whole_numbers(FEW + 8, 1280)
    alone = product.multiply(here(x[3:4]))
    assert torch.equal(product.multiply(here(x[:5]))[3], alone[0])
    assert torch.equal(product.multiply(here(x[2:20]))[1], alone[0])
    assert torch.equal(product.multiply(here(x))[3], alone[0])


def test_order_of_inputs_and_matrices_of_other_bits():
    """q and k in 4 bits, v in 6 and other groups; inputs in act-order; a table's rows."""
    torch.manual_seed(4)
    order = torch.randperm(128).int()
    parts = [a_weight(20, 128, 32, 4), a_weight(9, 128, 32, 4), a_weight(7, 128, 128, 6)]
    ordered = [Grouped(part.codes, part.scales, part.zeros, part.group, part.bits, order) for part in parts]
    for stack in (Stacked(tuple(parts)), Stacked(tuple(ordered))):
        bias = torch.randn(36)
        product = made(stack, bias, torch.float32)
        assert [part.outputs for part in product.parts] == [29, 7]
        x = rows_apart(2, 128, torch.float32)
        near(product.multiply(here(x)), x @ stack.dequantized().t() + bias, torch.float32)
    rows = torch.tensor([30, 2, 28, 35])
    assert torch.equal(
        made(Stacked(tuple(parts)), None, torch.float32).rows(here(rows)).cpu(), stack_rows(parts)[rows]
    )


def stack_rows(parts: list[Grouped]) -> torch.Tensor:
    return torch.cat([part.dequantized() for part in parts])


@DTYPES
@pytest.mark.parametrize("rows", [1, FEW + 2])
def test_bytes_by_bytes(dtype: torch.dtype, rows: int):
    torch.manual_seed(5)
    plain = torch.randn(45, 300).to(dtype)
    bias = torch.randn(45).to(dtype)
    product = TritonInt8(plain, here(bias), DEVICE)
    x = rows_apart(rows, 300, dtype)
    told, expected = quantize(here(x)), quantize_activations(x)
    assert torch.equal(told.values.cpu(), expected.values)
    assert torch.equal(told.scales.cpu(), expected.scales)
    found = product.multiply(told)
    exact = (expected.values.float() - 128) @ product._values.cpu().float().t()
    exact = exact * product._scales.cpu() * expected.scales.unsqueeze(1) + bias.float()
    near(found, exact, dtype)
    near(found, x.float() @ plain.float().t() + bias.float(), torch.bfloat16)
    one = slice(rows - 1, rows)
    alone = product.multiply(Quantized(told.values[one], told.scales[one]))
    assert torch.equal(alone[0], found[-1])


@pytest.mark.parametrize("rows", [1, FEW + 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_head_gives_the_sums_in_float32(dtype: torch.dtype, rows: int):
    """In every form, with inputs in parts or not: what rounding them to the dtype would give is not it."""
    torch.manual_seed(9)
    plain, bias = torch.randn(70, 1280).to(dtype), torch.randn(70)
    x = rows_apart(rows, 1280, dtype)
    told, eight = quantize_activations(x), quantize_weight(plain.float(), 8, 128)
    bytes_ = TritonInt8(plain, here(bias), DEVICE, torch.float32)
    sums = (told.values.double() - 128) @ bytes_._values.cpu().double().t()
    exact = x.double() @ plain.double().t() + bias
    cases = [
        (TritonPlain(here(plain), here(bias), fixed, torch.float32).multiply(here(x)), exact)
        for fixed in (False, True)
    ]
    cases += [
        (
            TritonGroups(eight, here(bias), dtype, DEVICE, fixed, torch.float32).multiply(here(x)),
            x.double() @ eight.dequantized().double().t() + bias,
        )
        for fixed in (False, True)
    ]
    scaled = sums * bytes_._scales.cpu().double() * told.scales.double().unsqueeze(1) + bias
    cases.append((bytes_.multiply(quantize(here(x))), scaled))
    for found, expected in cases:
        assert found.dtype == torch.float32
        error = (found.cpu().double() - expected).abs().max() / expected.abs().max()
        assert error < 5e-6, "a bfloat16 errs by 2e-3, a float16 by 2e-4"


def test_activations_of_zeros_and_the_largest():
    x = torch.zeros(2, 5)
    x[1] = torch.tensor([3e38, -3e38, 1.0, 0.0, 2e38])
    assert torch.equal(quantize(here(x)).values.cpu(), quantize_activations(x).values)


def test_activations_that_no_program_holds(monkeypatch: pytest.MonkeyPatch):
    """Their rows are read twice: the same bytes and scales."""
    torch.manual_seed(8)
    monkeypatch.setattr(int8, "_HELD", 32)
    for size in (33, 64, 300):
        x = rows_apart(3, size, torch.float32)
        x[1, -1] = 40.0  # (the last element decides)
        found, expected = quantize(here(x)), quantize_activations(x)
        assert torch.equal(found.values.cpu(), expected.values)
        assert torch.equal(found.scales.cpu(), expected.scales)


@DTYPES
def test_a_fixed_order(dtype: torch.dtype):
    torch.manual_seed(6)
    weight, bias = torch.randn(70, 1100).to(dtype), torch.randn(70).to(dtype)
    product = TritonPlain(here(weight), here(bias), True)
    x = rows_apart(3, 1100, dtype)
    near(product.multiply(here(x)), x.float() @ weight.float().t() + bias.float(), dtype)
    product.weight.zero_()
    assert torch.equal(product.multiply(here(x)).cpu(), bias.expand(3, 70))


def test_a_fixed_order_whatever_the_batch():
    """One tile for any number of rows; and rows that are split from those that are not."""
    torch.manual_seed(7)
    weight = (torch.randint(-64, 65, (33, 1200)) / 8).half()
    x = (torch.randint(-64, 65, (70, 1200)) / 64).half()
    product = TritonPlain(here(weight), None, True)
    kinds = {}
    for rows in (1, 16, 40, 64, 70):
        launches = product_launches(x[:rows], layout.plain(weight), torch.empty(rows, 33).half(), None, True)
        arguments = launches[0].arguments
        kinds[rows] = (arguments["ROWS"], arguments["OUTPUTS"], arguments["STEP"], arguments["span"])
        assert arguments["SPLIT"] == (rows <= 64)
    assert len(set(kinds.values())) == 1
    whole = product.multiply(here(x))
    for rows in (slice(0, 1), slice(3, 20)):
        assert torch.equal(product.multiply(here(x[rows])), whole[rows])


def test_what_does_not_fit_is_refused_by_its_name():
    laid = layout.lay(a_weight(8, 64, 32, 4), torch.device("cpu"))
    x, out = torch.zeros(2, 64), torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"x \[2, 32\].*takes \[any, 64\]"):
        product_launches(x[:, :32], laid, out)
    with pytest.raises(ValueError, match=r"out \[2, 8\] float16: the kernel takes float32"):
        product_launches(x, laid, out.half())
    with pytest.raises(ValueError, match=r"bias \[7\].*takes \[8\]"):
        product_launches(x, laid, out, torch.zeros(7))
    with pytest.raises(ValueError, match="takes one dtype"):
        product_launches(x, layout.plain(torch.zeros(8, 64).half()), out)
    with pytest.raises(ValueError, match=r"x \[2, 3\].*takes \[any, 4\]"):
        multiply_int8(
            Quantized(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2)),
            torch.zeros(5, 4, dtype=torch.int8), torch.zeros(5), None, torch.float32,
        )  # fmt: skip
    assert made(a_weight(8, 64, 32, 4), None, torch.float32).multiply(here(x[:0])).shape == (0, 8)
