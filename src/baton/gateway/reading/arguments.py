"""Prompts and parameters as Python programs give them (`LLM`): arrays, tuples and mappings too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from baton.gateway.api.content import Notes
from baton.gateway.api.messages import ContentFormat, read_messages
from baton.gateway.errors import BadRequest
from baton.protocol.params.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (an array of them too), or {"prompt": text} / {"prompt_token_ids": ids}."""


def _plain(value: Any) -> Any:
    """Arrays (numpy, torch) as the lists that they stand for."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, ids or a mapping) counts as a list of one."""
    prompts = _plain(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: {prompts!r} must be a text, token ids, or a list of such")
    items: list[Any] = [item if type(item) in (list, str) else _plain(item) for item in prompts]
    if not items:
        raise ValueError("prompts: the list is empty; give at least one prompt")
    return [items] if all(map(_is_id, items)) else items


def token_ids(value: Any, where: str) -> list[int]:
    value = _plain(value)
    if type(value) is list and set(map(type, value)) <= {int}:
        return value.copy()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable):
        raise ValueError(f"{where}: {value!r} must be a text or a list of token ids")
    ids = [_plain(item) for item in value]
    if not all(map(_is_id, ids)):
        wrong = next(item for item in ids if not _is_id(item))
        raise ValueError(f"{where}: {wrong!r} must be a token id, an integer")
    return ids


def several_params(params: Any) -> list[SamplingParams]:
    return [one_params(one) for one in (params if isinstance(params, Sequence) else [params])]


def one_params(params: Any) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params: {params!r} must be SamplingParams")
    return params


def conversations_of(
    messages: Any, content_format: ContentFormat, notes: Notes
) -> list[list[dict[str, Any]]]:
    """One conversation, or several, checked."""
    if not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], list | tuple):
        return [messages_of(messages, content_format, notes)]
    conversations = []
    for number, conversation in enumerate(messages):
        try:
            conversations.append(messages_of(conversation, content_format, notes))
        except BadRequest as error:
            raise ValueError(f"conversation {number}: {error}") from None
    return conversations


def messages_of(messages: Any, content_format: ContentFormat, notes: Notes) -> list[dict[str, Any]]:
    return read_messages(list(messages) if isinstance(messages, tuple) else messages, content_format, notes)
