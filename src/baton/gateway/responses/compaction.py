"""/v1/responses/compact: a conversation becomes its users' messages and a summary.

The model writes the summary, with the conversation before it; what does not fit is left out from the front.
The answer's items may be given as the input of later requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.api.schemas import ChatRequest
from baton.gateway.api.tools import read_tools
from baton.gateway.responses.other_items import sealed_summary
from baton.gateway.responses.schemas import ResponsesRequest
from baton.gateway.responses.translation import Known, ReadResponses, listed, resolved, translate

_MOST_TOKENS = 2048
_PART = 4
"""A summary may take one part in so many of the context."""
_KEPT_PART = 2
"""Bytes of the users' messages that are kept, likewise: a token is a byte or more."""
_MESSAGE_BYTES, _OTHER_BYTES = 16, 128
"""What a message takes besides its text, and a part that is no text, for which a note stands."""
_CUT = " […]"
_TASK = (
    "Write a summary of this conversation for somebody who goes on with it and has only your summary and the "
    "user's messages. Say what was asked for, what was done and decided and why, what was learned (names of "
    "files, commands, values, errors), and what is left to do. Write nothing else, and call no tools."
)


def compacting(
    body: ResponsesRequest, *, keeps: bool, known: Known | None, max_model_len: int
) -> tuple[ReadResponses, ChatRequest | None, list[str]]:
    """As `translation.translate`; the items are the users' messages.  Raises `BadRequest`."""
    most = max(1, min(_MOST_TOKENS, max_model_len // _PART))
    given: list[Any] = body.input if isinstance(body.input, list) else []
    if isinstance(body.input, str) and body.input:
        given = [{"role": "user", "content": body.input}]
    whole = body.input is None and body.previous_response_id is not None
    asked = msgspec.structs.replace(
        body,
        input=[] if whole else body.input,
        truncation="auto" if body.truncation in (None, "disabled") else body.truncation,
        max_output_tokens=min(body.max_output_tokens or most, most),
    )
    read, chat, _ = translate(asked, keeps=keeps, known=known)
    if chat is None:
        return read, None, []
    read_tools(chat.tools, chat.tool_choice)  # (of no effect, as what follows, but not whatever they are)
    chat.tools = chat.tool_choice = chat.response_format = chat.structured_outputs = None
    chat.stream = chat.logprobs = chat.top_logprobs = None
    chat.messages = [*(chat.messages or ()), {"role": "user", "content": _TASK}]
    chat.chat_template_kwargs = {
        "enable_thinking": False,
        "thinking": False,
        **(chat.chat_template_kwargs or {}),
    }
    read.keeps = False
    known = known or Known()
    history = [msgspec.json.decode(item) for item in known.history]
    users = [item for item in [*history, *resolved(given, known)] if _is_users(item)]
    read.items = [listed(item) for item in _newest(users, max_model_len // _KEPT_PART)]
    return read, chat, []


def _is_users(item: object) -> bool:
    return (
        isinstance(item, Mapping)
        and item.get("role") == "user"
        and item.get("type") in (None, "message")
        and bool(item.get("content"))
    )


def _newest(items: Sequence[Mapping[str, Any]], room: int) -> list[Mapping[str, Any]]:
    """The last of them that fit into so many bytes, so that what is given back fits into the context; the
    first of those is cut."""
    kept: list[Mapping[str, Any]] = []
    for item in reversed(items):
        size = _MESSAGE_BYTES + sum(
            _OTHER_BYTES if text is None else len(text.encode()) for text in _texts(item["content"])
        )
        if size > room:
            text = "".join(filter(None, _texts(item["content"]))).encode()
            head = text[: max(room - _MESSAGE_BYTES, 0)].decode(errors="ignore")
            if head:
                kept.append({**item, "content": head + _CUT})
            break
        kept.append(item)
        room -= size
    return kept[::-1]


def _texts(content: object) -> Iterator[str | None]:
    """Of a message's content; None: a part that is no text."""
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) else part
        yield text if isinstance(text, str) else None


def compaction_item(summary: str) -> dict[str, Any]:
    return {
        "id": f"cmp_{secrets.token_hex(16)}",
        "type": "compaction",
        "encrypted_content": sealed_summary(summary),
    }
