"""Texts to token ids and back, the same in the gateway's process and in its helpers.

An encoding takes about 150 bytes a token while it is made; so a text that is long for its limit is measured
piece by piece first, and given up as soon as it is too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

LONG_TEXT = 4096
"""Characters from which texts are encoded in a helper (about 2 ms of work)."""
MANY_TOKENS = 4096
"""Ids from which they are decoded there."""
_PIECE = 1 << 16
"""Characters of a piece when a long text is measured."""
_LIKELY = 4
"""Characters a token; a text that has more of them for its limit is measured before it is encoded."""


class TextTooLong(ValueError):
    """A text of so many characters, and certainly of more tokens than the limit."""

    def __init__(self, length: int) -> None:
        super().__init__(f"{length} characters")
        self.length = length


class Backend(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def encode_batch_fast(self, input: Sequence[str], *, add_special_tokens: bool) -> list[Any]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def to_str(self) -> str: ...
    def get_vocab_size(self) -> int: ...


class Source(msgspec.Struct, frozen=True):
    """An `Encoding` on its way to another process."""

    tokenizer: str
    """As in a tokenizer.json."""
    prefix: list[int] = []


class NotText(ValueError):
    """A string of Python's that is no text."""

    def __init__(self) -> None:
        super().__init__(
            "a text has half of a surrogate pair, which is no character "
            "(\\ud800 to \\udfff without its other half); leave it out"
        )


class Encoding:
    """Safe from any thread."""

    def __init__(self, backend: Backend, prefix: Sequence[int] = ()) -> None:
        """`prefix`: ids that come before an encoded text with special tokens and that `backend` does not
        add."""
        self._backend = backend
        self._prefix = list(prefix)

    @classmethod
    def of(cls, source: Source) -> Encoding:
        import tokenizers

        return cls(tokenizers.Tokenizer.from_str(source.tokenizer), source.prefix)

    def source(self) -> Source:
        return Source(self._backend.to_str(), self._prefix)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens (a BOS, say) as the model's tokenizer adds them.  Raises
        `NotText`."""
        try:  # (The one that computes no offsets.)
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:  # (all that it says of such a text)
            raise NotText from None
        ids: list[int] = encoding.ids
        return self._prefix + ids if add_special_tokens and self._prefix else ids

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, limit: int
    ) -> list[list[int]]:
        """Raises `TextTooLong` for a text that is much longer than `limit` tokens."""
        for text in texts:
            if self.is_longer(text, limit):
                raise TextTooLong(len(text))
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def is_longer(self, text: str, limit: int) -> bool:
        """Whether the text is certainly of more than `limit` tokens; False may also mean that it is.

        Needs memory for a piece of the text only.  A piece that begins inside of a word may have a few tokens
        more than it has in the whole text, so the answer is certain only well above the limit.
        """
        if len(text) <= _LIKELY * limit:
            return False
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self.encode(text[start : start + _PIECE], add_special_tokens=False))
            if count > 2 * limit + _PIECE // 16:
                return True
        return False

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
