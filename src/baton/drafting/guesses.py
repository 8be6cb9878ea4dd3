"""What may follow in each of some rows, and how probably."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton.drafting.base import Int32Array


class Guesses(NamedTuple):
    """Of n rows, `most` drafts at most each."""

    drafts: Int32Array
    """[n, most]; what is beyond a row's count means nothing."""
    chances: npt.NDArray[np.float32]
    """[n, most]: that a draft and all before it are right; 0 beyond a row's count."""
    counts: Int32Array
    """[n]"""
