"""Prompts that are cut to a number of tokens (`truncate_prompt_tokens`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

from baton.gateway.errors import BadRequest
from baton.gateway.reading.prompts import Prompt
from baton.gateway.text.tokenizer import Tokenizer

Side = Literal["left", "right"]


def truncate(prompt: Prompt, most: int, side: Side, tokenizer: Tokenizer, *, special: bool) -> Sequence[int]:
    """At most so many token ids.  `side`: the end that is cut off.  What a tokenizer puts around a text
    (`special`) stays, as with the tokenizers of transformers: models that pool their last token were trained
    with that one."""
    ids = prompt.ids
    if len(ids) <= most:
        return ids
    before: Sequence[int] = ()
    after: Sequence[int] = ()
    if special and prompt.text is not None:
        before, after = around(tokenizer)
        if len(before) + len(after) >= most:
            before, after = (), ()
    text = ids[len(before) : len(ids) - len(after)]
    room = most - len(before) - len(after)
    return [*before, *(text[:room] if side == "right" else text[len(text) - room :]), *after]


def truncated(
    prompts: Sequence[Prompt],
    most: int | None,
    side: str | None,
    tokenizer: Tokenizer,
    *,
    limit: int,
    answer: int,
    special: bool,
) -> Sequence[Prompt]:
    """Those of a request that generates: each of `most` tokens at most; None: as they are; -1: as many as the
    context of `limit` has room for before an answer of `answer` tokens.  Raises `BadRequest`."""
    if side not in (None, "left", "right"):
        raise BadRequest(f"truncation_side: {side[:20]!r} must be 'left' or 'right'", param="truncation_side")
    if most is None:
        return prompts
    if most == 0:
        raise BadRequest(
            "truncate_prompt_tokens: give at least 1, or -1 for what the context has room for",
            param="truncate_prompt_tokens",
        )
    if most > limit:
        raise BadRequest(
            f"truncate_prompt_tokens: {most} is more than the model's context, {limit}",
            param="truncate_prompt_tokens",
        )
    room = max(1, limit - max(answer, 1)) if most == -1 else most
    end: Side = "right" if side == "right" else "left"
    return [
        prompt
        if len(prompt.ids) <= room
        else Prompt(array("i", truncate(prompt, room, end, tokenizer, special=special)), None)
        for prompt in prompts
    ]


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for first in range(len(whole) - len(plain) + 1):
        if whole[first : first + len(plain)] == plain:
            return whole[:first], whole[first + len(plain) :]
    return [], []
