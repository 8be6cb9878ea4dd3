"""Fields of bodies that nobody knows."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

log = logging.getLogger(__name__)

MAX_WARNED = 1000
"""Names of which anything is kept."""
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """Warns of field names that nobody knows, once each."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(name)
                log.warning("ignoring the unknown request field %r (said once)", name[:100])


def unknown_in(field: str, raw: msgspec.Raw, known: frozenset[str]) -> list[str]:
    """Names in an object of a body, as JSON, that are not among these.  (What else may be wrong in it, the
    decoder of the body says.)"""
    try:
        members = _MEMBERS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return [f"{field}.{name}" for name in members if name not in known][:MAX_WARNED]
