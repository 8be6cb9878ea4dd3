"""Prompts that are cut to a number of tokens (`truncate_prompt_tokens`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for first in range(len(whole) - len(plain) + 1):
        if whole[first : first + len(plain)] == plain:
            return whole[:first], whole[first + len(plain) :]
    return [], []
