"""A call's arguments as chat templates want them, whatever a conversation has for them.

An answer may end inside of a call, and models write calls whose arguments are no object; both come back as
part of the conversation.  So nothing is refused here: what was said stays in the prompt, as the client gave
it where a template joins texts, and as the nearest object where it wants one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

_OTHER = "arguments"
"""The name under which a value that is no object stands in one."""


class Arguments(dict[str, Any]):
    """A call's arguments for chat templates: some print them as JSON themselves, and want an object; some
    join them to a text."""

    def __init__(self, value: Mapping[str, Any], text: str | None = None) -> None:
        """`text`: as the client gave them."""
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return json.dumps(dict(self), ensure_ascii=False) if self._text is None else self._text

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


def read_arguments(given: object) -> tuple[Arguments, bool]:
    """(the arguments, whether they were an object): `given` is a text of JSON, or what it stands for."""
    if given is None:
        return Arguments({}), True
    if isinstance(given, Mapping):
        return Arguments(given), True
    if not isinstance(given, str):
        return Arguments({_OTHER: given}, json.dumps(given, ensure_ascii=False)), False
    if not given.strip():
        return Arguments({}), True
    try:
        value = msgspec.json.decode(given)
    except (msgspec.MsgspecError, RecursionError):
        return Arguments(_begun(given), given), False
    if value is None:
        return Arguments({}), True
    if isinstance(value, dict):
        return Arguments(value, given), True
    if isinstance(value, str) and value.lstrip().startswith("{"):  # (written as a text once more)
        return read_arguments(value)[0], False
    return Arguments({_OTHER: value}, given), False


def _begun(text: str) -> dict[str, Any]:
    """The object that a text begins to write, with the string in which it ends; of any other text, that."""
    for data in _closings(text) if text.lstrip().startswith("{") else ():
        try:
            value = msgspec.json.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {_OTHER: text}


def _closings(text: str) -> list[str]:
    """Ways to end the beginning of a JSON text, best first: where it ends, and after its last whole value."""
    closers: list[str] = []
    whole, closed = 0, ""
    string = key = False
    escape = -1
    for i, character in enumerate(text):
        if string:
            if escape >= 0:
                escape = -1
            elif character == "\\":
                escape = i
            elif character == '"':
                string = False
                if not key:
                    whole, closed = i + 1, "".join(reversed(closers))
        elif character == '"':
            string = True
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
            key = character == "{"
            whole, closed = i + 1, "".join(reversed(closers))
        elif character in "}]":
            if not closers:
                break
            closers.pop()
            key = False
            whole, closed = i + 1, "".join(reversed(closers))
        elif character == ",":
            whole, closed = i, "".join(reversed(closers))
            key = closers[-1:] == ["}"]
        elif character == ":":
            key = False
    rest = "".join(reversed(closers))
    ends: list[str] = []
    text = text.rstrip() if not string else text
    if string:
        # (An escape may be cut, too: \u12, or the first half of a pair of them.)
        cuts = [len(text)] if escape < 0 else [escape]
        cuts += [at for at in (text.rfind("\\u"), text.rfind("\\u", 0, max(0, text.rfind("\\u")))) if at >= 0]
        ends += [text[:at] + ('": null' if key else '"') + rest for at in cuts]
    # (After a value; after a key, with and without its colon; inside of a number or of a word.)
    return [*ends, *(text + middle + rest for middle in ("", ": null", "null")), text[:whole] + closed]
