"""Conversations, checked, as `ChatTemplate.render` wants them.  Pure: for helpers and the Python API.

All three APIs come here: Anthropic's and the Responses API's conversations are made OpenAI's messages first,
so that one conversation makes one prompt, whichever of them it comes by.  What Baton gives out is taken back,
however it was cut: a message may be empty, what was thought may stand under several names, a call may have
ended inside of its arguments.  What SDKs write beside (`refusal: null`, `annotations`, `tool_calls: []`, …)
says nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from baton.gateway.api.call_arguments import Arguments, read_arguments
from baton.gateway.api.content import ARGUMENTS, Notes, Unsupported, joined, read_content, thoughts_in
from baton.gateway.api.custom import arguments_of
from baton.gateway.api.fields import MAX_ROLE
from baton.gateway.errors import BadRequest

RESERVED_VARIABLES = ("messages", "add_generation_prompt", "tools", "documents")
"""Of a chat template: no request sets them."""
MAX_TEMPLATE = 1 << 20
"""Characters."""
ContentFormat = Literal["string", "openai"]
"""How a message's text parts come to the template: joined by line breaks, or as OpenAI's list of parts."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thinking_blocks", "reasoning_details")
"""Names of what the model thought, as a text or as parts: of the first that has it."""

_RESULTS = ("tool", "function")
"""Roles of what tools gave."""

__all__ = ["MAX_TEMPLATE", "RESERVED_VARIABLES", "Arguments", "ContentFormat", "read_messages"]


def read_messages(
    messages: object, content_format: ContentFormat = "string", notes: Notes | None = None
) -> list[dict[str, Any]]:
    """OpenAI's messages as `ChatTemplate.render` wants them: content in this format, tool arguments objects,
    what the model thought as `reasoning`, results of tools with the tool's name.

    `messages` is a sequence of mappings, which stay as they are.  `notes`: what becomes of parts that are no
    texts; None: they are refused.  Raises `BadRequest`, which is a `ValueError`, with the place of what is
    wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise BadRequest("messages: give a list with at least one message", param="messages")
    notes = Notes(refuses=True) if notes is None else notes
    read = [_read_message(message, f"messages[{i}]", notes) for i, message in enumerate(messages)]
    if content_format == "string":
        for message in read:
            if isinstance(message["content"], list):
                message["content"] = joined(message["content"])
    _match_results(read)
    return _ordered(read)


def _ordered(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of a turn's calls in the order of the calls: many templates do not show which is whose."""
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    for are_results, several in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        some = list(several)
        if not are_results:
            calls = some[-1].get("tool_calls") or ()
            places = {call["id"]: i for i, call in enumerate(calls) if isinstance(call.get("id"), str)}
        elif all(message.get("tool_call_id") in places for message in some):
            some.sort(key=lambda message: places[message["tool_call_id"]])
        ordered += some
    return ordered


def _match_results(messages: Sequence[dict[str, Any]]) -> None:
    """A tool's result answers a call that came before it, and gets its name: some templates want it.  One
    without an id answers the next call that has none either; `function` is the role's older name."""
    called: dict[str, str] = {}
    unnamed: list[str] = []
    calls = False
    for i, message in enumerate(messages):
        if message.get("role") == "function" and calls:
            message["role"] = "tool"
        if message.get("role") == "tool":
            id = message.get("tool_call_id")
            if not calls:
                raise BadRequest(
                    f"messages[{i}]: a message of role tool must follow an assistant's message with "
                    "tool_calls; put that before it",
                    param="messages",
                )
            if isinstance(id, list | dict):
                raise BadRequest(f"messages[{i}].tool_call_id: must be a text", param="messages")
            if id is not None and called and id not in called:
                raise BadRequest(
                    f"messages[{i}].tool_call_id: no call before it has the id {str(id)[:100]!r}; give the "
                    "id of the call that it answers",
                    param="messages",
                )
            if id in called:
                message.setdefault("name", called[id])
            elif id is None and unnamed:
                message.setdefault("name", unnamed.pop(0))
        if message.get("tool_calls"):
            unnamed = []
        for call in message.get("tool_calls") or ():
            calls = True
            if isinstance(call.get("id"), str):
                called[call["id"]] = call["function"]["name"]
            else:
                unnamed.append(call["function"]["name"])


