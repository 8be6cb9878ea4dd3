"""JSON that a model writes, passed on while it comes.

What is given is a beginning of valid JSON at any time.  Slips of models that have one meaning are put right:
line breaks and other control characters inside of strings, backslashes that escape nothing, a comma after the
last item, Python's True, False and None.  Half of a surrogate pair is no character, and no client could send
it back: U+FFFD stands in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from baton.gateway.parsing.reading import Give, Reading, Step

MAX_DEPTH = 64
"""Of objects and lists in each other."""
_MAX_NUMBER = 1024

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMERIC = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[A-Za-z]*")
_LOW_HALF = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F](?:[0-9a-fA-F]{1,2})?)?)?)?)?")
"""An escape of a surrogate pair's second half, or the beginning of one."""
_ESCAPE = len("\\u0000")
_NO_CHARACTER = "\\ufffd"
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}


def json_value(reading: Reading, give: Give, depth: int = 0) -> Step[bool]:
    """Reads one value and gives its text.  False: what stands at the place now is not JSON, or nothing is."""
    first = yield from reading.peek()
    if first == "{":
        return (yield from json_object(reading, give, depth=depth))
    if first == "[":
        reading.at += 1
        give("[")
        return depth < MAX_DEPTH and (yield from _items(reading, give, "]", depth + 1))
    if first == '"':
        reading.at += 1
        give('"')
        return (yield from _string(reading, give))
    if first and first in "-0123456789":
        text = yield from reading.word(_NUMERIC)
        valid = len(text) <= _MAX_NUMBER and _NUMBER.fullmatch(text) is not None
        word = text if valid else None
    else:
        text = yield from reading.word(_LETTERS)
        word = _WORDS.get(text)
    if word is None:
        reading.unread(text)
        return False
    give(word)
    return True


def json_object(
    reading: Reading, give: Give, begin: Callable[[], bool] | None = None, depth: int = 0
) -> Step[bool]:
    """`json_value` of an object.  `begin` is called, before anything is given, when it surely is one: with
    its first key, or its end; if it says no, that counts as no object."""
    if not (yield from reading.literal("{")):
        return False
    blank = yield from reading.spaces()
    if begin is not None:
        following = yield from reading.peek()
        if not following or following not in '"}' or not begin():
            return False
    give("{" + blank)
    return depth < MAX_DEPTH and (yield from _items(reading, give, "}", depth + 1))


def _items(reading: Reading, give: Give, closing: str, depth: int) -> Step[bool]:
    """What follows the opening bracket of a list or an object, and its spaces."""
    give((yield from reading.spaces()))
    if (yield from reading.literal(closing)):
        give(closing)
        return True
    while True:
        if closing == "}":
            if not (yield from reading.literal('"')):
                return False
            give('"')
            if not (yield from _string(reading, give)):
                return False
            give((yield from reading.spaces()))
            if not (yield from reading.literal(":")):
                return False
            give(":")
            give((yield from reading.spaces()))
        if not (yield from json_value(reading, give, depth)):
            return False
        give((yield from reading.spaces()))
        if (yield from reading.literal(closing)):
            give(closing)
            return True
        if not (yield from reading.literal(",")):
            return False
        blank = yield from reading.spaces()
        if (yield from reading.literal(closing)):
            give(closing)
            return True
        give("," + blank)


def _string(reading: Reading, give: Give) -> Step[bool]:
    """What follows the opening quote."""
    while True:
        yield from reading.run(_PLAIN, give)
        character = yield from reading.peek()
        if not character:
            return False
        reading.at += 1
        if character == '"':
            give('"')
            return True
        give((yield from _escape(reading)) if character == "\\" else escaped(character))


def _escape(reading: Reading) -> Step[str]:
    """What follows a backslash; with it."""
    character = yield from reading.peek()
    if character and character in '"\\/bfnrt':
        reading.at += 1
        return "\\" + character
    if character != "u":
        return "\\\\" if character else ""
    reading.at += 1
    digits = ""
    while len(digits) < 4:
        digit = yield from reading.peek()
        if digit not in _HEX:
            if not digit:
                return ""
            reading.unread("u" + digits)
            return "\\\\"
        reading.at += 1
        digits += digit
    code = int(digits, 16)
    if 0xD800 <= code < 0xDC00:
        low = yield from reading.ahead(_low_half(reading))
        if len(low) == _ESCAPE:
            reading.at += _ESCAPE
            return "\\u" + digits + low
        return "" if reading.ended and reading.rest == low else _NO_CHARACTER
    return _NO_CHARACTER if 0xDC00 <= code < 0xE000 else "\\u" + digits


def _low_half(reading: Reading) -> Step[str]:
    """What follows of an escape of a surrogate pair's second half."""
    text = ""
    while len(text) < _ESCAPE:
        character = yield from reading.peek()
        if not character or _LOW_HALF.fullmatch(text + character) is None:
            break
        reading.at += 1
        text += character
    return text


def escaped(text: str) -> str:
    """As it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def text_value(reading: Reading) -> Step[str | None]:
    """Reads a string and returns what it says; None if there is none."""
    if not (yield from reading.literal('"')):
        return None
    pieces = ['"']
    if not (yield from _string(reading, pieces.append)):
        return None
    try:
        text: str = json.loads("".join(pieces))
        text.encode()  # (half of a surrogate pair is no character)
    except ValueError:
        return None
    return text


def object_in(text: str) -> str | None:
    """The JSON object that a text is as a whole, None if it is none."""
    reading = Reading(text.strip(), ended=True)
    pieces: list[str] = []
    step = json_object(reading, pieces.append)
    try:
        next(step)
    except StopIteration as end:
        complete: bool = end.value
        return "".join(pieces) if complete and reading.at == len(reading.buffer) else None
    raise AssertionError("a text that has ended was waited for")
