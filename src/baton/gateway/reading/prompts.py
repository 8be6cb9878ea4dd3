"""What a request's body held as prompts becomes token ids.  No HTTP."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from baton.gateway.reading.reader import Found
from baton.gateway.text.tokenizer import Tokenizer
from baton.protocol.codec import unpack_int32


@dataclass(slots=True)
class Prompt:
    ids: Sequence[int]
    text: str | None
    """As the client gave it; None where it gave ids."""


def encode(found: Found, tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[Prompt]:
    """The prompts of a request.  Long texts were encoded where they were read.  Raises `BadRequest`."""
    found.check()
    if not found.ids:
        return [
            Prompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)
            for text in found.texts
        ]
    texts: Iterable[str | None] = found.texts or repeat(None, len(found.ids))
    return [Prompt(unpack_int32(ids), text) for ids, text in zip(found.ids, texts, strict=True)]


def is_packed(prompt: Sequence[int]) -> bool:
    """Its token ids were checked when the body was read."""
    return isinstance(prompt, array)
