"""Prompts that cannot be served, by their length and their ids.  All raise `BadRequest`."""

from __future__ import annotations

from collections.abc import Sequence

from baton.gateway.errors import BadRequest, ContextTooLong


def check_prompt(
    prompt: Sequence[int],
    max_model_len: int,
    vocab_size: int,
    *,
    field: str = "prompt",
    answers: bool = True,
) -> None:
    """Raises `BadRequest` for a prompt that is empty, too long, or of ids that the model does not know.
    `answers`: an answer follows it, which needs room."""
    check_not_empty(prompt, field)
    if not answers:
        check_length(prompt, max_model_len, field)
    elif len(prompt) >= max_model_len:
        raise ContextTooLong(
            max_model_len,
            f"your prompt resulted in {len(prompt)} tokens, which leaves no room for an answer",
            f"Please reduce the length of the prompt, to at most {max_model_len - 1} tokens",
            param="prompt",
        )
    check_ids(field, prompt, vocab_size)


def check_length(prompt: Sequence[int], max_model_len: int, field: str) -> None:
    """Of a prompt without an answer.  Raises `BadRequest`."""
    if len(prompt) > max_model_len:
        raise ContextTooLong(
            max_model_len,
            f"your {field} resulted in {len(prompt)} tokens",
            f"Please reduce the length of the {field}, or give truncate_prompt_tokens",
            param=field,
        )


def check_not_empty(prompt: Sequence[int], field: str = "prompt") -> None:
    if not prompt:
        raise BadRequest(f"{field}: it is empty; give at least one token", param=field)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    size = vocab_size or 1 << 31
    if ids and (min(ids) < 0 or max(ids) >= size):
        raise BadRequest(f"{field}: token ids must be from 0 to {size - 1}", param=field)


def text_too_long(field: str, length: int, max_model_len: int) -> BadRequest:
    return ContextTooLong(
        max_model_len,
        f"your {field} of {length} characters cannot fit",
        f"Please reduce the length of the {field}",
        param=field,
    )
