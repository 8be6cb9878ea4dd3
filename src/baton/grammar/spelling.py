"""Bytes as the tokens that a model is likely to choose for them.

A text has many spellings in tokens, and a model prefers the one that its tokenizer makes.  A worker has no
tokenizer, so the longest token first is a guess; what a model has chosen for the same bytes before is a
better one.  It is remembered of bytes that a grammar forced: nothing of a request's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLTokenizer

_KEPT = 2048
_LONGEST = 64
"""Bytes that are remembered."""


class Spelling:
    """Spells bytes; learns from those who follow."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def spell(self, text: bytes) -> list[int]:
        """Tokens whose bytes are the text, or begin it."""
        known = self._known.get(text)
        if known is not None:
            self._known.move_to_end(text)
            return list(known)
        # (Cut where a character is cut: what stands behind it is not known yet.)
        found: list[int] = self._tokenizer.greedy_tokenize(text.decode("utf-8", "ignore"))
        return found

    def bytes_of(self, token: int) -> bytes:
        found: bytes = self._tokenizer.decode_bytes([token])
        return found

    def learn(self, text: bytes, tokens: Sequence[int]) -> None:
        """These tokens, together the beginning of the text, were chosen for it."""
        for first, token in enumerate(tokens):
            if len(text) <= _LONGEST:
                self._known[text] = tuple(tokens[first:])
                self._known.move_to_end(text)
            text = text[len(self.bytes_of(token)) :]
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
