"""What a grammar is to the simulated executor: which tokens may follow those that were generated.

`residues M, late N`: the next token has a certain residue modulo M, which depends on every token before it;
where another condition on these holds the answer may end, by one of its stop tokens.  In each slot the first
N times that a token is due the matcher is not there yet (`StepResult.late`).  So an answer shows whether the
matcher has read all of its tokens, whether it was asked at all, and which of its conditions it knew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt

from baton.executor.base import Int32Array
from baton.protocol.params.sampling import Constraint, Stopping

_FORM = re.compile(r"residues (\d{1,4}), late (\d{1,4})")


class SimulatedMatcher:
    """Of one request in one slot.  Raises `ValueError` for another grammar."""

    def __init__(
        self, constraint: Constraint, generated: Iterable[int], stops: Iterable[int], vocab_size: int
    ) -> None:
        found = _FORM.fullmatch(constraint.grammar)
        if found is None:
            raise ValueError("structured_outputs: not with the simulated executor; leave it out")
        self._modulus, self.late = int(found[1]), int(found[2])
        self._constraint = constraint
        self._stops = sorted({stop for stop in stops if stop < vocab_size})
        self._vocab_size = vocab_size
        self._state = self._count = 0
        for token in generated:
            self.read(token)

    def read(self, token: int) -> None:
        self._state = (self._state * 31 + token + 1) % 1_000_003
        self._count += 1

    def choose(self, seen: int) -> int:
        """The token that the hash of all tokens decides on, of those that may come."""
        residue = self._state % self._modulus
        allowed = [one for one in range(residue, self._vocab_size, self._modulus) if one not in self._stops]
        stays = self._constraint.goes_on or self._count < self._constraint.min_tokens
        if (self._state % 3 == 0 and not stays) or not allowed:
            allowed += self._stops
        return allowed[seen % len(allowed)]


class SimulatedMatchers:
    """Those of all slots."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._of: dict[int, SimulatedMatcher] = {}

    def admit(
        self, slot: int, generated: Int32Array, constraint: Constraint | None, stopping: Stopping
    ) -> None:
        """Raises `ValueError` for a grammar that is none of its kind."""
        if constraint is not None:
            stops = stopping.stop_token_ids
            self._of[slot] = SimulatedMatcher(constraint, generated.tolist(), stops, self._vocab_size)

    def release(self, slot: int) -> None:
        self._of.pop(slot, None)

    def copy(self, slot: int) -> SimulatedMatcher | None:
        """A matcher that reads on by itself."""
        matcher = self._of.get(slot)
        return None if matcher is None else copy(matcher)

    def choose(
        self, slots: Int32Array, tokens: Int32Array, hashes: npt.NDArray[np.uint64], *, again: bool = False
    ) -> list[int]:
        """Chooses again for those of the slots that may not have any token: changes the tokens.  Returns the
        places of those that are late.  `again`: in the same step behind a draft, where nobody is."""
        late: list[int] = []
        if not self._of:
            return late
        for place, (slot, seen) in enumerate(zip(slots.tolist(), hashes.tolist(), strict=True)):
            matcher = self._of.get(slot)
            if matcher is None:
                continue
            if matcher.late and not again:
                matcher.late -= 1
                late.append(place)
            else:
                tokens[place] = token = matcher.choose(seen)
                matcher.read(token)
        return late
