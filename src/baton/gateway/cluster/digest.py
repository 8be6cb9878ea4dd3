"""Which prefixes an instance has in its cache, as far as its gateway knows.

An engine reports each change of its prefix index with its load, as 64-bit keys
(`protocol/rules/prefix_keys.py`).  A request's prefix enters that index only when its KV is computed; so that
the next request of the same conversation or batch finds its way in the meantime, the keys of what was just
sent there are *expected* for a while.  Both are a hint: a wrong one costs some computing, never a wrong
token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from baton.protocol.codec import unpack_int64
from baton.protocol.messages.requests import Load

EXPECTED_S = 60.0
"""A prefix that was not reported for so long was not computed, or is gone again."""
_MAX_EXPECTED = 1 << 16
"""Keys; the oldest are forgotten first."""


class PrefixDigest:
    def __init__(self) -> None:
        self._known: set[int] = set()
        self._expected: OrderedDict[int, float] = OrderedDict()
        """Key → until when; in the order of these times."""

    def __len__(self) -> int:
        return len(self._known)

    def update(self, load: Load) -> None:
        """Takes in the changes of a report.  Raises `MalformedMessage`."""
        removed, added = unpack_int64(load.removed), unpack_int64(load.added)
        if load.reset:
            self.clear()
        self._known.difference_update(removed)
        self._known.update(added)
        for key in added:
            self._expected.pop(key, None)

    def expect(self, keys: Sequence[int], now: float) -> None:
        """A request with these keys is on its way there."""
        for key in keys:
            if key not in self._known:
                self._expected[key] = now + EXPECTED_S
                self._expected.move_to_end(key)
        while len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def match(self, keys: Sequence[int], now: float) -> int:
        """How many leading keys are there, or will be soon."""
        for count, key in enumerate(keys):
            if key not in self._known and self._expected.get(key, now) <= now:
                return count
        return len(keys)

    def clear(self) -> None:
        self._known.clear()
        self._expected.clear()
