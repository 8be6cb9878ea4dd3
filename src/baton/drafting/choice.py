"""How many drafts each row of a step has.

Theory. A step of n rows with the drafts D gives n + (sum over D of the chance that a draft and all
before it are right) tokens on average, and takes what a step of n + |D| tokens costs. The drafts that
make tokens per second largest are, for each size of D, the most probable ones; a row's chances fall
from draft to draft, so these are always the first ones of each row. So all chances are sorted, and the
best size is looked up: the optimum over all rows together. Where the step is bound by arithmetic, or
nothing is likely enough, D is empty.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAIN = 0.01
"""More tokens per second, at least: what is less is noise of the measured costs."""
LEAST = 0.02
"""A draft with a smaller chance is never computed."""


def choose(chances: npt.NDArray[np.float32], rows: int, seconds: npt.NDArray[np.float64]) -> list[int] | None:
    """Drafts of each row [n], None: none for any.

    `chances` [n, most]: that a draft and all before it are right, falling in each row. `rows`: of the
    step, at least n. `seconds`: of a step by its tokens, `StepCost.table()`.
    """
    if len(chances) == 1:
        number = _of_one(chances[0].tolist(), rows, seconds[rows : rows + 1 + chances.shape[1]].tolist())
        return [number] if number else None
    flat = chances.ravel()
    likely = np.flatnonzero(flat > LEAST)
    room = min(len(likely), len(seconds) - 1 - rows)
    if room <= 0:
        return None
    order = likely[np.argsort(-flat[likely], kind="stable")][:room]  # (a row's stay in order)
    rate = (rows + np.cumsum(flat[order], dtype=np.float64)) / seconds[rows + 1 : rows + 1 + room]
    best = int(rate.argmax())
    if rate[best] < (1 + _GAIN) * rows / seconds[rows]:
        return None
    found: list[int] = np.bincount(order[: best + 1] // chances.shape[1], minlength=len(chances)).tolist()
    return found


def _of_one(chances: list[float], rows: int, seconds: list[float]) -> int:
    """The drafts of the only row that has any.  `seconds`: of a step with none of them, with one, and so on.

    (In numbers, not in arrays: with one request this is a good part of what drafting costs.)
    """
    best, number = (1 + _GAIN) * rows / seconds[0], 0
    tokens = float(rows)
    for count, (chance, took) in enumerate(zip(chances, seconds[1:], strict=False), 1):
        if chance <= LEAST:
            break
        tokens += chance
        if tokens > best * took:
            best, number = tokens / took, count
    return number
