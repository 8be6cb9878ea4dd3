"""Where the parameters of a model live, and which product multiplies by each weight."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from baton.model.cpu.library import native
from baton.model.cpu.linear import NativeInt8Product, NativeProduct, serves
from baton.model.layers.grouped import GroupedProduct, grouped_product
from baton.model.layers.int8 import Int8Product
from baton.model.layers.packed import OneDnnProduct, PlainProduct, Weights, WideProduct
from baton.model.layers.parallel import TensorParallel
from baton.model.layers.rounding import Grouping, Rounded, in_groups
from baton.model.ops.device import DeviceKernels, DeviceProduct
from baton.model.ops.fused import FusedOps
from baton.model.ops.steady import Sizes, find_sizes, random_rows, revealing
from baton.model.weights.grouped import Grouped, InGroups, joined
from baton.model.weights.own_memory import own_memory
from baton.model.weights.store import PrivateStore, Shelf, WeightStore

Product = (
    PlainProduct
    | NativeProduct
    | OneDnnProduct
    | NativeInt8Product
    | Int8Product
    | GroupedProduct
    | DeviceProduct
)
Library = TypeVar("Library", PlainProduct, OneDnnProduct, Int8Product)


@dataclass(frozen=True)
class Part:
    """One of the matrices that a layer's weight is made of."""

    name: str
    rows: int
    """Of this rank"""
    finer: bool = False
    """To be quantized by `Placement.finer`"""


