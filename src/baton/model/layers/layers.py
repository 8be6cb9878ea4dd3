"""The parts that models are made of, each cut for its tensor-parallel rank when it is built.

Theory.  A layer holds exactly the slice of its weight that this rank needs, in the dtype that it is served
in, and says in `pieces` which checkpoint tensor fills which part of it.  The loader visits one layer after
the other, asks it for tensors to fill (`open`), copies slices of the mapped file straight into them, and
gives them back (`close`).  A layer whose weight is served in another form than it is read in (`packed`)
makes that form then, so that at most one layer is in memory twice.  All that a layer keeps is made through
the model's store (`weights.store`); of a store that is complete it takes what is there (`attach`).

* column parallel: output features are cut; each rank computes its own outputs. No communication.
* row parallel: input features are cut; each rank has a partial sum, completed by one all-reduce.
* several matrices of the same input (q, k, v; gate, up) are one matrix, that is, one product.
* vocabulary parallel: ceil(V / n) rows a rank; rows past V are zeros.

Between two products of a step there are a few microseconds of work at small batches, and the weights that
stream by evict the interpreter from the caches.  So these are plain objects, and a call goes straight to
the kernel: `torch.nn.Module` costs more for each call and attribute than the arithmetic of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.model.cpu.grouped import NativeGroupedProduct
from baton.model.cpu.linear import NativeProduct
from baton.model.layers.grouped import GroupedProduct
from baton.model.layers.packed import OneDnnProduct, PackedRows, PlainProduct, rows_of
from baton.model.layers.piece import Piece
from baton.model.layers.placement import Part, Placement, Product
from baton.model.ops.device import DeviceGroups, DevicePlain
from baton.model.ops.fused import Activations, Form, Result
from baton.model.weights.grouped import Grouped, InGroups
from baton.model.weights.store import Shelf


class Module:
    """A part of a model; its parts are its attributes, and the items of those that are lists."""

    def layers_within(self) -> Iterator[Layer]:
        """Everything in it that is to be loaded, each once, in the order of use."""
        seen: set[int] = set()
        waiting: list[object] = [self]
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            if isinstance(part, Layer):
                yield part
            if isinstance(part, Module):
                waiting.extend(reversed(vars(part).values()))
            elif isinstance(part, list):
                waiting.extend(reversed(part))


class Layer(Module):
    """A part with parameters of its own to be loaded, one time or several."""

    copies = False
    """What `close` gets may be the mapped file itself: the layer makes its own form of it, and keeps that."""
    takes_groups = False
    """The weight that `close` gets may be in groups."""
    apart = False
    """What `open` and `close` do is the same, whichever thread does it beside others, and however many
    threads it may use."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def parameters(self) -> dict[str, Tensor]:
        """Those that stay as they are filled, by the names in `pieces`."""
        found = {name: getattr(self, name, None) for name in {piece.parameter for piece in self.pieces}}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def open(self) -> dict[str, Tensor]:
        """Tensors for the loader to fill, by the names of parameters in `pieces`."""
        return self.parameters()

    def close(self, filled: dict[str, Tensor | InGroups]) -> None:
        """All pieces of what `open` gave are in place; the layer works from now on."""

    def attach(self) -> None:
        """The store is complete: the layer works from now on, without `open` and `close`."""

    def weight_bytes(self) -> int:
        return sum(item.numel() * item.element_size() for item in self.parameters().values())


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) * (weight + plus) over the last dimension, computed in float32."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement, plus: float = 0.0) -> None:
        super().__init__()
        self.plus = plus
        self.weight = placement.parameter(f"{name}.weight", size)
        self.eps = eps
        self.ops = placement.ops
        self.pieces = [Piece(f"{name}.weight", (size,), "weight")]

    def __call__(
        self, x: Tensor, y: Result | None = None, form: Form | None = None, factor: float = 1.0
    ) -> Activations:
        """Adds y * factor to x, in place, and normalizes the sum for a product that takes `form`."""
        return self.ops.add_norm(x, y, self.weight, self.eps, form, self.plus, factor)


