"""What is made of the hidden states of prompts that want a result, no token (`protocol/params/pooling.py`).

Theory.  A prompt may come in several pieces.  `last` and `labels` need its last token alone; of `first` the
row of the first token is kept, and of `mean` the sum so far: in float64, token after token, so that it does
not depend on where the prompt was cut.  A slot that is preempted forgets what it has: its prompt is computed
again from the first token (`Request.reusable`).

The norm after the last layer is computed row by row, and everything here in NumPy, row by row too: so results
do not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.executor.base import StepBatch
from baton.protocol.params.pooling import Pooling

Float64Array = npt.NDArray[np.float64]
_NORM_ROWS = 512
"""Hidden states that are normalized and widened at a time."""


class Pooler:
    """Of one rank.  `final`: [n, hidden] before the last norm → after it.  `scores`: of a vector after it, if
    the model has a head of scores."""

    def __init__(
        self,
        final: Callable[[Tensor], Tensor],
        scores: Callable[[Float64Array], npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self._final = final
        self._scores = scores
        self._wants: dict[int, Pooling] = {}
        """By slot."""
        self._kept: dict[int, Float64Array] = {}
        """[hidden] of slots of whose prompt a part is computed."""
        self._counts: dict[int, int] = {}
        """Tokens in those sums."""

    def admit(self, slot: int, pooling: Pooling | None) -> None:
        self.release(slot)
        if pooling is not None:
            self._wants[slot] = pooling

    def release(self, slot: int) -> None:
        self._wants.pop(slot, None)
        self._kept.pop(slot, None)
        self._counts.pop(slot, None)

    def labelled(self, batch: StepBatch) -> list[int]:
        """Rows of which logits of tokens are wanted."""
        return [
            row for row, ends in batch.pooled.items() if ends and self._wants[int(batch.slots[row])].labels
        ]

    def labels(self, slot: int, logits: Tensor) -> bytes:
        """[vocab] → the results of a row of `labelled`."""
        wanted = torch.tensor(self._wants[slot].labels, dtype=torch.int64, device=logits.device)
        chosen: npt.NDArray[np.float32] = logits[wanted].float().cpu().numpy()
        return chosen.tobytes()

    def needs_all(self, batch: StepBatch) -> bool:
        """Whether the hidden states of tokens are needed that are not the last of their prompts."""
        return any(self._wants[int(batch.slots[row])].whole for row in batch.pooled)

    def vectors(self, batch: StepBatch, hidden: Tensor, of: npt.NDArray[np.int64] | None) -> dict[int, bytes]:
        """[T, hidden] before the last norm, of all tokens → the vectors of the rows that end here.  `of`:
        of these tokens alone, in their order; None: of all."""
        ends = np.cumsum(batch.counts, dtype=np.int64)
        found: dict[int, bytes] = {}
        last: list[int] = []
        for row, over in batch.pooled.items():
            slot, stop = int(batch.slots[row]), int(ends[row])
            start = stop - int(batch.counts[row])
            match self._wants[slot].kind:
                case "last" | "labels" if over and not self._wants[slot].labels:
                    last.append(row)
                case "mean":
                    self._add(slot, hidden[start:stop])
                case "first" if batch.starts[row] == 0:
                    self._kept[slot] = self._wide(hidden[start : start + 1])[0]
            if over and slot in self._kept:
                found[row] = self._finish(slot, self._kept[slot] / self._counts.get(slot, 1))
        for first in range(0, len(last), _NORM_ROWS):
            some = last[first : first + _NORM_ROWS]
            found_at = ends[some] - 1 if of is None else np.searchsorted(of, ends[some] - 1)
            places = torch.from_numpy(found_at).to(hidden.device)
            for row, vector in zip(some, self._wide(hidden[places]), strict=True):
                found[row] = self._finish(int(batch.slots[row]), vector)
        return found

    def _add(self, slot: int, hidden: Tensor) -> None:
        for first in range(0, len(hidden), _NORM_ROWS):
            rows = self._wide(hidden[first : first + _NORM_ROWS])
            kept = self._kept.get(slot)
            if kept is not None:
                rows = np.concatenate((kept[None], rows))
            # (Over the first axis of several columns NumPy adds row after row.)
            self._kept[slot] = np.add.reduce(rows, axis=0)
        self._counts[slot] = self._counts.get(slot, 0) + len(hidden)

    def _wide(self, hidden: Tensor) -> Float64Array:
        """[n, hidden] before the last norm → after it, in float64."""
        return np.asarray(self._final(hidden).float().cpu().numpy(), np.float64)

    def _finish(self, slot: int, vector: Float64Array) -> bytes:
        pooling = self._wants[slot]
        if pooling.kind == "labels":
            return b"" if self._scores is None else self._scores(vector).tobytes()
        if pooling.dimensions:
            vector = vector[: pooling.dimensions]
        if pooling.normalize:
            length = float(np.sqrt(np.dot(vector, vector)))
            vector = vector / max(length, 1e-12)
        return vector.astype(np.float32).tobytes()