@dataclass(frozen=True)
class Placement:
    """Where parameters live and how products are computed with them."""

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device
    weights: Weights = "plain"
    ops: FusedOps = field(default_factory=FusedOps)
    sizes: dict[tuple[type, int, int, bool, torch.dtype], Sizes] = field(default_factory=dict)
    """Found already, by product, outputs, inputs, whether there is a bias, and dtype."""
    groups: bool = False
    """Weights may come in groups, or are put into groups."""
    grouping: Grouping | None = None
    """For weights of layers in floating point; None: they stay so."""
    finer: Grouping | None = None
    """For matrices of layers that lose most; None: as the others."""
    head_grouping: Grouping | None = None
    """For the output head, and the embedding if it is the same table."""
    rounded: Rounded = field(default_factory=Rounded)
    store: WeightStore = field(default_factory=PrivateStore)
    """Of one model."""
    kernels: DeviceKernels | None = None
    """Of the device, for products; None: PyTorch's, or a CPU's."""

    @property
    def copies(self) -> bool:
        """Whether products make a form of their own of a weight."""
        return self.weights != "plain" or self.groups

    @property
    def packs_itself(self) -> bool:
        """Whether the library makes the form of each weight of a layer: nothing of it is found out by trying
        PyTorch's products, whose bits depend on the threads that compute them."""
        library = native()
        if library is None or self.device.type != "cpu" or self.kernels is not None:
            return False
        if self.weights == "int8":
            return serves(library, torch.int8)
        return self.weights == "packed" or self.grouping is not None

    def exact(self) -> Placement:
        """For weights that are multiplied in float32, whatever others are in."""
        fast = self.device.type == "cpu" and self.kernels is None and serves(native(), torch.float32)
        return replace(
            self,
            dtype=torch.float32,
            weights="packed" if fast else "plain",
            groups=False,
            grouping=None,
            finer=None,
        )

    def parameter(self, name: str, *shape: int) -> Tensor:
        """That stays as it is filled."""
        return self.store.make(name, shape, self.dtype, self.device)

    def buffer(self, *shape: int) -> Tensor:
        """For a weight that is about to be packed: on the CPU, where it is quantized."""
        if self.device.type != "cpu" and not self.copies:
            return torch.empty(*shape, dtype=self.dtype, device=self.device)
        return own_memory(math.prod(shape), self.dtype).view(shape)

    def absent(self, *shape: int) -> Tensor:
        """In place of a weight that the store has in the form that it is multiplied in."""
        return torch.empty(*shape, dtype=self.dtype, device="meta")

    def rounding(self, parts: Sequence[Part], weight: Tensor | InGroups) -> Tensor | InGroups:
        """A layer's weight as it is to be multiplied: in groups, if it is not and should be.  `parts`: the
        matrices that it is made of; neighbours that are quantized alike are quantized at once.

        Raises `ValueError` (one line).
        """
        if self.grouping is None or not isinstance(weight, Tensor):
            return weight
        found, row = [], 0
        for finer, run in itertools.groupby(parts, key=lambda part: part.finer and self.finer is not None):
            alike = list(run)
            rows = sum(part.rows for part in alike)
            grouping = self.finer if finer and self.finer is not None else self.grouping
            names = " + ".join(part.name for part in alike)
            found.append(self._quantized(names, weight[row : row + rows], grouping))
            row += rows
        return joined(found)

    def rounding_of_head(self, name: str, weight: Tensor | InGroups) -> Tensor | InGroups:
        """As `rounding`, for the output head."""
        if self.head_grouping is None or not isinstance(weight, Tensor):
            return weight
        return self._quantized(name, weight, self.head_grouping)

    def _quantized(self, name: str, weight: Tensor, grouping: Grouping) -> Grouped:
        found, error = in_groups(weight, grouping)
        self.rounded.note(name, error)
        return found

    def product(
        self,
        weight: Tensor | InGroups,
        bias: Tensor | None,
        name: str,
        result: torch.dtype | None = None,
    ) -> Product:
        """`weight` is `absent` if the store is complete.  `result`: the dtype of what the product gives, and
        of the bias; None: the model's."""
        if self.kernels is not None:
            return self._of_device(self.kernels, weight, bias, result)
        shelf = Shelf(self.store, name)
        kind = shelf.note("product", lambda: {"groups": int(isinstance(weight, InGroups))})
        if kind["groups"]:
            groups = weight if isinstance(weight, InGroups) else None
            return grouped_product(groups, bias, self.dtype, shelf, result)
        assert isinstance(weight, Tensor)
        if self.weights == "int8":
            library = native()
            if library is not None and serves(library, torch.int8):
                return NativeInt8Product(library, weight, bias, shelf, result)
            return self._steady(Int8Product(weight, bias, self.ops, result), weight, bias)
        widens = result is not None and result != weight.dtype
        if self.weights == "packed" or (self.weights == "onednn" and widens and native() is not None):
            library = native()
            assert library is not None
            return NativeProduct(library, weight, bias, shelf, result)
        if self.weights == "onednn" and not widens:
            return self._steady(OneDnnProduct(weight, bias), weight, bias)
        if self.copies:  # (else it is a parameter, and in the store)
            kept = shelf.make("plain", tuple(weight.shape), self.dtype)
            weight = kept if shelf.complete else kept.copy_(weight)
        plain = WideProduct(weight, bias) if widens else PlainProduct(weight, bias)
        return self._steady(plain, weight, bias) if self.device.type == "cpu" else plain

    def _of_device(
        self,
        kernels: DeviceKernels,
        weight: Tensor | InGroups,
        bias: Tensor | None,
        result: torch.dtype | None,
    ) -> DeviceProduct:
        if not isinstance(weight, Tensor):
            return kernels.grouped(weight, bias, self.dtype, result)
        if self.weights == "int8":
            return kernels.int8(weight, bias, result)
        if self.copies:  # (else it is a parameter, and on the device)
            weight = weight.to(self.device, copy=True)
        return kernels.plain(weight, bias, result)

    def _steady(self, product: Library, weight: Tensor, bias: Tensor | None) -> Library:
        """So that a row of its result does not depend on the number of rows."""
        key = (type(product), weight.shape[0], weight.shape[1], bias is not None, weight.dtype)
        if key not in self.sizes:
            self.sizes[key] = _sizes_of(product, weight, bias)
        product.sizes = self.sizes[key]
        return product


def _sizes_of(
    product: PlainProduct | OneDnnProduct | Int8Product, weight: Tensor, bias: Tensor | None
) -> Sizes:
    if isinstance(product, Int8Product):  # its sums are exact
        return find_sizes(product.at_once, random_rows(weight.shape[1], weight.dtype), int8=True)
    tried, small, rows = revealing(weight, bias)
    return find_sizes(type(product)(tried, small).at_once, rows)
