"""Models with weights in groups: one native call gives what the modules give, in every batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.model.cpu import kernels
from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import native
from baton.model.cpu.linear import serves
from baton.model.layers import grouped as grouped_layers
from baton.model.layers.grouped import TorchGroupedProduct, grouped_product
from baton.model.layers.placement import Placement, Product
from baton.model.weights.grouped import Grouped, InGroups, joined
from tests.executor.test_torch_parity import same_in_a_crowd
from tests.model.architectures.test_program import BLOCK, check_same, make, outcome
from tests.model.checkpoints import make_checkpoint
from tests.model.quantized_checkpoints import rewrite_gpt_oss

pytestmark = pytest.mark.skipif(not serves(native(), torch.float32), reason="no native products here")
DTYPES = ["float32", "bfloat16"]


def in_groups(weight: Tensor, group: int, bits: int, order: Tensor | None = None) -> Grouped:
    """Rounded to the nearest, asymmetric."""
    exact = weight.float() if order is None else weight.float()[:, order.long()]
    parts = exact.unflatten(1, (-1, group))
    least, most = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((most - least) / ((1 << bits) - 1)).clamp(min=1e-6).half().float()
    zeros = (-least / scales).round()
    codes = (parts / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)
    codes = codes.clamp(0, (1 << bits) - 1).flatten(1).to(torch.uint8)
    return Grouped(codes, scales, zeros, group, bits, order)


def in_parts(weight: Tensor, group: int, bits: int) -> InGroups:
    """Three parts, of which the second has the other bits, and the last other groups where these fit."""
    one, two = len(weight) // 2 + 1, len(weight) // 2 + 6
    last = 2 * group if weight.shape[1] % (2 * group) == 0 else group
    return joined(
        [
            in_groups(weight[:one], group, bits),
            in_groups(weight[one:two], group, 12 - bits),
            in_groups(weight[two:], last, bits),
        ]
    )


@contextlib.contextmanager
def weights_in_groups(mixed: bool = False, bits: int = 4, parts: bool = False) -> Iterator[list[Product]]:
    """What is loaded inside has its weights in groups; `mixed`: not all, and some in another order; `parts`:
    those of layers in several bits and groups."""
    made: list[Product] = []
    plain = Placement.product

    def product(
        self: Placement, weight: Tensor, bias: Tensor | None, name: str, result: torch.dtype | None = None
    ) -> Product:
        number = len(made)
        order = torch.randperm(weight.shape[1]).int() if mixed and number % 3 == 1 else None
        if mixed and number % 3 == 2:
            made.append(plain(self, weight, bias, name, result))
        else:
            found: InGroups = in_groups(weight, 32, 8 if len(weight) > 300 else bits, order)
            if parts and name.startswith("model.layers."):
                found = in_parts(weight, 32, bits)
            made.append(grouped_product(found, bias, weight.dtype, None, result))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Placement, "product", product)
        yield made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("variant", ["llama2", "qwen3", "ernie4_5"])
def test_one_call_gives_what_the_modules_give(
    variant: str, mixed: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, variant)
    monkeypatch.setattr(kernels, "PIECE_TOKENS", 2 * BLOCK)
    with weights_in_groups(mixed) as made:
        executor = make(tmp_path, dtype, None)
    kinds = {isinstance(product, NativeGroupedProduct) for product in made}
    assert kinds == ({True, False} if mixed else {True})
    check_same(executor)
    executor.close()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", ["llama2", "qwen3"])
def test_products_of_parts_in_bits_of_their_own(variant: str, dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant)
    with weights_in_groups(parts=True) as made:
        executor = make(tmp_path, dtype, None)
    assert max(len(product.parts) for product in made if isinstance(product, NativeGroupedProduct)) == 3
    check_same(executor)
    same_in_a_crowd(executor)
    executor.close()


def test_beside_int8(tmp_path: Path) -> None:
    """Three forms of activations in one model."""
    make_checkpoint(tmp_path, "llama2")
    with weights_in_groups(mixed=True):
        executor = make(tmp_path, "bfloat16", "int8")
    check_same(executor)
    executor.close()


@pytest.mark.parametrize("variant", ["llama2", "ernie4_5"])
def test_close_to_floats_and_to_pytorch(variant: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant)
    executor = make(tmp_path, "float32", None)
    exact = outcome(executor, True, whole=False)[0]
    executor.close()
    with weights_in_groups(bits=8):
        executor = make(tmp_path, "float32", None)
    found = outcome(executor, True, whole=False)[0]
    executor.close()
    with weights_in_groups(bits=8), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_layers, "native", lambda: None)
        executor = make(tmp_path, "float32", None)
    assert isinstance(executor._model.head.product, TorchGroupedProduct)
    in_torch = outcome(executor, False, whole=False)[0]
    executor.close()
    assert 0 < (found - exact).abs().max() < 0.2 * exact.std()
    assert (found - in_torch).abs().max() < 0.02 * exact.std()


def test_rows_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    with weights_in_groups():
        executor = make(tmp_path, "bfloat16", None)
    same_in_a_crowd(executor)
    executor.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpt_oss_in_mxfp4(dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt-oss", dtype=getattr(torch, dtype))
    rewrite_gpt_oss(tmp_path)
    executor = make(tmp_path, dtype, None)
    products = [expert.product for block in executor._model.layers for expert in block.mlp.gate_up]
    assert all(isinstance(product, NativeGroupedProduct) for product in products)
    check_same(executor)
    same_in_a_crowd(executor)
    executor.close()
