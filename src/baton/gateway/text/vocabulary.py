"""What a tokenizer's tokens are, for those who have none: the workers' matchers (`grammar/`)."""

from __future__ import annotations

from baton.gateway.text.tokenizer import Tokenizer
from baton.grammar.vocabulary import Vocabulary


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Of 100,000 tokens: 0.1 s."""
    return Vocabulary(
        [tokenizer.token_bytes(number) for number in range(tokenizer.vocab_size)], tokenizer.special_names
    )
