"""What llguidance says of one terminal: what it may begin with, and how it may go on."""

from __future__ import annotations

import re
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer

from baton.grammar.description import GrammarError
from baton.grammar.json_text import WRITTEN
from baton.grammar.limits import parser_limits
from baton.grammar.vocabulary import matching_tokenizer

_TRIED = 40
_STATES = 60


def delimited(pattern: str) -> str:
    """With its slashes and line breaks as they may stand between two slashes."""
    made = re.sub(r"\\.|/", lambda one: r"\/" if one[0] == "/" else one[0], pattern, flags=re.DOTALL)
    return made.replace("\\\n", "\\n").replace("\n", "\\n")


@lru_cache(maxsize=1024)
def members(atom: str) -> str:
    """Of `WRITTEN`.  Raises `GrammarError`."""
    mask = _first_bytes(f"/{delimited(atom)}/")
    return "".join(one for one in WRITTEN if mask >> ord(one) & 1)


def begins_with_backslash(leaf: str) -> bool:
    return bool(_first_bytes(leaf) >> ord("\\") & 1)


@lru_cache(maxsize=1024)
def _first_bytes(terminal: str) -> int:
    """A bit for each byte that may be the first of it.  Raises `GrammarError`."""
    return int.from_bytes(_matcher(terminal).compute_bitmask(), "little")


def _matcher(terminal: str) -> LLMatcher:
    grammar = f'%llguidance {{"no_forcing": true}}\nstart: {terminal}\n'
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(f"{terminal[:60]} is not supported")
    return matcher


@lru_cache(maxsize=256)
def goes_on_with_backslash(leaf: str) -> bool:
    """Where it could end.  Its states are walked through, as far as a few bytes tell them apart; True, too,
    for what has too many."""
    tried = sorted({*leaf.encode(), *b'\\"na0 ;'})[:_TRIED]
    first = _matcher(leaf)
    waiting, known = [first], {_looks(first, tried)}
    while waiting:
        matcher = waiting.pop()
        if matcher.is_accepting() and _read(matcher, ord("\\")) is not None:
            return True
        for byte in tried:
            following = _read(matcher, byte)
            if following is None or (looks := _looks(following, tried)) in known:
                continue
            if len(known) == _STATES:
                return True
            known.add(looks)
            waiting.append(following)
    return False


def _read(matcher: LLMatcher, byte: int) -> LLMatcher | None:
    copy = matcher.deep_copy()
    return copy if copy.try_consume_tokens([byte]) else None


def _looks(matcher: LLMatcher, tried: list[int]) -> tuple[bytes, ...]:
    """What tells a state: what may follow it, and what may follow that."""
    following = [None if (one := _read(matcher, byte)) is None else one for byte in tried]
    return (
        _ends(matcher),
        *(b"" if one is None else _ends(one) for one in following),
    )


def _ends(matcher: LLMatcher) -> bytes:
    return bytes([matcher.is_accepting()]) + bytes(matcher.compute_bitmask())


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    return matching_tokenizer([bytes([byte]) for byte in range(256)], {}, 256)
