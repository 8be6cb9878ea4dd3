"""What a model's tokens are, as matchers need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from llguidance import LLTokenizer, TokenizerWrapper


class Vocabulary(msgspec.Struct, array_like=True, frozen=True):
    """As the gateway's tokenizer knows it; written for the workers, which have no tokenizer."""

    tokens: list[bytes]
    """By id: the bytes that it stands for."""
    special: dict[str, int] = {}
    """Text → id: never part of a text."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Vocabulary:
        """Raises `msgspec.MsgspecError`."""
        return _DECODER.decode(data)


_DECODER = msgspec.msgpack.Decoder(Vocabulary)


def matching_tokenizer(tokens: Sequence[bytes], special: Mapping[str, int], vocab_size: int) -> LLTokenizer:
    """What `LLMatcher` takes, of a model of so many logits.

    One more token, `vocab_size`, stands for the end: which tokens end an answer is a request's to say, so
    a mask's last bit says that the answer may end, and `masks.py` does the rest.
    """
    wrapped = TokenizerWrapper(_Tokens(tokens, special, vocab_size))
    return LLTokenizer(wrapped, n_vocab=vocab_size + 1, eos_token=vocab_size)


class _Tokens:
    """As `TokenizerWrapper` asks for it."""

    def __init__(self, tokens: Sequence[bytes], special: Mapping[str, int], vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        names = {number: text.encode() for text, number in special.items() if number < vocab_size}
        known = list(tokens[:vocab_size])
        known += [b""] * (vocab_size - len(known))
        for number, name in names.items():
            known[number] = name
        self.tokens = [*known, b"<end of the answer>"]
        self.special_token_ids = [*sorted(names), vocab_size]

    def __call__(self, text: str | bytes) -> list[int]:
        """Only for tokens that a grammar forces: ours forces none (`no_forcing`)."""
        return []
