"""Products of whatever form as a native kernel that calls several of them takes them: `Product` of
native/kernels.h."""

from __future__ import annotations

import ctypes

from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.library import INT, POINTER
from baton.model.cpu.linear import NativeInt8Product, NativeProduct

NativeWeight = NativeProduct | NativeInt8Product | NativeGroupedProduct


class ProductTwin(ctypes.Structure):
    """`Product` of native/kernels.h."""

    _fields_ = (
        ("form", INT),
        ("groups", POINTER),
        ("packed", POINTER),
        ("bias", POINTER),
        ("scales", POINTER),
        ("row_sums", POINTER),
        ("order", POINTER),
        ("n", INT),
        ("k", INT),
    )


def twin_of(product: object) -> ProductTwin:
    """It holds addresses of the product, not the product."""
    assert isinstance(product, NativeWeight)
    order = product.form.order
    found = ProductTwin(
        form=product.form.number,
        bias=None if product.bias is None else product.bias.data_ptr(),
        order=None if order is None else order.data_ptr(),
    )
    if isinstance(product, NativeGroupedProduct):
        found.n, found.k, found.groups = product.out_features, product.in_features, product.address
        return found
    weight = product.weight
    found.n, found.k, found.packed = weight.out_features, weight.in_features, weight.address
    if isinstance(product, NativeInt8Product):
        found.scales, found.row_sums = product.scales.data_ptr(), product.row_sums.data_ptr()
    return found
