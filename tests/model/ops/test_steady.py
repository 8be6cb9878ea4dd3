"""Products whose library has several kernels: which numbers of rows agree, and only those are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.model.ops.fused import Activations
from baton.model.ops.steady import MOST_ROWS, Sizes, find_sizes, multiply
from baton.model.weights.quantized import Quantized, Unscaled, quantize_activations

WEIGHT = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))


class Product:
    """Adds up the other way round where `unusual(rows)`; remembers the numbers of rows."""

    def __init__(self, unusual: object) -> None:
        self.unusual, self.asked = unusual, list[int]()

    def __call__(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        self.asked.append(len(x))
        order = reversed(range(40)) if self.unusual(len(x)) else range(40)  # type: ignore[operator]
        found = torch.zeros(len(x), 24)
        for k in order:
            found += x[:, k : k + 1] * WEIGHT[:, k]
        return found


@pytest.mark.parametrize(
    ("unusual", "expected"),
    [
        (lambda rows: False, Sizes(1, MOST_ROWS)),
        (lambda rows: rows == 1, Sizes(2, MOST_ROWS)),
        (lambda rows: rows in (1, 2, 3, 5, 6, 7, 9), Sizes(4, MOST_ROWS)),
        (lambda rows: rows % 16, Sizes(16, MOST_ROWS)),
        (lambda rows: rows == 64, Sizes(64, 64)),  # no multiples agree: always the same number
    ],
)
def test_rows_come_in_numbers_that_agree(unusual: object, expected: Sizes) -> None:
    product = Product(unusual)
    sizes = find_sizes(product, 40, torch.float32)
    assert sizes == expected
    x = torch.randn(1200, 40)
    whole = multiply(product, x, sizes)
    assert isinstance(whole, Tensor)
    torch.testing.assert_close(whole, x @ WEIGHT.t())
    product.asked.clear()
    for first, count in ((0, 1), (7, 2), (3, 5), (100, 63), (5, 511), (1, 512), (0, 513), (64, 1100)):
        found = multiply(product, x[first : first + count], sizes)
        assert isinstance(found, Tensor)
        assert torch.equal(found, whole[first : first + count])
    assert all(count % sizes.unit == 0 and count <= sizes.most for count in product.asked)


def test_what_never_agrees_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def by_place(x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        return x @ WEIGHT.t() + torch.arange(len(x))[:, None]

    assert find_sizes(by_place, 40, torch.float32) == Sizes(1, MOST_ROWS)
    assert "depend on the batch" in caplog.text


def test_quantized_rows_keep_their_scales() -> None:
    def product(x: Activations) -> Unscaled:
        assert isinstance(x, Quantized)
        assert len(x.values) == len(x.scales)
        assert len(x.values) % 8 == 0
        return Unscaled(x.values.float()[:, :24], x.scales)

    x = quantize_activations(torch.randn(45, 40))
    found = multiply(product, x, Sizes(8, 16))
    assert isinstance(found, Unscaled)
    assert torch.equal(found.values, x.values.float()[:, :24])
    assert torch.equal(found.scales, x.scales)
