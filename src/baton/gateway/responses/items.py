"""Items of a conversation as messages of a chat.

What a model says in one turn comes as several items (reasoning, texts, calls) and is one message of a chat.
Items that only this server could have given are taken as it gives them, cut off or not; what another one
would have to read (files, images, calls of hosted tools) is noted, or refused by its type (`api/content.py`).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from typing import Any

from baton.gateway.api.content import Unsupported, is_parts, said_on
from baton.gateway.errors import BadRequest
from baton.gateway.responses.other_items import (
    ASKS_NOTHING,
    as_action_call,
    as_action_output,
    as_answered_call,
    as_function_call,
    compacted,
    name_of,
)

_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_WORDS = {
    "image": "an image",
    "file": "a file",
    "audio": "sound",
    "video": "a video",
    "screenshot": "an image",
}
_OF_OTHERS = re.compile(r"_call(_output)?$|^mcp_|^compaction")
"""Kinds of items that OpenAI's own tools and servers leave in a conversation."""
_SEALED = "baton.reasoning.1:"
"""What `encrypted_content` of this server begins with; what another one has sealed is left out."""

Message = dict[str, Any]


class Turns:
    """Messages, made item by item."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open: Message | None = None
        """The model's message that more items may belong to."""
        self._called: dict[str, str] = {}
        """A call's ids → the one that its result names."""

    def say(self, role: str, text: str) -> None:
        """A message that is no item."""
        self._open = None
        self.messages.append({"role": role, "content": text})

    def add(self, item: object, where: str) -> None:
        """Raises `BadRequest` with the place of what is wrong."""
        if not isinstance(item, Mapping):
            raise _wrong(where, "must be an item, an object")
        match item.get("type"):
            case "message":
                self._message(item, where)
            case None if "role" in item:
                self._message(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                self._output(item, where)
            case "custom_tool_call":
                self._call(as_function_call(item, where), where)
            case "local_shell_call" | "shell_call" | "apply_patch_call":
                self._call(as_action_call(item, where), where)
            case "local_shell_call_output" | "shell_call_output" | "apply_patch_call_output":
                self._output(as_action_output(item), where)
            case "compaction" | "compaction_summary":
                self.say("user", compacted(item, where))
            case "mcp_call" | "code_interpreter_call":
                call, output = as_answered_call(item)
                self._call(call, where)
                self._output(output, where)
            case str(kind) if kind in ASKS_NOTHING:
                pass
            case "reasoning":
                self._reasoning(item, where)
            case None:
                raise _wrong(f"{where}.type", "it is missing; give message, function_call, …")
            case str(kind) if _OF_OTHERS.search(kind):
                self._of_others(kind, where)
            case kind:
                raise _not_known(kind, where)

    def _of_others(self, kind: str, where: str) -> None:
        """What another server or model has done, and this one cannot read."""
        part = Unsupported(kind, _not_known(kind, where))
        if kind.endswith("_output"):
            self._open = None
            self.messages.append({"role": "user", "content": [part]})
        else:
            self._say([part])

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _wrong(f"{where}.role", f"{str(role)[:50]!r} must be user, assistant, system or developer")
        if item.get("tool_calls"):
            raise _wrong(f"{where}.tool_calls", "are of chats; give each as an item of type function_call")
        given = item.get("content")
        if given is None and role == "assistant":
            given = ""
        content = content_of(given, f"{where}.content")
        if role != "assistant":
            self._open = None
            self.messages.append({"role": role, "content": content})
        else:
            self._say(content)

    def _say(self, content: str | list[Any]) -> None:
        """More of what the model says."""
        turn = self._open
        if turn is not None and "tool_calls" in turn:
            turn["content"] = said_on(turn["content"], content)
        elif turn is not None and turn["content"] is None:
            turn["content"] = content
        else:
            self._begin()["content"] = content

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        id = item.get("call_id") or item.get("id")
        if not isinstance(id, str):
            raise _wrong(f"{where}.call_id", "it is missing; give a text")
        if not isinstance(item.get("name"), str):
            raise _wrong(f"{where}.name", "it is missing; give a text")
        self._called[id] = id
        if isinstance(item.get("id"), str):  # (by which OpenAI's outputs of local shells name it)
            self._called.setdefault(item["id"], id)
        turn = self._open or self._begin()
        function = {"name": name_of(item), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        call = item.get("call_id")
        if not isinstance(call, str):
            raise _wrong(f"{where}.call_id", "it is missing; give that of the call that it answers")
        if call not in self._called:
            raise _wrong(
                f"{where}.call_id",
                f"no function_call before it has the call_id {call[:100]!r}; put the call before its output",
            )
        output = item.get("output")
        if is_parts(output) and all(isinstance(part, Mapping) and "type" in part for part in output):
            output = content_of(output, f"{where}.output")
        self._open = None
        self.messages.append({"role": "tool", "tool_call_id": self._called[call], "content": output})

    def _reasoning(self, item: Mapping[str, Any], where: str) -> None:
        text = _thoughts(item, where)
        turn = self._open
        if turn is None or (turn["content"] is not None and "tool_calls" not in turn):
            turn = self._begin()
        if text:
            turn["reasoning"] = "\n".join(filter(None, (turn.get("reasoning"), text)))

    def _begin(self) -> Message:
        self._open = {"role": "assistant", "content": None}
        self.messages.append(self._open)
        return self._open

    def finished(self) -> list[Message]:
        """All of them."""
        return self.messages


def _not_known(kind: object, where: str) -> BadRequest:
    return _wrong(
        f"{where}.type",
        f"{str(kind)[:50]!r} is not supported; items are message, function_call, function_call_output, "
        "reasoning and item_reference",
        code="unsupported_parameter",
    )


def content_of(content: object, where: str) -> str | list[Any]:
    """A text, or the parts of one, as of a chat; `Unsupported` for those that are no texts.  Raises
    `BadRequest`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "must be a text or a list of parts")
    parts: list[Any] = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(part, Mapping):
            raise _wrong(place, "must be a part: {'type': 'input_text', 'text': …}")
        kind = part.get("type")
        field = "text" if kind is None and "text" in part else _TEXTS.get(str(kind))
        if field is None:
            parts.append(_unsupported(str(kind), f"{place}.type"))
        elif not isinstance(part.get(field), str):
            raise _wrong(f"{place}.{field}", "must be a text")
        else:
            parts.append({"type": "text", "text": part[field]})
    return parts[0]["text"] if len(parts) == 1 and isinstance(parts[0], dict) else parts


def _unsupported(kind: str, where: str) -> Unsupported:
    what = next((what for word, what in _WORDS.items() if word in kind), "no text")
    error = _wrong(
        where,
        f"{kind[:50]!r} is {what}, and this model takes only text; send parts of type 'input_text'",
        code="unsupported_content",
    )
    return Unsupported(kind, error)


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    """What the model thought: in the open, or as `sealed` here."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    if content is not None and not isinstance(content, list):
        raise _wrong(f"{where}.content", "must be a list of parts of type 'reasoning_text'")
    texts = [
        part["text"]
        for part in content or ()
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
    ]
    if texts:
        return "".join(texts)
    given = item.get("encrypted_content")
    if isinstance(given, str) and (text := unsealed(given)):
        return text
    summary = item.get("summary")
    return "\n".join(
        part["text"]
        for part in (summary if isinstance(summary, list) else ())
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
    )


def sealed(reasoning: str) -> str:
    """`encrypted_content`, for clients that give back nothing else of what the model thought.  It is in the
    answer as text, too, so it is no secret."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode("ascii")


def unsealed(given: str) -> str:
    """What was sealed here; "" for all else."""
    if not given.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(given[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def references(items: Iterable[object]) -> list[str]:
    """Ids of items that are only named.  (One without a type is that, too, as OpenAI has it.)"""
    return [item["id"] for item in items if is_reference(item)]  # type: ignore[index]


def is_reference(item: object) -> bool:
    if not isinstance(item, Mapping) or not isinstance(item.get("id"), str):
        return False
    return item.get("type") == "item_reference" or (
        item.get("type") is None and item.keys() <= {"id", "type"}
    )


def _wrong(where: str, what: str, code: str | None = None) -> BadRequest:
    return BadRequest(f"{where}: {what}", param="input", code=code)
