"""Products with packed weights are those of the plain ones, and rows can be read back out of them."""

from __future__ import annotations

import pytest
import torch

from baton.model.cpu.library import native
from baton.model.cpu.linear import NativeProduct, serves
from baton.model.layers import packed
from baton.model.layers.packed import OneDnnProduct, PlainProduct, best_form, can_pack, rows_of
from baton.model.ops.fused import FusedOps

SHAPES = [(96, 64), (197, 64), (33, 7), (50, 65), (1, 256), (320, 1030)]
DTYPES = [torch.float32, torch.bfloat16]


def made(kind: str, weight: torch.Tensor, bias: torch.Tensor | None = None):
    if kind == "onednn":
        if not can_pack(weight.dtype):
            pytest.skip("no oneDNN for this type here")
        return OneDnnProduct(weight, bias)
    library = native()
    if library is None or not serves(library, weight.dtype):
        pytest.skip("the native kernel does not serve here")
    return NativeProduct(library, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["native", "onednn"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product(kind: str, dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    product = made(kind, weight, bias)
    for tokens in (1, 2, 3, 12, 13, 70):
        x = torch.randn(tokens, shape[1]).to(dtype)
        exact = torch.nn.functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        found = product.multiply(x)
        assert found.dtype == dtype
        assert found.shape == exact.shape
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_a_row_of_the_native_product_does_not_depend_on_the_others(dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(1)
    product = made("native", torch.randn(300, 130).to(dtype))
    x = torch.randn(2000, 130).to(dtype)  # more than one chunk
    whole = product.multiply(x)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for first, stop in ((0, 1), (5, 7), (5, 17), (100, 164), (3, 1999)):
            assert torch.equal(product.multiply(x[first:stop]), whole[first:stop])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 3001])  # of the latter, 400 rows are several chunks
def test_every_number_of_rows_gives_every_output(dtype: torch.dtype, inputs: int) -> None:
    torch.manual_seed(3)
    product = made("native", torch.randn(70, inputs).to(dtype))
    x = torch.randn(400, inputs).to(dtype)
    single = torch.cat([product.multiply(row.unsqueeze(0)) for row in x])
    for tokens in (0, *range(2, 40), 63, 64, 65, 131, 257, 400):
        assert torch.equal(product.multiply(x[:tokens]), single[:tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["native", "onednn"])
@pytest.mark.parametrize("shape", [(197, 64), (50, 66), (1024, 256), (2050, 80)])
def test_rows_are_read_back(kind: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(2)
    table = torch.randn(shape).to(dtype)
    product = made(kind, table)
    rows = rows_of(product, table, FusedOps())
    if rows is None and kind == "onednn":
        pytest.skip("oneDNN's order is another one on this CPU: the plain table is kept")
    assert rows is not None
    chosen = torch.randint(0, shape[0], (100,))
    assert torch.equal(rows.rows(chosen), table[chosen])


def test_an_order_that_is_not_understood_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.randn(64, 64)
    product = made("onednn", table)
    right = packed.places_of(table)
    monkeypatch.setattr(packed, "places_of", lambda _: (right[0].flip(0), right[1]))
    assert rows_of(product, table, FusedOps()) is None


def test_the_form_fits_the_machine() -> None:
    assert best_form(torch.bfloat16, torch.device("cuda")) == "plain"
    assert best_form(torch.float32, torch.device("cpu")) in ("packed", "onednn", "plain")
    weight = torch.randn(4, 3)
    assert PlainProduct(weight, None).nbytes == 48
