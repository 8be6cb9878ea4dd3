"""A value that a model wrote as text, as JSON of the types that its tool's schema allows.  Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

from baton.gateway.parsing.json_text import json_object, json_value
from baton.gateway.parsing.python_values import python_value
from baton.gateway.parsing.reading import Give, Reading, Step

ANY = "json"
"""A kind: of whatever type the text is as JSON; a text in quotes loses them."""
QUOTED = "quoted"
"""A kind: a text that may stand in quotes, and loses them."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")
_MOST_DIGITS = 1024
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


def coerced(text: str, kinds: Sequence[str]) -> str:
    """The text as JSON of one of these types; where it is none of them, a string if that is allowed, else
    whatever JSON it is, else a string."""
    bare = text.strip()
    for kind in ("null", "integer", "number", "boolean"):
        if kind in kinds or ANY in kinds:
            found = _SCALARS[kind](bare)
            if found is not None:
                return found
    if "boolean" in kinds and "string" not in kinds and bare in ("0", "1"):
        return "true" if bare == "1" else "false"
    if bare[:1] and bare[0] in "{[":
        kind = _KINDS[bare[0]]
        if kind in kinds or ANY in kinds or "string" not in kinds:
            found = _read(bare, json_value) or _read(bare, python_value)
            if found is not None:
                return found
    quoted = bare[:1] == '"' and bool({ANY, QUOTED} & set(kinds))
    found = _read(bare, json_value) if quoted or "string" not in kinds else None
    return json.dumps(text, ensure_ascii=False) if found is None else found


def _null(text: str) -> str | None:
    return "null" if text.lower() == "null" or text == "None" else None


def _boolean(text: str) -> str | None:
    return text.lower() if text.lower() in ("true", "false") else None


def _integer(text: str) -> str | None:
    """Also `5.0` and `1e3`, which are whole numbers."""
    if _NUMBER.fullmatch(text) is None or len(text) > _MOST_DIGITS:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        return None
    if value.adjusted() > _MOST_DIGITS or value != value.to_integral_value():
        return None
    return str(int(value))


def _number(text: str) -> str | None:
    """As it was written where that is JSON."""
    if _NUMBER.fullmatch(text) is None or len(text) > _MOST_DIGITS:
        return None
    found = _read(text, json_value)
    if found is not None:
        return found
    whole = _integer(text)
    value = float(text)
    return whole if whole is not None else json.dumps(value) if abs(value) != float("inf") else None


_SCALARS: dict[str, Callable[[str], str | None]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}


def _read(text: str, reader: Callable[[Reading, Give], Step[bool]]) -> str | None:
    """The whole text, as a reader gives it."""
    reading = Reading(text, ended=True)
    pieces: list[str] = []
    try:
        next(reader(reading, pieces.append))
    except StopIteration as end:
        return "".join(pieces) if end.value and reading.at == len(text) else None
    raise AssertionError("a text that has ended was waited for")


WRAPPERS = ("arguments", "input", "parameters")
"""Keys under which models put all arguments once more."""


def whole_object(text: str) -> dict[str, str] | None:
    """A JSON object, with the JSON of each of its values; None: the text is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return (
        {k: json.dumps(v, ensure_ascii=False) for k, v in value.items()} if isinstance(value, dict) else None
    )


def unwrapped(arguments: str, known: Sequence[str]) -> str | None:
    """`arguments`: JSON of an object that stands under one of the `WRAPPERS`, or a text that is one.  As
    JSON, if all its keys are parameters that are known; None: it is no such thing."""
    try:
        value = json.loads(arguments)
        if isinstance(value, str):
            arguments, value = value, json.loads(value)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not value.keys() <= set(known):
        return None
    return _read(arguments.strip(), json_object)
