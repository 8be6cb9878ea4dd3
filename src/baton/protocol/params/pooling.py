"""What a request wants that generates nothing: a vector of its prompt, or the logits of some tokens after it.

Such a request is prefilled, and its answer is the one result (`Closed.pooled`, `Finished.pooled`).  It never
decodes, and is never handed over: if its instance is lost, another one computes the prompt again, to the same
bytes.
"""

from __future__ import annotations

from array import array
from typing import Literal

import msgspec

MAX_LABELS = 1 << 10

PoolingKind = Literal["last", "mean", "first", "labels"]


class Pooling(msgspec.Struct, array_like=True, frozen=True):
    """`last`, `first`: the hidden state of that token of the prompt, after the model's last norm; `mean`: the
    mean of those of all tokens.  `labels`: the logits of these tokens after the prompt."""

    kind: PoolingKind
    dimensions: int = 0
    """Of a vector: its first so many elements, before it is normalized; 0: all."""
    normalize: bool = True
    """A vector is divided by its length."""
    labels: tuple[int, ...] = ()
    """Token ids, or, where the model has a head of scores, nothing: then they are all of its scores."""

    @property
    def whole(self) -> bool:
        """Every token of the prompt has to be computed for it: none may come from a cache."""
        return self.kind in ("mean", "first")


SCORES = Pooling("labels", normalize=False)


def pack_vector(values: list[float]) -> bytes:
    return array("f", values).tobytes()


def unpack_vector(data: bytes) -> list[float]:
    """Packed float32 → numbers.  Raises `ValueError` if the length is no multiple of 4."""
    values = array("f")
    values.frombytes(data)
    return values.tolist()