def _read_message(message: object, where: str, notes: Notes) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where}: must be an object with role and content", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE:
        raise BadRequest(
            f"{where}.role: {str(role)[:50]!r} must be a text such as system, user, assistant or tool",
            param="messages",
        )
    # (null is nothing: templates may ask whether a name is there.)
    result = {name: value for name, value in message.items() if value is not None}
    content = read_content(message.get("content"), f"{where}.content", notes, of_tool=role in _RESULTS)
    result["content"] = content.parts
    if role in _RESULTS and "tool_call_id" in result:
        result["tool_call_id"] = _id(result["tool_call_id"], f"{where}.tool_call_id")
    if role == "assistant":
        _read_turn(result, content.thoughts, content.calls, where, notes)
    elif not result.get("tool_calls"):
        result.pop("tool_calls", None)
    else:  # (of a role with a name of its own)
        result["tool_calls"] = _read_calls(result["tool_calls"], where, notes)
    if result["content"] is None and role not in ("assistant", *_RESULTS) and "tool_calls" not in result:
        raise BadRequest(f"{where}.content: a message of role {role} needs text", param="messages")
    if role in _RESULTS and result["content"] is None:
        result["content"] = ""
    return result


def _read_turn(
    message: dict[str, Any], thoughts: list[str], calls: list[dict[str, Any]], where: str, notes: Notes
) -> None:
    """The model's own: what it thought, said and called, under the names that all have."""
    own = ["\n".join(filter(None, thoughts_in(message.pop(name, None)))) for name in _THOUGHTS]
    thought = next(filter(None, own), "\n".join(thoughts))
    if thought:
        message["reasoning"] = message["reasoning_content"] = thought
    refusal = message.pop("refusal", None)
    if not message["content"] and isinstance(refusal, str):
        message["content"] = refusal
    if message.pop("audio", None) is not None:
        error = BadRequest(
            f"{where}.audio: is sound, and this model takes only text; leave it out",
            param="messages",
            code="unsupported_content",
        )
        note = {"type": "text", "text": notes.text_of(Unsupported("audio", error))}
        before = message["content"]
        parts = [{"type": "text", "text": before}] if isinstance(before, str) and before else before
        message["content"] = [*(parts or ()), note]
    message["content"] = message["content"] or None
    legacy = message.pop("function_call", None)
    given = message.pop("tool_calls", None) or ([{"function": legacy}] if legacy else [])
    called = _read_calls(given, where, notes)
    ids = {call.get("id") for call in called}
    called += [call for call in _read_calls(calls, where, notes) if call.get("id") not in ids]
    if called:
        message["tool_calls"] = called


def _id(given: object, where: str) -> str:
    """Of a call.  Raises `BadRequest`."""
    if not isinstance(given, str | int):
        raise BadRequest(f"{where}: must be a text", param="messages")
    return str(given)


def _read_calls(calls: object, where: str, notes: Notes) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where}.tool_calls: must be a list", param="messages")
    return [_read_call(call, f"{where}.tool_calls[{i}]", notes) for i, call in enumerate(calls)]


def _read_call(call: object, where: str, notes: Notes) -> dict[str, Any]:
    """Arguments are an object."""
    given: Mapping[str, Any] = call if isinstance(call, Mapping) else {}
    match given:
        case {"function": {} as function}:
            pass
        case {
            "custom": {"name": name, "input": str(text)}
        }:  # (of a tool that takes a text: as the model wrote it)
            function = {"name": name, "arguments": arguments_of(text)}
        case _:
            raise BadRequest(f"{where}: must be an object with a function", param="messages")
    if not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.function.name: it is missing; give the name of the tool", param="messages")
    if isinstance(given.get("id"), list | dict):
        raise BadRequest(f"{where}.id: must be a text", param="messages")
    arguments, whole = read_arguments(function.get("arguments"))
    if not whole:
        notes.add(ARGUMENTS)
    kept = {name: value for name, value in given.items() if value is not None and name != "custom"}
    if "id" in kept:
        kept["id"] = _id(kept["id"], f"{where}.id")
    return {**kept, "type": "function", "function": {**function, "arguments": arguments}}
