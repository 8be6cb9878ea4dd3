"""OpenAI's messages, checked, as chat templates want them.  Pure: for helpers and the Python API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from baton.gateway.api.fields import MAX_ROLE
from baton.gateway.errors import BadRequest

ContentFormat = Literal["string", "openai"]
"""How a message's text parts come to the template: joined by line breaks, or as OpenAI's list of parts."""


def read_messages(messages: object, content_format: ContentFormat = "string") -> list[dict[str, Any]]:
    """OpenAI's messages as `ChatTemplate.render` wants them: content in this format, tool arguments objects.

    `messages` is a sequence of mappings, which stay as they are.  Raises `BadRequest`, which is a
    `ValueError`, with the place of what is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequest("messages: give a list with at least one message", param="messages")
    return [_read_message(message, f"messages[{i}]", content_format) for i, message in enumerate(messages)]


def _read_message(message: object, where: str, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where}: must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE:
        raise BadRequest(
            f"{where}.role: {str(role)[:50]!r} must be a text such as system, user, assistant or tool",
            param="messages",
        )
    result = dict(message)
    parts = _read_content(message.get("content"), f"{where}.content")
    if isinstance(parts, list) and content_format == "string":
        result["content"] = "\n".join(part["text"] for part in parts)
    else:
        result["content"] = parts
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


def _read_content(content: object, where: str) -> str | list[dict[str, Any]] | None:
    """The text, or its parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: must be a text or a list of parts", param="messages")
    parts: list[dict[str, Any]] = []
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
        parts.append({"type": "text", "text": part["text"]})
    return parts


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
