"""A model whose weights are in groups, computed with the same weights in floating point: its reference.

Products with weights in groups take activations as signed bytes (`model.weights.group_rows`).  What that
changes is seen beside a model with the dequantized weights: `expand` makes one of a loaded model, in the
executor that serves.  With `rounded` activations go through bytes and back first.  That model has errors of
its own, for a difference of 1e-7 that turns one byte is a step of it; but they are as large as those of the
kernels, if bytes are all that these have.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.decoder.decoder import Decoder
from baton.model.layers.grouped import GroupedProduct
from baton.model.layers.layers import Matrix, VocabParallelEmbedding
from baton.model.layers.placement import Product
from baton.model.ops.fused import PLAIN, Activations
from baton.model.ops.wide import multiply_wide
from baton.model.weights.group_rows import dequantize_blocks, quantize_in_blocks


class ExpandedProduct:
    """By `F.linear`, with what a product in groups multiplies by.  `head`: results are float32."""

    form = PLAIN

    def __init__(self, product: GroupedProduct, rounded: bool, head: bool) -> None:
        self._weight = product.rows(torch.arange(product.out_features))
        self._order = None if product.form.order is None else product.form.order.long()
        self._rounded = rounded
        self._linear = multiply_wide if head else F.linear
        self.bias = product.bias

    @property
    def nbytes(self) -> int:
        return self._weight.numel() * self._weight.element_size()

    def multiply(self, x: Activations) -> Tensor:
        """[T, in] → [T, out]"""
        assert isinstance(x, Tensor)
        if self._order is not None:
            x = x[:, self._order]
        if self._rounded:
            x = dequantize_blocks(quantize_in_blocks(x)).to(x.dtype)
        return self._linear(x, self._weight, self.bias)


def expand(model: Decoder, *, rounded: bool = False) -> int:
    """Replaces all products in groups; returns how many there were.  For one rank, and for good."""
    count = 0
    for layer in model.layers_within():
        if not isinstance(layer, (Matrix, VocabParallelEmbedding)):
            continue
        if not isinstance(layer.product, GroupedProduct):
            continue
        found = cast(Product, ExpandedProduct(layer.product, rounded, not isinstance(layer, Matrix)))
        layer.product = found
        if isinstance(layer, Matrix):
            layer.multiply = found.multiply
        count += 1
    model.weights_change()
    return count
