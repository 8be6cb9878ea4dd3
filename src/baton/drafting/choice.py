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
    flat = chances.ravel()
    likely = np.flatnonzero(flat > LEAST)
    room = min(len(likely), len(seconds) - 1 - rows)
    if room <= 0:
        return None
    alone = len(chances) == 1  # (then they are in order)
    order = likely if alone else likely[np.argsort(-flat[likely], kind="stable")]  # (a row's stay in order)
    order = order[:room]
    rate = (rows + np.cumsum(flat[order], dtype=np.float64)) / seconds[rows + 1 : rows + 1 + room]
    best = int(rate.argmax())
    if rate[best] < (1 + _GAIN) * rows / seconds[rows]:
        return None
    if alone:
        return [best + 1]
    found: list[int] = np.bincount(order[: best + 1] // chances.shape[1], minlength=len(chances)).tolist()
    return found