class Scores(Layer):
    """A head for whole texts: [hidden] → [labels], in float32 whatever the dtype; whole on each rank."""

    def __init__(self, name: str, labels: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        shape = (labels, hidden_size)
        self.weight = placement.store.make(f"{name}.weight", shape, torch.float32, placement.device)
        self.pieces = [Piece(f"{name}.weight", shape, "weight")]

    def close(self, filled: dict[str, Tensor | InGroups]) -> None:
        if not bool(torch.isfinite(self.weight).all()):
            raise ValueError("holds NaN or infinity; the checkpoint is damaged")

    def __call__(self, hidden: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Of one text, after the last norm."""
        weight = self.weight.cpu().numpy()
        return np.array([np.dot(row, hidden) for row in weight], np.float32)


class Matrix(Layer):
    """[T, in] → [T, out], for the slice of a weight [out, in] that this rank has.

    A plain weight is a parameter; another form is made in `close` and known to `product` only.
    """

    product: Product
    multiply: Callable[[Activations], Result]
    """[T, in] → [T, out]"""

    def __init__(
        self, name: str, out_features: int, in_features: int, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self._name = name
        self._placement = placement
        self._shape = (out_features, in_features)
        self.bias = placement.parameter(f"{name}.bias", out_features) if bias else None
        self.copies = placement.copies
        self.takes_groups = placement.groups
        self.apart = self.copies and placement.packs_itself
        self.weight = None if self.copies else placement.parameter(f"{name}.weight", *self._shape)

    @property
    def form(self) -> Form:
        """In which `multiply` takes activations."""
        return self.product.form

    @property
    def added_bias(self) -> Tensor | None:
        """What the product adds."""
        return self.bias

    def open(self) -> dict[str, Tensor]:
        filled = super().open()
        if "weight" not in filled:
            filled["weight"] = self._placement.buffer(*self._shape)
        return filled

    def close(self, filled: dict[str, Tensor | InGroups]) -> None:
        self._use(self._placement.rounding(self._matrices(), filled["weight"]))

    def _matrices(self) -> list[Part]:
        """That the weight is made of."""
        return [Part(piece.source, self._shape[0]) for piece in self.pieces if piece.parameter == "weight"]

    def attach(self) -> None:
        self._use(self._placement.absent(*self._shape) if self.weight is None else self.weight)

    def _use(self, weight: Tensor | InGroups) -> None:
        self.product = self._placement.product(weight, self.added_bias, self._name)
        self.multiply = self.product.multiply

    def weight_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.product.nbytes + bias


class Linear(Matrix):
    """One or several matrices of the same input, cut by output features: [T, in] → [T, out of this rank].

    `parts`: (name, whole output size, first and last+1 row of this rank) of each matrix; a tensor that holds
    several of them stands there for each.  `orders`: how the rows of each are to be reordered.
    `finer`: those (by number) that lose most by being quantized, for `Placement.finer`.
    """

    def __init__(
        self,
        parts: list[tuple[str, int, int, int]],
        in_features: int,
        bias: bool,
        placement: Placement,
        orders: Sequence[Callable[[Tensor], Tensor] | None] = (),
        finer: frozenset[int] = frozenset(),
    ) -> None:
        out_features = sum(stop - start for _, _, start, stop in parts)
        self._parts = [
            Part(f"{name}.weight", stop - start, number in finer)
            for number, (name, _, start, stop) in enumerate(parts)
        ]
        super().__init__(parts[0][0], out_features, in_features, bias, placement)
        row = 0
        for (name, size, start, stop), change in zip(parts, orders or [None] * len(parts), strict=True):
            shape = (size, in_features)
            self.pieces.append(Piece(f"{name}.weight", shape, "weight", row, 0, start, stop, change))
            if bias:
                self.pieces.append(Piece(f"{name}.bias", (size,), "bias", row, 0, start, stop, change))
            row += stop - start

    def _matrices(self) -> list[Part]:
        return self._parts


class RowParallelLinear(Matrix):
    """[T, in of this rank] → [T, out], the same on each rank.  The bias is added once, by rank 0.

    Not `summed`: what it gives is this rank's term of a sum that the caller completes.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: Placement,
        summed: bool = True,
    ) -> None:
        self.parallel = placement.parallel
        self._summed = summed
        share = in_features // self.parallel.size
        first = self.parallel.rank * share
        super().__init__(name, out_features, share, bias, placement)
        shape = (out_features, in_features)
        self.pieces = [Piece(f"{name}.weight", shape, "weight", 0, 1, first, first + share)]
        if bias:
            self.pieces.append(Piece(f"{name}.bias", (out_features,), "bias"))

    @property
    def added_bias(self) -> Tensor | None:
        return self.bias if self.parallel.rank == 0 else None

    def _use(self, weight: Tensor | InGroups) -> None:
        super()._use(weight)
        if self._summed and self.parallel.size > 1:
            self.multiply = self._multiply_and_add_up

    def _multiply_and_add_up(self, x: Activations) -> Tensor:
        return self.parallel.all_reduce(self._placement.ops.dequantize(self.product.multiply(x)))


class VocabParallelEmbedding(Layer):
    """The table [vocab, hidden], for `lookup` (token ids [T] → [T, hidden]), as output `head`, or for both.

    For both, a packed table is in memory once if its rows can be read back, and so is a plain one.
    """

    def __init__(
        self, name: str, vocab_size: int, hidden_size: int, placement: Placement, lookup: bool, head: bool
    ) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.share = -(-vocab_size // self.parallel.size)
        self.first = self.parallel.rank * self.share
        self.vocab_size = vocab_size
        self._placement = placement
        self._hidden_size = hidden_size
        self._lookup = lookup
        self._head = head
        self._rows: PackedRows | GroupedProduct | DeviceGroups | None = None
        self.product: Product | None = None
        self.weight: Tensor | None = None
        if not placement.copies or not (head or placement.groups):
            self.weight = placement.parameter(f"{name}.weight", self.share, hidden_size)
        self.copies = self.weight is None
        self.takes_groups = placement.groups
        self._name = name
        self.filled = max(min(self.first + self.share, vocab_size) - self.first, 0)
        if self.filled:
            shape, stop = (vocab_size, hidden_size), self.first + self.filled
            self.pieces = [Piece(f"{name}.weight", shape, "weight", 0, 0, self.first, stop)]

    def open(self) -> dict[str, Tensor]:
        weight: Tensor | None = self.weight
        if weight is None:
            weight = self._placement.buffer(self.share, self._hidden_size)
        weight[self.filled :] = 0
        return {"weight": weight}

    def close(self, filled: dict[str, Tensor | InGroups]) -> None:
        if not self._head and not self.copies:
            return
        self._rows = self.product = None  # the old one goes before the new one comes
        table = self._placement.rounding_of_head(f"{self._name}.weight", filled["weight"])
        self._use(table.padded(self.share) if isinstance(table, Grouped) else table)

    def attach(self) -> None:
        if self._head or self.copies:
            absent = self._placement.absent(self.share, self._hidden_size)
            self._use(absent if self.weight is None else self.weight)

    def _use(self, table: Tensor | InGroups) -> None:
        shelf = Shelf(self._placement.store, self._name)
        groups = shelf.note("table", lambda: {"groups": int(isinstance(table, Grouped))})["groups"]
        if self._head or groups:
            self.product = self._placement.product(table, None, self._name, torch.float32)
        if not self._lookup or not self.copies:
            return
        self.weight = None
        if isinstance(self.product, GroupedProduct | DeviceGroups):
            self._rows = self.product
        elif isinstance(self.product, PlainProduct | DevicePlain):
            self.weight = self.product.weight
        elif isinstance(self.product, (NativeProduct, OneDnnProduct)):
            assert isinstance(table, Tensor)
            self._rows = rows_of(self.product, table, self._placement.ops)
        if self._rows is None and self.weight is None:
            assert isinstance(table, Tensor)
            self.weight = self._placement.parameter(f"{self._name}.rows", *table.shape)
            if not self._placement.store.complete:
                self.weight.copy_(table)

    @property
    def form(self) -> Form:
        """In which `logits` takes activations."""
        assert self.product is not None
        return self.product.form

    def weight_bytes(self) -> int:
        packed = self.product is not None and self.copies
        return super().weight_bytes() + (self.product.nbytes if packed and self.product else 0)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Token ids [T] → [T, hidden]"""
        if self.parallel.size == 1:
            return self._look_up(tokens)
        local = tokens - self.first
        foreign = (local < 0) | (local >= self.share)
        found = self._look_up(local.masked_fill(foreign, 0))
        return self.parallel.all_reduce(found.masked_fill(foreign.unsqueeze(-1), 0.0))

    def _look_up(self, rows: Tensor) -> Tensor:
        if self._rows is not None:
            return self._rows.rows(rows)
        assert self.weight is not None
        return F.embedding(rows, self.weight)

    def addresses(self) -> tuple[int, int | None, int | None]:
        """Of the elements and, where a row is not in one piece, of `PackedRows.places`."""
        if isinstance(self._rows, PackedRows):
            return self._rows.addresses()
        assert self.weight is not None
        return self.weight.data_ptr(), None, None

    @property
    def groups_address(self) -> int | None:
        """Of the weight in groups that rows are read from, for a native kernel; None: not from such a one."""
        rows = self._rows
        return rows.address if isinstance(rows, NativeGroupedProduct) else None

    def logits(self, hidden: Activations) -> Tensor | None:
        """[n, hidden], normalized → [n, vocab] in float32 on rank 0, None on the others."""
        assert self.product is not None
        whole = self.parallel.gather_columns(self._placement.ops.dequantize(self.product.multiply(hidden)))
        if whole is None or whole.shape[1] == self.vocab_size:
            return whole
        return whole[:, : self.vocab_size]
