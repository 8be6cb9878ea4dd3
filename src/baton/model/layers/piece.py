"""Which part of which tensor of a checkpoint fills which part of a layer's parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """[start, stop) along `dim` of the checkpoint tensor `source` fills `parameter` from row `row` on.

    `shape` is the whole source tensor's.  `transform` reorders the slice's elements before the copy.  Of a
    source with three dimensions it is matrix `index`, of which `dim` counts.
    """

    source: str
    shape: tuple[int, ...]
    parameter: str
    row: int = 0
    dim: int = 0
    start: int = 0
    stop: int | None = None
    transform: Callable[[Tensor], Tensor] | None = None
    index: int | None = None
    others: tuple[str, ...] = ()
    """What some checkpoints call the source."""
