"""Products whose library has several kernels: which numbers of rows agree, and only those are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.model.layers.packed import OneDnnProduct, PlainProduct, can_pack
from baton.model.ops.fused import Activations
from baton.model.ops.steady import (
    ALL,
    COUNTS,
    MOST_ROWS,
    Sizes,
    find_sizes,
    multiply,
    random_rows,
    revealing,
)
from baton.model.weights.quantized import Quantized, Unscaled, quantize_activations

WEIGHT = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))


class Product:
    """Adds up the other way round where `unusual(rows)`; remembers the numbers of rows."""

    def __init__(self, unusual: object, weight: Tensor = WEIGHT) -> None:
        self.unusual, self.weight, self.asked = unusual, weight, list[int]()

    def __call__(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        self.asked.append(len(x))
        inputs = self.weight.shape[1]
        order = reversed(range(inputs)) if self.unusual(len(x)) else range(inputs)  # type: ignore[operator]
        found = torch.zeros(len(x), len(self.weight))
        for k in order:
            found += x[:, k : k + 1].float() * self.weight[:, k].float()
        return found.to(x.dtype)


def without(*some: int) -> tuple[int, ...]:
    return tuple(count for count in COUNTS if count not in some)


@pytest.mark.parametrize(
    ("unusual", "expected"),
    [
        (lambda rows: False, COUNTS),
        (lambda rows: rows == 1, without(1)),
        (lambda rows: rows in (1, 2, 3, 5, 6, 7, 9), without(1, 2, 3, 5, 6, 7)),
        (lambda rows: rows % 16, tuple(count for count in COUNTS if count % 16 == 0)),
        (lambda rows: rows == 64, without(64)),
        (lambda rows: rows not in COUNTS, COUNTS),
        (lambda rows: rows == 512, tuple(count for count in COUNTS if count <= 64)),
    ],
)
def test_rows_come_in_numbers_that_agree(unusual: object, expected: tuple[int, ...]) -> None:
    product = Product(unusual)
    sizes = find_sizes(product, random_rows(40, torch.float32))
    assert sizes == Sizes(expected)
    x = torch.randn(1200, 40)
    whole = multiply(product, x, sizes)
    assert isinstance(whole, Tensor)
    torch.testing.assert_close(whole, x @ WEIGHT.t())
    product.asked.clear()
    for first, count in ((0, 1), (7, 2), (9, 13), (100, 63), (5, 511), (1, 512), (0, 513), (9, 1100)):
        found = multiply(product, x[first : first + count], sizes)
        assert isinstance(found, Tensor)
        assert torch.equal(found, whole[first : first + count])
    assert set(product.asked) <= set(expected)


def test_parts_have_room_for_all_rows_and_for_few_more() -> None:
    assert ALL.parts(0) == []
    assert ALL.parts(9) == [10]
    assert ALL.parts(1200) == [512, 512, 192]
    assert Sizes((64, 512)).parts(1) == [64]
    assert Sizes((64, 512)).parts(100) == [64, 64]
    for rows in range(1, 1500):
        parts = ALL.parts(rows)
        assert sum(parts[:-1]) < rows <= sum(parts) <= max(rows * 1.25, rows + 1)


@pytest.mark.parametrize("unusual", [1, 5, 8, 24, 192])
def test_an_order_that_few_outputs_show_is_found(unusual: int) -> None:
    """In bfloat16, of a small matrix: of random rows all outputs agree, and some of the next thousand not."""

    def other(rows: int) -> bool:
        return rows == unusual

    weight = WEIGHT.bfloat16()
    tried, _, rows = revealing(weight, None)
    assert find_sizes(Product(other, tried), rows) == Sizes(without(unusual))
    if unusual == 1:
        assert find_sizes(Product(other, weight), random_rows(40, torch.bfloat16)) == ALL


@pytest.mark.parametrize("shape", [(24, 40), (1, 1), (3, 2), (2000, 77)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_tried_is_nothing_but_rounding(shape: tuple[int, int], dtype: torch.dtype) -> None:
    model = torch.randn(shape).to(dtype)
    weight, bias, rows = revealing(model, torch.ones(shape[0]).to(dtype))
    assert bias is not None
    assert (weight.shape, weight.dtype, bias.shape, bias.dtype) == (shape, dtype, (shape[0],), dtype)
    assert (rows.shape, rows.dtype) == ((MOST_ROWS + 5, shape[1]), dtype)
    assert revealing(model, None)[1] is None
    assert (rows != 0).all()
    exact = rows.double() @ weight.double().t()
    assert exact.abs().max() < 1e-9 * max(1.0, float(rows.double().abs().max()))
    if shape[1] > 2:
        assert float((rows.double().abs() @ weight.double().abs().t()).min()) > 1e-3


@pytest.mark.parametrize("kind", [PlainProduct, OneDnnProduct])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (96, 72), (107, 72), (72, 107), (300, 256)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_real_products_agree_for_every_number_of_rows(
    kind: type[PlainProduct | OneDnnProduct], dtype: torch.dtype, shape: tuple[int, int], with_bias: bool
) -> None:
    if kind is OneDnnProduct and not can_pack(dtype):
        pytest.skip("no oneDNN for this type here")
    bias = torch.ones(shape[0]).to(dtype) if with_bias else None
    weight, small, rows = revealing(torch.empty(shape, dtype=dtype), bias)
    product = kind(weight, small)
    product.sizes = find_sizes(product.at_once, rows)
    whole = product.multiply(rows)
    assert isinstance(whole, Tensor)
    for count in (*range(1, 140), 255, 300, 511, 513):
        first = count * 37 % (len(rows) - count + 1)
        found = product.multiply(rows[first : first + count].contiguous())
        assert isinstance(found, Tensor)
        assert torch.equal(found, whole[first : first + count]), (count, product.sizes)


def test_what_never_agrees_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def by_place(x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        return x @ WEIGHT.t() + torch.arange(len(x))[:, None]

    assert find_sizes(by_place, random_rows(40, torch.float32)) == ALL
    assert "depend on the batch" in caplog.text


def test_quantized_rows_keep_their_scales() -> None:
    def product(x: Activations) -> Unscaled:
        assert isinstance(x, Quantized)
        assert len(x.values) == len(x.scales)
        assert len(x.values) in (8, 16)
        return Unscaled(x.values.float()[:, :24], x.scales)

    x = quantize_activations(torch.randn(45, 40))
    found = multiply(product, x, Sizes((8, 16)))
    assert isinstance(found, Unscaled)
    assert torch.equal(found.values, x.values.float()[:, :24])
    assert torch.equal(found.scales, x.scales)
