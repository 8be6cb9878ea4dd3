"""Grammars of texts that stand inside of a JSON string, where some characters are written otherwise.

JSON writes each character by itself, and no writing begins another one.  So an expression of the written
text is the expression of the text with each character replaced, and nothing is lost or added.  Of the ways
to write a character there is one here: `\\n`, not `\\u000a`; nothing but what JSON does not allow as it is
(controls, quotes, backslashes) is written otherwise.

Expressions are Rust's, as llguidance reads them: which characters a class has is asked of llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from baton.grammar.description import GrammarError

WRITTEN = {chr(code): json.dumps(chr(code))[1:-1] for code in (*range(0x20), ord('"'), ord("\\"))}
"""Characters that stand otherwise in a JSON string, and how."""
_OTHERS = r'[\x00-\x1f"\\]'
_FLAGS = re.compile(r"\?(?:P?<[A-Za-z_][A-Za-z0-9_]*>|([isu]*)(?:-([isu]*))?([:)]))")
_LONG_ESCAPE = re.compile(
    r"\\(?:[pP](?:\{[^}]*\}|.)|x(?:\{[^}]*\}|..)|u(?:\{[^}]*\}|.{4})|U(?:\{[^}]*\}|.{8}))"
)
_CLASSES = "dDsSwW"
_SIMPLE = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_ANCHORS = "AzbB<>"

Members = Callable[[str], str]
"""Which of `WRITTEN` an expression of one character matches, as one text."""


def text_written(text: str) -> str:
    """As it stands between the quotes."""
    return "".join(WRITTEN.get(one, one) for one in text)


def expression_written(pattern: str, members: Members, *, ignores_case: bool, dot_all: bool) -> str:
    """The expression of what this one matches, as it stands in a JSON string.  Raises `GrammarError`."""
    return _Expression(pattern, members, ignores_case, dot_all).written()


class _Expression:
    """One expression, read from its beginning to its end."""

    def __init__(self, pattern: str, members: Members, ignores_case: bool, dot_all: bool) -> None:
        self._pattern = pattern
        self._members = members
        self._cases = ignores_case or "i" in "".join(re.findall(r"\(\?([a-z]*)[-:)]", pattern))
        self._dot_all = [dot_all]
        """In each group that is open."""
        self._at = 0

    def written(self) -> str:
        found: list[str] = []
        while self._at < len(self._pattern):
            found.append(self._next())
        return "".join(found)

    def _next(self) -> str:
        pattern, at = self._pattern, self._at
        character = pattern[at]
        match character:
            case "\\":
                return self._escape()
            case "[":
                return self._atom(self._taken(_class_end(pattern, at)))
            case ".":
                self._taken(at + 1)
                return self._atom(r"(?s:.)" if self._dot_all[-1] else r"[^\n]")
            case "(":
                return self._group()
            case ")":
                if len(self._dot_all) > 1:
                    self._dot_all.pop()
        self._taken(at + 1)
        return self._one(character) if character in WRITTEN else character

    def _taken(self, end: int) -> str:
        begin, self._at = self._at, end
        return self._pattern[begin:end]

    def _escape(self) -> str:
        pattern, at = self._pattern, self._at
        long = _LONG_ESCAPE.match(pattern, at)
        if long is not None:
            return self._atom(f"[{self._taken(long.end())}]")
        if at + 1 == len(pattern):
            raise GrammarError("an expression ends with a backslash")
        both = self._taken(at + 2)
        if both[1] in _SIMPLE:
            return self._one(_SIMPLE[both[1]])
        if both[1] in _CLASSES:
            return self._atom(f"[{both}]")
        if both[1] in _ANCHORS:
            return both
        if both[1].isalnum():
            raise GrammarError(f"{both} is not supported in an expression")
        return self._one(both[1]) if both[1] in WRITTEN else both

    def _group(self) -> str:
        pattern, at = self._pattern, self._at
        if not pattern.startswith("?", at + 1):
            self._dot_all.append(self._dot_all[-1])
            return self._taken(at + 1)
        flags = _FLAGS.match(pattern, at + 1)
        if flags is None:
            raise GrammarError(f"{pattern[at : at + 4]!r} is not supported in an expression")
        on, off, end = flags[1] or "", flags[2] or "", flags[3]
        dot_all = "s" in on or (self._dot_all[-1] and "s" not in off)
        if end == ")":
            self._dot_all[-1] = dot_all
        else:
            self._dot_all.append(dot_all)
        return self._taken(flags.end())

    def _atom(self, atom: str) -> str:
        """Of one character: `atom` is a class, or a group of one."""
        inside = self._members(atom)
        if not inside:
            return atom
        plain = rf"[[^{_OTHERS[1:-1]}]&&{atom}]" if atom[0] == "[" else rf"[^{_OTHERS[1:-1]}]"
        if all(one in inside for one in WRITTEN):
            others = r'\\(?:["\\bfnrt]|u00(?:0[0-7be-f]|1[0-9a-f]))'
        else:
            others = "|".join(re.escape(WRITTEN[one]) for one in inside)
        return f"(?:{plain}|{self._exact(others)})"

    def _one(self, character: str) -> str:
        self._members(re.escape(character) if character in '"\\' else f"[\\x{ord(character):02x}]")
        return f"(?:{self._exact(re.escape(WRITTEN[character]))})"

    def _exact(self, expression: str) -> str:
        """Writings have one case, whatever is said of letters."""
        return f"(?-i:{expression})" if self._cases else expression


def _class_end(pattern: str, at: int) -> int:
    """Behind the class that begins here.  Raises `GrammarError`."""
    depth = 0
    while at < len(pattern):
        match pattern[at]:
            case "\\":
                at += 1
            case "[":
                depth += 1
                at += pattern.startswith("^", at + 1)
                at += pattern.startswith("]", at + 1)  # (the first one is a character)
            case "]":
                depth -= 1
                if not depth:
                    return at + 1
        at += 1
    raise GrammarError("a class of an expression has no end")
