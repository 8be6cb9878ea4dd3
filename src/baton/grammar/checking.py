"""Tries a description before a request is submitted, as a worker would.

It is compiled with the same limits, for a vocabulary of single bytes: what a grammar allows does not
depend on the tokens, and what it costs hardly does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from llguidance import LLMatcher, LLTokenizer

from baton.grammar.compiling import compile_structure
from baton.grammar.description import GrammarError, Structure
from baton.grammar.limits import MAX_CHECK_S, parser_limits
from baton.grammar.vocabulary import matching_tokenizer

_STEPS = 16
"""So many tokens are tried: some grammars are small, and too large only once something has been read."""
_NOISE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?| 1 \| .*$")
_IN_OUR_WORDS = {
    "circular references with sibling keys": "$ref: the keyword $ref cannot be enforced beside other "
    "keywords where it leads to itself; leave them out: ",
    "Unable to determine if regex is empty": "pattern: the keyword pattern cannot be enforced with all that "
    "is said of one text; give a simpler one, or leave out a format or length beside it",
}
"""What llguidance begins with → what to say before it, or instead of it where that ends the sentence."""


class Checker:
    """For one vocabulary."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = dict(special_tokens)
        self._tokenizer: LLTokenizer | None = None
        self._black = 0
        """A mask of the tokens that are no white space."""

    def check(self, structure: Structure) -> str:
        """The grammar, which a worker can follow.  Raises `GrammarError`."""
        began = time.thread_time()
        try:
            grammar = compile_structure(structure, self._special)
        except RecursionError:
            raise GrammarError("is nested too deeply; give a simpler one") from None
        tokenizer = self._bytes()
        limits = parser_limits(grammar)
        _, problems = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits)
        if problems:
            raise GrammarError(_one_line(problems[0]))
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        for step in range(_STEPS):
            mask = matcher.compute_bitmask()
            message = matcher.get_error()
            if message and not message.startswith("NoExtension"):
                raise GrammarError(_one_line(message))
            if not step and (message or not any(mask)):
                raise GrammarError("no text can satisfy it")
            if time.thread_time() - began > MAX_CHECK_S:
                raise GrammarError(f"takes more than {MAX_CHECK_S:g} s to compile; give a simpler one")
            if message:
                break
            if not matcher.consume_token(self._next(mask)):  # (one that it allows)
                raise GrammarError(_one_line(matcher.get_error()))
        return grammar

    def _next(self, mask: bytes) -> int:
        """The lowest byte of a mask that is no white space, where there is one: that leads nowhere new."""
        number = int.from_bytes(mask, "little")
        number = number & self._black or number
        return (number & -number).bit_length() - 1

    def _bytes(self) -> LLTokenizer:
        """Single bytes beside the special tokens."""
        if self._tokenizer is None:
            taken = set(self._special.values())
            size = 256 + len(taken) + max(taken, default=0) + 1
            tokens = [b""] * size
            free = (number for number in range(size) if number not in taken)
            for byte, number in zip(range(256), free, strict=False):
                tokens[number] = bytes([byte])
                self._black |= (byte > ord(" ")) << number
            self._tokenizer = matching_tokenizer(tokens, self._special, size)
        return self._tokenizer


def _one_line(message: str) -> str:
    """What llguidance says, without what it says of its state and of the grammar that was made."""
    line = _NOISE.sub("", " ".join(message.split("<state>")[0].split()))
    for begin, ours in _IN_OUR_WORDS.items():
        if line.startswith(begin):
            return ours + line.rpartition("json-schema:///")[2] if ours.endswith(": ") else ours
    return line
