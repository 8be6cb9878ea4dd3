"""What comes in as text or messages becomes token ids.  No HTTP.

`read_messages` is for whoever has a conversation: a request's body, or the Python API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from baton.gateway.errors import BadRequest, ContextTooLong
from baton.gateway.schemas import ChatFields
from baton.gateway.tokenizer import TextTooLong, Tokenizer

_MAX_ROLE = 64
"""Characters.  Which roles there are is the template's to say: some models have roles of their own."""
_CHARACTERS_PER_TOKEN = 256
"""A text of more characters than this times the context cannot fit; it is refused unread."""
_MANY_MESSAGES = 64
"""More are rendered outside of the event loop."""
_ALWAYS_MESSAGES = 1024
"""So many are allowed even if the context has fewer tokens."""


@dataclass(slots=True)
class Prompt:
    ids: list[int]
    text: str | None
    """As the client gave it; None where it gave ids."""


async def read_prompts(
    value: str | list[str] | list[int] | list[list[int]] | None,
    tokenizer: Tokenizer,
    *,
    max_model_len: int,
    add_special_tokens: bool,
) -> list[Prompt]:
    """The `prompt` of a completion request: text, texts, ids, or lists of ids, all of one kind.

    Raises `BadRequest`.  Ids and lengths are checked where the generation starts.
    """
    if isinstance(value, str):
        return await _encode([value], tokenizer, max_model_len, add_special_tokens)
    if not value:
        raise BadRequest(
            "prompt: give a text, a list of texts, a list of token ids, or a list of such lists",
            param="prompt",
        )
    many: list[Any] = value  # (what its first item is, all are)
    if isinstance(many[0], str):
        return await _encode(many, tokenizer, max_model_len, add_special_tokens)
    if isinstance(many[0], list):
        return [Prompt(ids, None) for ids in many]
    return [Prompt(many, None)]


async def read_chat(
    request: ChatFields, tokenizer: Tokenizer, *, max_model_len: int, add_special_tokens: bool
) -> Prompt:
    """The messages of a chat request, through the model's template."""
    count, most = len(request.messages or ()), max(max_model_len, _ALWAYS_MESSAGES)
    if count > most:
        raise ContextTooLong(
            max_model_len,
            f"your {count} messages cannot fit",
            f"Please reduce the length of the messages, to at most {most}",
            param="messages",
        )

    def render() -> str:
        return tokenizer.render_chat(
            read_messages(request.messages),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            variables=request.chat_template_kwargs,
        )

    text = render() if count <= _MANY_MESSAGES else await asyncio.to_thread(render)
    prompts = await _encode([text], tokenizer, max_model_len, add_special_tokens, field="messages")
    return prompts[0]


def read_messages(messages: object) -> list[dict[str, Any]]:
    """OpenAI's messages as `Tokenizer.render_chat` wants them: text content, tool arguments as objects.

    `messages` is a sequence of mappings, which stay as they are.  Raises `BadRequest`, which is a
    `ValueError`, with the place of what is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequest("messages: give a list with at least one message", param="messages")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where}: must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= _MAX_ROLE:
        raise BadRequest(
            f"{where}.role: {str(role)[:50]!r} must be a text such as system, user, assistant or tool",
            param="messages",
        )
    result = dict(message)
    result["content"] = _read_content(message.get("content"), f"{where}.content")
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls: must be a list", param="messages")
        result["tool_calls"] = [_read_tool_call(call, f"{where}.tool_calls") for call in calls]
    else:
        result.pop("tool_calls", None)
        if result["content"] is None and not message.get("function_call"):
            raise BadRequest(f"{where}.content: a message of role {role} needs text", param="messages")
    return result


def _read_content(content: object, where: str) -> str | None:
    """Text parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: must be a text or a list of parts", param="messages")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise BadRequest(
                f"{where}[{i}].type: {kind!r} is not supported, the model reads only text; send parts of "
                "type 'text'",
                param="messages",
            )
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}[{i}].text: must be a text", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)


def _read_tool_call(call: object, where: str) -> dict[str, Any]:
    """Templates print `arguments` as JSON themselves, so they want the object."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise BadRequest(f"{where}: each must be an object with a function", param="messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            function["arguments"] = msgspec.json.decode(arguments) if arguments else {}
        except msgspec.MsgspecError:
            raise BadRequest(f"{where}: function.arguments must be JSON", param="messages") from None
    return {**call, "function": function}


async def _encode(
    texts: list[str],
    tokenizer: Tokenizer,
    max_model_len: int,
    add_special_tokens: bool,
    field: str = "prompt",
) -> list[Prompt]:
    try:
        for text in texts:
            if len(text) > max_model_len * _CHARACTERS_PER_TOKEN:
                raise TextTooLong(len(text))
        rows = await tokenizer.encode_async(texts, add_special_tokens=add_special_tokens, limit=max_model_len)
    except TextTooLong as error:
        raise ContextTooLong(
            max_model_len,
            f"your {field} of {error.length} characters cannot fit",
            f"Please reduce the length of the {field}",
            param=field,
        ) from None
    return [Prompt(ids, text) for ids, text in zip(rows, texts, strict=True)]
