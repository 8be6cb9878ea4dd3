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

from baton.drafting.base import Int32Array

_GAIN = 0.01
"""More tokens per second, at least: what is less is noise of the measured costs."""
LEAST = 0.02
"""A draft with a smaller chance is never computed."""


def choose(
    chances: npt.NDArray[np.float32], rows: int, seconds: npt.NDArray[np.float64]
) -> Int32Array | None:
    """Drafts of each row [n], None: none for any.

    `chances` [n, most]: that a draft and all before it are right, falling in each row. `rows`: of the
    step, at least n. `seconds`: of a step by its tokens, `StepCost.table()`.
    """
    flat = chances.ravel()
    likely = np.flatnonzero(flat > LEAST)
    room = min(len(likely), len(seconds) - 1 - rows)
    if room <= 0:
        return None
    order = likely[np.argsort(-flat[likely], kind="stable")[:room]]  # (a row's equal ones stay in order)
    tokens = np.empty(room + 1)
    tokens[0] = rows
    np.cumsum(flat[order], out=tokens[1:], dtype=np.float64)
    tokens[1:] += rows
    rate = tokens / seconds[rows : rows + room + 1]
    best = int(rate.argmax())
    if best == 0 or rate[best] < (1 + _GAIN) * rate[0]:
        return None
    counts: Int32Array = np.bincount(order[:best] // chances.shape[1], minlength=len(chances)).astype(
        np.int32
    )
    return counts
