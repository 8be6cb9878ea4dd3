"""A call's arguments as the object that they are."""

from __future__ import annotations

import msgspec


def object_in(text: str) -> msgspec.Raw | None:
    """`text`: JSON of an object; None: it is none, as where the answer was cut off in it."""
    try:
        whole = isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return msgspec.Raw(text.encode()) if whole else None
