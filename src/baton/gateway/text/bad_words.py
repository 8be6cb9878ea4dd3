"""Words that must not come, as sequences of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.text.tokenizer import Tokenizer


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each as the tokenizer writes it at the beginning of a text and after a space; no sequence twice."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return [list(ids) for ids in found]
