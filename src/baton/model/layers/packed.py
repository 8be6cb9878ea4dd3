"""How a linear layer holds its weight: as it is in the file, or packed once for the CPU's fastest product.

Theory.  A matrix product reads a weight in the order in which its instructions use it (on a CPU with bf16 dot
products: pairs of inputs of some dozens of outputs).  PyTorch reorders a plain weight in every call.  Three
forms avoid that; which one is best depends on the CPU, and `best_form` chooses when a worker starts:

* `packed`: Baton's own kernel (`cpu.linear`), with AVX2 and AVX-512, above all for few tokens, and with AMX;
* `onednn`: oneDNN, a part of PyTorch, can be asked to reorder once (`_reorder_linear_weight`) and to
  multiply with the result (`_linear_pointwise`): for bfloat16 where our kernel has no instruction for it, for
  ARM, or without a native library;
* `plain`: `F.linear`, on every device.

An output head gives float32, whatever the model's dtype is: the sums are float32, and rounding them would
make equals of tokens that are not.  Our kernels store them as they are, and cuBLAS does; PyTorch's products
for CPUs do not, so `WideProduct` multiplies in float32 what it has widened, some outputs at a time.

oneDNN's form is opaque: PyTorch can multiply with it, nothing else.  The table of a *tied* embedding is
needed in both ways, as a matrix (output head) and row by row (lookup).  So that it is in memory once only,
`places_of` finds out where the packed form keeps its elements: a blocked order with power-of-two blocks
puts element (n, k) at f(n) + g(k), where f is a sum over the set bits of n and g over those of k.  One
probe matrix with a different number at each (2^i, 0) and (0, 2^j), packed alike, shows all terms.  The
guess is checked against rows of the real table; where it does not hold, the plain table is kept as well.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.cpu.library import native
from baton.model.cpu.linear import NativeProduct, serves
from baton.model.ops.fused import PLAIN, Activations, FusedOps, Result
from baton.model.ops.steady import Sizes, multiply
from baton.model.ops.wide import multiply_wide

Weights = Literal["plain", "packed", "onednn", "int8"]
"""int8: quantized, see `quantized`; the others: see above."""

_MATCHED_ROWS = 64


class PlainProduct:
    """By `F.linear`.  The weight may be overwritten in place at any time."""

    form = PLAIN
    sizes: Sizes | None = None
    """Numbers of rows whose results agree; None: all are taken to."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def multiply(self, x: Activations) -> Result:
        return self.at_once(x) if self.sizes is None else multiply(self.at_once, x, self.sizes)

    def at_once(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, self.bias)


class WideProduct(PlainProduct):
    """Of a weight in 16 bits, with results in float32.  The weight may be overwritten in place at any
    time."""

    def at_once(self, x: Activations) -> Tensor:
        assert isinstance(x, Tensor)
        return multiply_wide(x, self.weight, self.bias)


class OneDnnProduct:
    """By oneDNN.  `weight` is copied; nothing of it is kept."""

    form = PLAIN
    sizes: Sizes | None = None
    """As in `PlainProduct`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        self.bias = bias
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise.default

    @property
    def nbytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    def multiply(self, x: Activations) -> Result:
        return self.at_once(x) if self.sizes is None else multiply(self.at_once, x, self.sizes)

    def at_once(self, x: Activations) -> Tensor:
        out: Tensor = self._multiply(x, self.weight, self.bias, "none", (), "")
        return out


class PackedRows:
    """Rows of a weight [N, K] read back from its packed form: element (n, k) is at `rows[n] + columns[k]`."""

    def __init__(self, elements: Tensor, places: tuple[Tensor, Tensor], ops: FusedOps) -> None:
        self._elements = elements
        self._row_places, self._column_places = places
        self._ops = ops

    def addresses(self) -> tuple[int, int, int]:
        """Of the elements, and of the places of rows and of columns."""
        return self._elements.data_ptr(), self._row_places.data_ptr(), self._column_places.data_ptr()

    def rows(self, rows: Tensor) -> Tensor:
        """[T] row numbers → [T, K]."""
        return self._ops.take_rows(self._elements, self._row_places, self._column_places, rows)


def rows_of(product: NativeProduct | OneDnnProduct, table: Tensor, ops: FusedOps) -> PackedRows | None:
    """To read back rows of `table`, of which the product was made; None if they cannot be found."""
    if isinstance(product, NativeProduct):
        return PackedRows(product.weight.elements, product.weight.places(), ops)
    try:
        found = PackedRows(memory_of(product.weight), places_of(table), ops)
    except NotImplementedError:
        return None
    chosen = torch.linspace(0, len(table) - 1, min(len(table), _MATCHED_ROWS)).long()
    return found if torch.equal(found.rows(chosen), table[chosen]) else None


def places_of(plain: Tensor) -> tuple[Tensor, Tensor]:
    """Where oneDNN would put element (n, k) of such a matrix: rows[n] + columns[k].

    Raises `NotImplementedError` if it has no such order.
    """
    rows, columns = plain.shape
    probe = torch.zeros_like(plain)
    row_bits = [1 << bit for bit in range((rows - 1).bit_length())]
    column_bits = [1 << bit for bit in range((columns - 1).bit_length())]
    probe[row_bits, 0] = torch.arange(1, len(row_bits) + 1, dtype=plain.dtype)
    probe[0, column_bits] = torch.arange(101, len(column_bits) + 101, dtype=plain.dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(probe)
    found = memory_of(packed)
    places = found.nonzero().squeeze(1)
    if len(places) != len(row_bits) + len(column_bits):
        raise NotImplementedError("the packed form keeps no single place for each element")
    place_of = {int(found[place]): int(place) for place in places}
    row_places = _sums([place_of[1 + bit] for bit in range(len(row_bits))], rows)
    column_places = _sums([place_of[101 + bit] for bit in range(len(column_bits))], columns)
    if int(row_places.max() + column_places.max()) >= found.numel():
        raise NotImplementedError("the packed form is not made of power-of-two blocks")
    return row_places, column_places


def best_form(dtype: torch.dtype, device: torch.device) -> Weights:
    """The form of the weights that this machine multiplies fastest."""
    if device.type != "cpu":
        return "plain"
    if serves(native(), dtype):
        return "packed"
    return "onednn" if can_pack(dtype) else "plain"


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN, on this CPU, multiplies `dtype` with packed weights."""
    if not torch._C._has_mkldnn:
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.eye(32, dtype=dtype)
        return torch.equal(OneDnnProduct(weight, None).at_once(weight), weight)
    except (RuntimeError, AttributeError):
        return False


def memory_of(packed: Tensor) -> Tensor:
    """The elements of a packed tensor in the order in which they lie."""
    try:
        address = int(torch.ops.mkldnn.data_ptr(packed))
        size = int(torch.ops.mkldnn._nbytes(packed))
    except AttributeError:
        raise NotImplementedError("this PyTorch does not tell where a packed tensor lies") from None
    memory: Any = (ctypes.c_byte * size).from_address(address)
    memory.owner = packed  # a buffer keeps its object, and so the tensor, alive
    return torch.frombuffer(memory, dtype=packed.dtype)


def _sums(terms: list[int], count: int) -> Tensor:
    """[count]: for each number below `count` the sum of the terms of its set bits."""
    found = torch.zeros(1, dtype=torch.int64)
    for term in terms:
        found = torch.cat((found, found + term))
    return found[:count].clone()
