"""/v1/responses/compact: a conversation becomes its users' messages and a summary.

The model writes the summary, with the conversation before it; what does not fit is left out from the front.
The answer's items may be given as the input of later requests.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from baton.gateway.api.schemas import ChatRequest
from baton.gateway.responses.other_items import sealed_summary
from baton.gateway.responses.schemas import ResponsesRequest
from baton.gateway.responses.translation import Known, ReadResponses, listed, translate

_MOST_TOKENS = 2048
_PART = 4
"""A summary may take one part in so many of the context."""
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
    asked = msgspec.structs.replace(
        body,
        tools=None,
        tool_choice=None,
        text=None,
        include=None,
        stream=None,
        stream_options=None,
        top_logprobs=None,
        structured_outputs=None,
        truncation="auto",
        max_output_tokens=min(body.max_output_tokens or most, most),
    )
    read, chat, _ = translate(asked, keeps=keeps, known=known)
    if chat is None:
        return read, None, []
    chat.messages = [*(chat.messages or ()), {"role": "user", "content": _TASK}]
    chat.chat_template_kwargs = {
        "enable_thinking": False,
        "thinking": False,
        **(chat.chat_template_kwargs or {}),
    }
    read.keeps = False
    given = body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input or ""}]
    history = [msgspec.json.decode(item) for item in (known or Known()).history]
    read.items = [listed(item) for item in [*history, *given] if _is_users(item)]
    return read, chat, []


def _is_users(item: object) -> bool:
    return (
        isinstance(item, Mapping)
        and item.get("role") == "user"
        and item.get("type") in (None, "message")
        and bool(item.get("content"))
    )


def compaction_item(summary: str) -> dict[str, Any]:
    return {
        "id": f"cmp_{secrets.token_hex(16)}",
        "type": "compaction",
        "encrypted_content": sealed_summary(summary),
    }
