"""What a request's body held as prompts becomes token ids.  No HTTP."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from baton.gateway.reading import Found, text_too_long
from baton.gateway.tokenizer import TextTooLong, Tokenizer
from baton.protocol.codec import unpack_int32


@dataclass(slots=True)
class Prompt:
    ids: Sequence[int]
    text: str | None
    """As the client gave it; None where it gave ids."""


async def encode(
    found: Found, tokenizer: Tokenizer, *, max_model_len: int, add_special_tokens: bool
) -> list[Prompt]:
    """The prompts of a request.  Raises `BadRequest`."""
    found.check()
    if found.ids:
        return [Prompt(unpack_int32(ids), None) for ids in found.ids]
    try:
        rows = await tokenizer.encode_async(
            found.texts, add_special_tokens=add_special_tokens, limit=max_model_len
        )
    except TextTooLong as error:
        raise text_too_long(found.field, error.length, max_model_len) from None
    return [Prompt(ids, text) for ids, text in zip(rows, found.texts, strict=True)]


def is_packed(prompt: Sequence[int]) -> bool:
    """It came as token ids, which were checked when the body was read."""
    return isinstance(prompt, array)
