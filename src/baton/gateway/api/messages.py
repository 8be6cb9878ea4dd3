"""OpenAI's messages, checked, as chat templates want them.  Pure: for helpers and the Python API."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from baton.gateway.api.custom import arguments_of
from baton.gateway.api.fields import MAX_ROLE
from baton.gateway.errors import BadRequest

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of parts that are texts, by the field that has it: OpenAI's two APIs, as in vLLM."""
_NO_TEXTS = {"image": "an image", "audio": "sound", "video": "a video", "file": "a file"}
"""What a part is whose kind has such a word."""
_PARTS_BYTES = 1 << 16
"""Longer values are not looked into, to say what was wrong in them."""

RESERVED_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents")
"""Of a chat template: no request sets them."""
MAX_TEMPLATE = 1 << 20
"""Characters."""
ContentFormat = Literal["string", "openai"]
"""How a message's text parts come to the template: joined by line breaks, or as OpenAI's list of parts."""


def read_messages(messages: object, content_format: ContentFormat = "string") -> list[dict[str, Any]]:
    """OpenAI's messages as `ChatTemplate.render` wants them: content in this format, tool arguments objects.

    `messages` is a sequence of mappings, which stay as they are.  Raises `BadRequest`, which is a
    `ValueError`, with the place of what is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequest("messages: give a list with at least one message", param="messages")
    read = [_read_message(message, f"messages[{i}]", content_format) for i, message in enumerate(messages)]
    _check_order(read)
    return read


class Arguments(dict[str, Any]):
    """A call's arguments for chat templates: some print them as JSON themselves, and want an object; some
    join them to a text."""

    def __init__(self, value: Mapping[str, Any], text: str | None = None) -> None:
        """`text`: as the client gave them."""
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return json.dumps(dict(self), ensure_ascii=False) if self._text is None else self._text

    def __add__(self, other: object) -> str:
        return str(self) + str(other)

    def __radd__(self, other: object) -> str:
        return str(other) + str(self)


def _check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """A tool's result answers a call that came before it."""
    called: set[str] = set()
    calls = False
    for i, message in enumerate(messages):
        if message.get("role") == "tool":
            id = message.get("tool_call_id")
            if not calls:
                raise BadRequest(
                    f"messages[{i}]: a message of role tool must follow an assistant's message with "
                    "tool_calls; put that before it",
                    param="messages",
                )
            if id is not None and called and id not in called:
                raise BadRequest(
                    f"messages[{i}].tool_call_id: no call before it has the id {str(id)[:100]!r}; give the "
                    "id of the call that it answers",
                    param="messages",
                )
        for call in message.get("tool_calls") or ():
            calls = True
            if isinstance(call.get("id"), str):
                called.add(call["id"])


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
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise BadRequest(f"{where}[{i}]: must be a part: {{'type': 'text', 'text': …}}", param="messages")
        field = _TEXTS.get(str(part.get("type")))
        if field is None:
            raise _not_a_text(part, f"{where}[{i}].type", "messages")
        if not isinstance(part.get(field), str):
            raise BadRequest(f"{where}[{i}].{field}: must be a text", param="messages")
        parts.append({"type": "text", "text": part[field]})
    return parts


def _not_a_text(part: Mapping[str, Any], where: str, param: str) -> BadRequest:
    """The error for a part that is none: what it is, and what the model takes."""
    # (Some clients leave the type away: then the field that has the value tells it.)
    kind = str(part["type"]) if part.get("type") is not None else next(iter(map(str, part)), "")
    what = next((what for word, what in _NO_TEXTS.items() if word in kind), "no text")
    return BadRequest(
        f"{where}: {kind[:50]!r} is {what}, and this model takes only text; send parts of type 'text'",
        param=param,
        code="unsupported_content",
    )


def refuse_parts(data: bytes, field: str) -> None:
    """Of JSON where texts belong and something else is.  Raises `BadRequest` for images and sound in the
    shapes of several APIs: `{"type": "image_url", …}`, `{"image": …}`, `{"content": [{"type": …}]}`."""
    if len(data) <= _PARTS_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            _check_no_parts(msgspec.json.decode(data), field)


def _check_no_parts(value: object, field: str) -> None:
    items = value if isinstance(value, list) else [value]
    for i, item in enumerate(items):
        where = f"{field}[{i}]" if isinstance(value, list) else field
        if isinstance(item, Mapping):
            _check_no_parts(item.get("content"), f"{where}.content")
            if any(word in str(item.get("type") or list(item)) for word in _NO_TEXTS):
                raise _not_a_text(item, where, re.split(r"[.\[]", field)[0])


def _read_tool_call(call: object, where: str) -> dict[str, Any]:
    """Arguments are a JSON object."""
    if isinstance(call, Mapping) and isinstance(call.get("custom"), Mapping):
        call = _as_function(call, where)
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise BadRequest(f"{where}: each must be an object with a function", param="messages")
    function = dict(call["function"])
    arguments = function.get("arguments")
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}: function.name is missing; give the name of the tool", param="messages")
    value = arguments
    if isinstance(arguments, str):
        try:
            value = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.MsgspecError, RecursionError):
            raise BadRequest(f"{where}: function.arguments must be JSON", param="messages") from None
    if isinstance(value, Mapping):
        text = arguments if isinstance(arguments, str) and arguments.strip() else None
        value = Arguments(value, text)
    function["arguments"] = {} if value is None else value
    return {**call, "function": function}


def _as_function(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Of a tool that takes a text: as the model wrote it."""
    custom = call["custom"]
    if not isinstance(custom.get("name"), str) or not isinstance(custom.get("input"), str):
        raise BadRequest(f"{where}: custom must have name and input, both texts", param="messages")
    function = {"name": custom["name"], "arguments": arguments_of(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}
