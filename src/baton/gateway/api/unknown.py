"""Fields of bodies that nobody knows."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)

MAX_WARNED = 1000
"""Names of which anything is kept."""


class UnknownFields:
    """Warns of field names that nobody knows, once each."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                log.warning("ignoring the unknown request field %r (said once)", name[:100])
