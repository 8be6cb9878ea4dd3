"""Literals of Python, passed on as JSON while they come."""

from __future__ import annotations

import json
import re

from baton.gateway.parsing.json_text import MAX_DEPTH, escaped
from baton.gateway.parsing.reading import Give, Reading, Step

_WORD = re.compile(r"[A-Za-z_]*")
_NUMERIC = re.compile(r"[-+.0-9eE_]*")
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_PLAIN = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_NUMBER = 64


def python_value(reading: Reading, give: Give, depth: int = 0) -> Step[bool]:
    """Reads a literal and gives it as JSON."""
    first = yield from reading.peek()
    if not first or depth > MAX_DEPTH:
        return False
    if first in "\"'":
        reading.at += 1
        give('"')
        return (yield from _string(reading, give, first))
    if first in "[({":
        reading.at += 1
        closing = {"[": "]", "(": ")", "{": "}"}[first]
        return (yield from _items(reading, give, closing, depth + 1))
    if first in "-+.0123456789":
        text = yield from reading.word(_NUMERIC)
        valid = len(text) <= _MAX_NUMBER and _NUMBER.fullmatch(text) is not None
        if valid:
            give(_number(text))
        else:
            reading.unread(text)
        return valid
    text = yield from reading.word(_WORD)
    word = _WORDS.get(text)
    if word is None:
        reading.unread(text)
        return False
    give(word)
    return True


def _number(text: str) -> str:
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return str(int(text))
    value = float(text)
    return json.dumps(value) if abs(value) != float("inf") else "null"


def _items(reading: Reading, give: Give, closing: str, depth: int) -> Step[bool]:
    """What follows the opening bracket of a list, a tuple or a dict."""
    give("{" if closing == "}" else "[")
    begun = False
    while True:
        yield from reading.spaces()
        if (yield from reading.literal(closing)):
            give("}" if closing == "}" else "]")
            return True
        if begun:
            give(", ")
        begun = True
        if closing == "}":
            quote = yield from reading.peek()
            if not quote or quote not in "\"'":
                return False
            reading.at += 1
            give('"')
            if not (yield from _string(reading, give, quote)):
                return False
            yield from reading.spaces()
            if not (yield from reading.literal(":")):
                return False
            give(": ")
            yield from reading.spaces()
        if not (yield from python_value(reading, give, depth)):
            return False
        yield from reading.spaces()
        if not (yield from reading.literal(",")) and (yield from reading.peek()) != closing:
            return False


def _string(reading: Reading, give: Give, quote: str) -> Step[bool]:
    """What follows the opening quote."""
    while True:
        yield from reading.run(_PLAIN[quote], lambda text: give(escaped(text)))
        character = yield from reading.peek()
        if not character:
            return False
        reading.at += 1
        if character == quote:
            give('"')
            return True
        if character != "\\":
            give(escaped(character))
            continue
        character = yield from reading.peek()
        if not character:
            return False
        reading.at += 1
        if character in _DIGITS:
            give(escaped((yield from _code(reading, character))))
        elif character in _ESCAPES:
            give(escaped(_ESCAPES[character]))
        elif character in "\\'\"":
            give(escaped(character))
        elif character != "\n":
            give(escaped("\\" + character))


def _code(reading: Reading, kind: str) -> Step[str]:
    """The character that `\\x41` and the like stand for; itself, where it is none."""
    digits = ""
    while len(digits) < _DIGITS[kind]:
        digit = yield from reading.peek()
        if not digit or digit not in "0123456789abcdefABCDEF":
            break
        reading.at += 1
        digits += digit
    value = int(digits, 16) if len(digits) == _DIGITS[kind] else -1
    if 0 <= value < 0x110000 and not 0xD800 <= value < 0xE000:
        return chr(value)
    return "\\" + kind + digits
