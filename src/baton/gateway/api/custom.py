"""Tools that take a text in place of arguments: `custom` ones, maybe with a grammar for the text.

The model sees a function with one parameter, `input`, and its call has the arguments `{"input": …}`; clients
see the text alone.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from baton.gateway.errors import BadRequest

INPUT = "input"
"""The parameter's name."""
_MAX_DEFINITION = 64 << 10
"""Characters of a grammar."""
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_BEGUN = re.compile(r'(?:\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:u(?:t(?:"\s*(?::\s*)?)?)?)?)?)?)?)?)?)?\Z')
"""A text that may become a head."""


class CustomTool(NamedTuple):
    name: str
    description: str | None
    syntax: str
    """`lark`, `regex`; "": any text."""
    definition: str

    @property
    def grammar(self) -> str:
        """In Lark's notation; "": any text."""
        if self.syntax != "regex":
            return self.definition
        return f"start: /{_delimited(self.definition)}/"


def read_custom(tool: object, where: str) -> CustomTool:
    """Of chat's form: `name`, `description`, `format`.  Raises `BadRequest`."""
    if not isinstance(tool, Mapping):
        raise _wrong(where, "give an object with at least a name")
    name, description = tool.get("name"), tool.get("description")
    if not isinstance(name, str) or not name:
        raise _wrong(f"{where}.name", "it is missing; give the tool a name")
    if not isinstance(description, str | None):
        raise _wrong(f"{where}.description", "must be a text")
    match tool.get("format"):
        case None | {"type": "text"}:
            return CustomTool(name, description, "", "")
        case {"type": "grammar", **rest}:
            grammar = rest.get("grammar", rest)  # (beside `type` in the Responses API)
            syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
            definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
            if syntax not in ("lark", "regex"):
                raise _wrong(f"{where}.format.syntax", f"{str(syntax)[:50]!r} must be 'lark' or 'regex'")
            if not isinstance(definition, str) or not definition.strip():
                raise _wrong(f"{where}.format.definition", "it is missing; give the grammar")
            if len(definition) > _MAX_DEFINITION:
                raise _wrong(
                    f"{where}.format.definition", f"at most {_MAX_DEFINITION} characters are possible"
                )
            return CustomTool(name, description, syntax, definition)
    raise _wrong(f"{where}.format", "must be {'type': 'text'} or {'type': 'grammar', …}")


def as_function(tool: CustomTool) -> dict[str, Any]:
    """What the model sees of it."""
    said = "The text that the tool gets, as it is."
    if tool.definition:
        said = f"A text that this {tool.syntax} grammar allows:\n{tool.definition}"
    function: dict[str, Any] = {
        "name": tool.name,
        "parameters": {
            "type": "object",
            "properties": {INPUT: {"type": "string", "description": said}},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }
    if tool.description is not None:
        function["description"] = tool.description
    if tool.definition:
        function["strict"] = True
    return function


def arguments_of(text: str) -> str:
    """Of a call with this text, as JSON."""
    return '{"input": ' + msgspec.json.encode(text).decode() + "}"


def input_of(arguments: str) -> str:
    """The text of a call.  Arguments that are written otherwise are given as they are."""
    return InputReader().push(arguments)


class InputReader:
    """Reads the arguments of one call, piece by piece, and gives its text as it comes."""

    __slots__ = ("_begun", "_done", "_held", "_raw")

    def __init__(self) -> None:
        self._held = ""
        """What it cannot be said of yet what it means."""
        self._begun = self._done = self._raw = False

    def push(self, piece: str) -> str:
        """More of the text."""
        if self._done:
            return ""
        if self._raw:
            return piece
        self._held += piece
        if not self._begun:
            head = _HEAD.match(self._held)
            if head is None:
                if _HEAD_BEGUN.match(self._held):
                    return ""
                self._raw, text, self._held = True, self._held, ""
                return text
            self._begun, self._held = True, self._held[head.end() :]
        return "".join(self._characters())

    @property
    def is_open(self) -> bool:
        """Its arguments have not ended as they should."""
        return not self._done and not self._raw

    def _characters(self) -> Iterator[str]:
        at, held = 0, self._held
        while at < len(held):
            end = next((i for i in range(at, len(held)) if held[i] in '"\\'), len(held))
            if end > at:
                yield held[at:end]
                at = end
                continue
            if held[at] == '"':
                self._done, at = True, len(held)
                break
            size, character = _escape(held, at)
            if not size:
                break
            yield character
            at += size
        self._held = held[at:]


def _escape(text: str, at: int) -> tuple[int, str]:
    """(characters of the escape that begins there, what it means); 0: it is not there yet."""
    kind = text[at + 1 : at + 2]
    if kind != "u":
        return (2 if kind else 0), _SIMPLE.get(kind, kind)
    code = _code(text[at + 2 : at + 6])
    if len(text) < at + 6 or code is None:
        return (0, "") if len(text) < at + 6 else (2, "u")
    if not 0xD800 <= code < 0xE000:
        return 6, chr(code)
    second = text[at + 6 : at + 12]
    if code < 0xDC00 and len(second) < 6 and "\\u"[: len(second)] == second[:2]:
        return 0, ""
    low = _code(second[2:]) if second.startswith("\\u") else None
    if code < 0xDC00 and low is not None and 0xDC00 <= low < 0xE000:
        return 12, chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return 6, "\ufffd"


def _code(digits: str) -> int | None:
    try:
        return int(digits, 16)
    except ValueError:
        return None


def _delimited(pattern: str) -> str:
    """With its slashes and line breaks as they may stand between two slashes."""
    made = re.sub(r"\\.|/", lambda one: r"\/" if one[0] == "/" else one[0], pattern, flags=re.DOTALL)
    return made.replace("\\\n", "\\n").replace("\n", "\\n")


def _wrong(where: str, what: str) -> BadRequest:
    return BadRequest(f"{where}: {what}", param="tools")
