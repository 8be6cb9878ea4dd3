"""The parts that models are made of, each cut for its tensor-parallel rank when it is built.

Theory.  A layer allocates exactly the slice of its weight that this rank needs, in the dtype that it is
served in, uninitialised, and says in `pieces` which checkpoint tensor fills which part of it.  The loader
walks over these declarations and copies slices from the mapped file straight into place; nobody else
knows how a checkpoint is cut.

* column parallel: output features are cut; each rank computes its own outputs. No communication.
* row parallel: input features are cut; each rank has a partial sum, completed by one all-reduce.
* several matrices of the same input (q, k, v; gate, up) are one matrix, that is, one product.
* vocabulary parallel: ceil(V / n) rows a rank; rows past V are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baton.model.parallel import TensorParallel


@dataclass(frozen=True)
class Placement:
    """Where parameters live."""

    parallel: TensorParallel
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, dtype=self.dtype, device=self.device), requires_grad=False)


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) along `dim` of the checkpoint tensor `source` fill `target`.

    `shape` is the whole source tensor's.  `transform` reorders the slice's elements before the copy.
    """

    source: str
    shape: tuple[int, ...]
    target: Tensor
    dim: int = 0
    start: int = 0
    stop: int | None = None
    transform: Callable[[Tensor], Tensor] | None = None


class Layer(nn.Module):
    """A module with parameters of its own to be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.empty(size)
        self.size = (size,)
        self.eps = eps
        self.pieces = [Piece(f"{name}.weight", (size,), self.weight)]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.size, self.weight, self.eps)


class Linear(Layer):
    """One or several matrices of the same input, cut by output features: [T, in] → [T, out of this rank].

    `parts`: (name, whole output size, first and last+1 row of this rank) of each matrix.
    """

    def __init__(
        self,
        parts: list[tuple[str, int, int, int]],
        in_features: int,
        bias: bool,
        placement: Placement,
        transforms: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        super().__init__()
        out_features = sum(stop - start for _, _, start, stop in parts)
        self.weight = placement.empty(out_features, in_features)
        self.bias = placement.empty(out_features) if bias else None
        offset = 0
        for name, size, start, stop in parts:
            rows = slice(offset, offset + stop - start)
            offset = rows.stop
            change = (transforms or {}).get(name)
            self.pieces.append(
                Piece(f"{name}.weight", (size, in_features), self.weight[rows], 0, start, stop, change)
            )
            if self.bias is not None:
                self.pieces.append(Piece(f"{name}.bias", (size,), self.bias[rows], 0, start, stop, change))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def column_parallel(
    names: list[str], size: int, in_features: int, bias: bool, placement: Placement
) -> Linear:
    """Matrices of `size` outputs each, cut evenly over the ranks."""
    parallel = placement.parallel
    share = size // parallel.size
    first = parallel.rank * share
    return Linear([(name, size, first, first + share) for name in names], in_features, bias, placement)


class RowParallelLinear(Layer):
    """[T, in of this rank] → [T, out], the same on each rank.  The bias is added once, by rank 0."""

    def __init__(
        self, name: str, in_features: int, out_features: int, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        self.parallel = placement.parallel
        share = in_features // self.parallel.size
        first = self.parallel.rank * share
        self.weight = placement.empty(out_features, share)
        self.bias: nn.Parameter | None = None
        self.pieces = [
            Piece(f"{name}.weight", (out_features, in_features), self.weight, 1, first, first + share)
        ]
        if bias:
            self.bias = placement.empty(out_features)
            self.pieces.append(Piece(f"{name}.bias", (out_features,), self.bias))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.parallel.rank == 0 else None
        return self.parallel.all_reduce(F.linear(x, self.weight, bias))


class VocabParallelEmbedding(Layer):
    """Token ids [T] → [T, hidden]; and, where tied, the weight of the output head."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.parallel = placement.parallel
        self.share = -(-vocab_size // self.parallel.size)
        self.first = self.parallel.rank * self.share
        stop = min(self.first + self.share, vocab_size)
        self.vocab_size = vocab_size
        self.weight = placement.empty(self.share, hidden_size)
        filled = max(stop - self.first, 0)
        self.weight[filled:] = 0
        if filled:
            target = self.weight[:filled]
            self.pieces = [Piece(f"{name}.weight", (vocab_size, hidden_size), target, 0, self.first, stop)]

    def forward(self, tokens: Tensor) -> Tensor:
        if self.parallel.size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        foreign = (local < 0) | (local >= self.share)
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self.parallel.all_reduce(found.masked_fill(foreign.unsqueeze(-1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[n, hidden] → [n, vocab] float32 on rank 0, None on the others."""
        whole = self.parallel.gather_columns(F.linear(hidden, self.weight))
        return None if whole is None else whole[:, : self.vocab_size].float()
