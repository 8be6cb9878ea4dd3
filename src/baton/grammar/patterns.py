"""Patterns of schemas: from ECMA 262's notation to that of Rust's `regex`, which llguidance reads.

The two differ where this says; what means something else there, and is not rewritten, is refused.  Most of it
llguidance refuses itself: look-around, references to groups, boundaries of words.
"""

from __future__ import annotations

from baton.grammar.description import GrammarError

_SPACE = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_ESCAPES = {"s": f"[{_SPACE}]", "S": f"[^{_SPACE}]", "/": "/"}
_DOT = r"[^\n\r\u2028\u2029]"
_REFUSED = "bB123456789AzQEZGXhHRNLKUl<>"
"""After a backslash: what llguidance cannot do, and what is another thing in Rust than in ECMA 262."""


def translated(pattern: str, where: str) -> str:
    """Raises `GrammarError`."""
    found: list[str] = []
    index, in_class = 0, False
    while index < len(pattern):
        character = pattern[index]
        piece = character
        if character == "\\":
            if index + 1 == len(pattern):
                raise GrammarError(f"{where}: ends with a backslash")
            escaped = pattern[index + 1]
            piece = character + escaped
            if escaped == "b" and in_class:
                found.append(r"\x08")
                index += 2
                continue
            if escaped in _ESCAPES:
                found.append(_ESCAPES[escaped])
                index += 2
                continue
            if escaped in _REFUSED:
                raise GrammarError(f"{where}: \\{escaped} is not supported in a pattern")
        elif in_class:
            if character == "]":
                in_class = False
            elif character == "[":
                piece = r"\["
            elif pattern[index : index + 2] in ("&&", "~~") or (
                pattern[index : index + 2] == "--" and pattern[index + 2 : index + 3] != "]"
            ):
                raise GrammarError(
                    f"{where}: {pattern[index : index + 2]} in a class is not supported; escape it"
                )
        elif character == "[":
            in_class = True
            rest = pattern[index + 1 :]
            if rest.startswith(("]", "^]")):
                raise GrammarError(f"{where}: an empty class is not supported")
        elif character == ".":
            piece = _DOT
        elif character == "(" and pattern.startswith("(?", index):
            if not pattern.startswith(("(?:", "(?<"), index):
                raise GrammarError(f"{where}: {pattern[index : index + 3]} is not supported in a pattern")
        elif character in "^$" and not _at_edge(pattern, index):
            raise GrammarError(f"{where}: {character} inside of a pattern is not supported; put it at an end")
        found.append(piece)
        index += len(piece) if piece[0] == "\\" and character == "\\" else 1
    result = "".join(found)
    if _alternates(pattern) and (pattern.startswith("^") or pattern.endswith("$")):
        raise GrammarError(f"{where}: write ^(…|…)$: an anchor beside alternatives is not supported")
    return result


def _at_edge(pattern: str, index: int) -> bool:
    return index == 0 if pattern[index] == "^" else index == len(pattern) - 1


def _alternates(pattern: str) -> bool:
    """Whether there is an alternative outside of all groups and classes."""
    depth, in_class, index = 0, False, 0
    while index < len(pattern):
        match pattern[index]:
            case "\\":
                index += 1
            case "[" if not in_class:
                in_class = True
            case "]":
                in_class = False
            case "(" if not in_class:
                depth += 1
            case ")" if not in_class:
                depth -= 1
            case "|" if not in_class and not depth:
                return True
        index += 1
    return False
