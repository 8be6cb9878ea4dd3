"""What an answer may be, as data: made by the gateway, compiled in a helper (`compiling.py`).

    Structure(Json({"type": "object"}))                                  the answer is such an object
    Structure(content, thinking_ends="</think>")                         thoughts first, then the content
    Structure(Tagged([Tag("<tool_call>", Json(schema), "</tool_call>")], ["<tool_call>"]))
                                                                         free text, and from a trigger on
                                                                         a frame
    Structure(Repeat(Sequence([Text("[CALL]"), Json(schema)])))          one frame or more, and nothing else

Names of special tokens within texts (`Text`, a tag's `begin` and `end`, triggers, `thinking_ends`) mean
these tokens.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Json(msgspec.Struct, tag="json", frozen=True):
    """A value that a JSON schema allows."""

    schema: Any
    """An object, or true."""
    most_spaces: int | None = None
    """Characters of white space, one after the other, between its parts."""


class Regex(msgspec.Struct, tag="regex", frozen=True):
    """A text that the expression matches whole."""

    pattern: str


class Choice(msgspec.Struct, tag="choice", frozen=True):
    """One of these texts."""

    texts: list[str]


class Grammar(msgspec.Struct, tag="grammar", frozen=True):
    """A context-free grammar: Lark's notation as llguidance reads it, or llama.cpp's GBNF."""

    source: str


class Lark(msgspec.Struct, tag="lark", frozen=True):
    """What a tool's grammar allows, which is Lark's notation: as it stands in a JSON string."""

    source: str
    end: str = ""
    """As it is, up to this tag, which belongs to it."""


class Text(msgspec.Struct, tag="text", frozen=True):
    """Exactly this."""

    text: str


class Token(msgspec.Struct, tag="token", frozen=True):
    """A special token, by its text or its id."""

    token: str | int


class Tokens(msgspec.Struct, tag="tokens", frozen=True):
    """Any tokens, special ones too, but these."""

    without: list[str | int] = []
    """Special tokens."""
    least: int = 0
    most: int | None = None


class AnyText(msgspec.Struct, tag="any", frozen=True):
    """Any text without special tokens, also none."""

    without: str = ""
    """This does not stand in it."""
    most: int | None = None
    """Tokens at most; then what follows it must come."""


class Sequence(msgspec.Struct, tag="sequence", frozen=True):
    """One after the other."""

    parts: list[Content]


class Either(msgspec.Struct, tag="either", frozen=True):
    """One of these."""

    options: list[Content]


class Repeat(msgspec.Struct, tag="repeat", frozen=True):
    """The same again and again, `least` times or more."""

    content: Content
    least: int = 1
    most: int | None = None
    separator: str = ""


class Tag(msgspec.Struct, frozen=True):
    """A frame with content."""

    begin: str
    content: Content
    end: str = ""


class Tagged(msgspec.Struct, tag="tagged", frozen=True):
    """Free text; what begins with a trigger is one of the tags, whole."""

    tags: list[Tag]
    triggers: list[str]
    """Each tag's `begin` starts with one."""
    at_least_one: bool = False
    stop_after_first: bool = False
    """Nothing follows the first tag."""


class Ending(msgspec.Struct, frozen=True):
    """What ends a text, and is read with it."""

    mark: Text | Token
    then: Content
    """What follows."""


class Until(msgspec.Struct, tag="until", frozen=True):
    """Any text without special tokens, to the first place where one of the marks stands."""

    endings: list[Ending]
    may_end: bool = False
    """Or to the end of the answer."""
    without: list[str] = []
    """These do not stand in it."""
    most_characters: int | None = None
    most_tokens: int | None = None
    """Then a mark must come."""


Content = (
    Json
    | Regex
    | Choice
    | Grammar
    | Lark
    | Text
    | Token
    | Tokens
    | AnyText
    | Sequence
    | Either
    | Repeat
    | Tagged
    | Until
)


class Structure(msgspec.Struct, frozen=True):
    """All of an answer."""

    content: Content
    thinking_ends: str | None = None
    """The answer begins with thoughts, any text, which this ends; white space may stand before the
    content."""


_LONGEST_MESSAGE = 400


class GrammarError(ValueError):
    """What is described cannot be enforced, or is not well formed.  One line, for people; it does not
    name the field of the request."""

    def __init__(self, message: str) -> None:
        if len(message) > _LONGEST_MESSAGE:  # where it is stands at the beginning, what is wrong at the end
            message = f"{message[: _LONGEST_MESSAGE // 2]} … {message[-_LONGEST_MESSAGE // 2 :]}"
        super().__init__(message)
