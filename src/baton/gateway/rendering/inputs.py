"""A call's arguments as the object that they are, also where the answer was cut off in them."""

from __future__ import annotations

from typing import Any

import msgspec


def object_of(text: str) -> msgspec.Raw | dict[str, Any]:
    """`text`: JSON of an object, or the beginning of it: what is complete in it then."""
    for data in (text, completed(text)):
        try:
            if isinstance(msgspec.json.decode(data), dict):
                return msgspec.Raw(data.encode())
        except (msgspec.MsgspecError, RecursionError):
            continue
    return {}


def completed(text: str) -> str:
    """The beginning of a JSON text, as far as values in it are complete, and closed there."""
    closers: list[str] = []
    complete = 0
    string = escaped = key = False
    for i, character in enumerate(text):
        if string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                string = False
                if not key:
                    complete = i + 1
        elif character == '"':
            string = True
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
            key = character == "{"
            complete = i + 1
        elif character in "}]":
            closers.pop()
            complete = i + 1
        elif character == ",":
            complete = i
            key = closers[-1] == "}"
        elif character == ":":
            key = False
    if not string and text.endswith(("true", "false", "null")):
        complete = len(text)
    return text[:complete] + "".join(reversed(closers))
